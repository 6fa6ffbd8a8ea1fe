"""Loads in virtual time: routing policies against simulated engines, any number of them, at the speed of computation.

`setting` says what a fleet is made of; `fleet` has the engines (`replica`) and the gateways (`gateway`, with `holders`
as its map); `links` moves KV caches between engines; `run` plays a workload (`prompts` hashes its conversations);
`rules` looks policies up by name; `verb` is `loadgen simulate`.
"""

from .fleet import Fleet
from .links import Network, Transfer
from .run import Outcome, simulate
from .setting import Outage, Setting
from .turns import Record, Result, Turn

__all__ = ["Fleet", "Network", "Outage", "Outcome", "Record", "Result", "Setting", "Transfer", "Turn", "simulate"]
