"""Launching, adopting, watching and draining of serving engines (vLLM, SGLang, or the simulated one).

A replica is one engine, or one data-parallel rank of an engine. Adopting an engine means using one that somebody else
started. The rest of the project works with a `Fleet`, which has all `Replica`s of one gateway. Each replica is in one
`State` of its life cycle, and may get requests while that state is in `TAKES_TRAFFIC`. `Facts` has what an engine at a
URL reports about itself. This package knows nothing of prompts, routing policies or the gateway.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicas.adopt import Facts
    from replicas.fleet import Fleet
    from replicas.lifecycle import TAKES_TRAFFIC, State
    from replicas.replica import Replica

__all__ = ["TAKES_TRAFFIC", "Facts", "Fleet", "Replica", "State"]

_HOME = {"Facts": "adopt", "Fleet": "fleet", "Replica": "replica", "State": "lifecycle", "TAKES_TRAFFIC": "lifecycle"}


def __getattr__(name: str) -> object:
    """Import a public name of this package on its first use.

    Most of these names need aiohttp and pydantic, whose import takes 0.2 s. Simulations and the load generator import
    this package too, but need neither.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'replicas' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"replicas.{_HOME[name]}"), name)
