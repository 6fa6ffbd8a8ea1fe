"""Simulation of a load in virtual time: gateways with a routing policy before any number of simulated engines.

`setting`: what a fleet consists of. `fleet`: its engines (`replica`), gateways (`gateway`, with `gate` for admission
and `holders` as the map of cached KV blocks) and virtual clock. `links`: transfers of KV caches between engines.
`prompts`: makes block hashes of a workload's prompts. `run`: plays the workload on the fleet. `rules`: finds policies
by name. `verb`: the command `loadgen simulate`.
"""

from .fleet import Fleet
from .links import Network, Transfer
from .run import Outcome, simulate
from .setting import Outage, Setting
from .turns import Record, Result, Turn

__all__ = ["Fleet", "Network", "Outage", "Outcome", "Record", "Result", "Setting", "Transfer", "Turn", "simulate"]
