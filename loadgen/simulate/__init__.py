"""Loads in virtual time: gateways' policies and simulated engines, as many as one likes, as fast as they compute.

`fleet` has the engines (`replica`) and the gateways (`gateway`, with `holders` for a map), `links` moves caches from
engine to engine; `run` plays a workload on it (`prompts` hashes its conversations), `rules` knows the
policies' names; `verb` is `loadgen simulate`.
"""

from .fleet import Fleet
from .links import Network, Transfer
from .run import Outage, Outcome, Setting, simulate
from .turns import Record, Result, Turn

__all__ = ["Fleet", "Network", "Outage", "Outcome", "Record", "Result", "Setting", "Transfer", "Turn", "simulate"]
