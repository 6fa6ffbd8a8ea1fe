"""Loads in virtual time: gateways' policies and simulated engines, as many as one likes, as fast as they compute.

`fleet` has the engines (`replica`) and the gateways (`gateway`, with `holders` for a map); `run` plays a workload on it
(`prompts` hashes its conversations), `field` has the rules of other routers; `verb` is `loadgen simulate`.
"""

from .fleet import Fleet
from .run import Outage, Outcome, Setting, simulate
from .turns import Record, Result, Turn

__all__ = ["Fleet", "Outage", "Outcome", "Record", "Result", "Setting", "Turn", "simulate"]
