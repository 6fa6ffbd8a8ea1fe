"""Loads in virtual time: gateways' policies and simulated engines, as many as one likes, as fast as they compute.

`fleet` has the engines (`replica`) and the gateways (`gateway`, with `holders` for a map); `run` plays a workload on it
(`prompts` hashes its conversations), `play` ready-made turns; `verb` is `loadgen simulate`.
"""

from .fleet import Fleet
from .play import backlog, pace, play
from .run import Outage, Outcome, Setting, simulate
from .turns import Conversation, Record, Result, Turn, ideal_hit_rate

__all__ = ["Conversation", "Fleet", "Outage", "Outcome", "Record", "Result", "Setting", "Turn", "backlog", "ideal_hit_rate",
           "pace", "play", "simulate"]
