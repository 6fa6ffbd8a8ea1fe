"""Serving engines: launching, adopting, watching and draining them.

A replica is one engine, or one data-parallel rank of an engine. To adopt an engine is to use one that somebody else
started. The rest of the project uses a `Fleet` of `Replica`s, each in one `State`; replicas in a state of
`TAKES_TRAFFIC` may get requests. `Facts` has what an engine at a URL reports about itself. Nothing here knows prompts,
policies or the gateway.
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
    """Import a public name on first use.

    aiohttp and pydantic take 0.2 s to import. The simulated engine and the load generator import this package too, and
    need not wait for these two.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'replicas' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"replicas.{_HOME[name]}"), name)
