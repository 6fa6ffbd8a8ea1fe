"""Serving engines: launched, adopted, watched, drained.

What the rest of the house uses: a `Fleet` of `Replica`s, each in one `State`, of which those in
`TAKES_TRAFFIC` may get requests; `Facts` is what an engine at a URL told about itself. Nothing here
knows prompts, policies or the gateway.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicas.adopt import Facts
    from replicas.fleet import Fleet
    from replicas.lifecycle import TAKES_TRAFFIC, State
    from replicas.replica import Replica

__all__ = ["TAKES_TRAFFIC", "Facts", "Fleet", "Replica", "State"]

_HOME = {"Facts": "adopt", "Fleet": "fleet", "Replica": "replica", "State": "lifecycle", "TAKES_TRAFFIC": "lifecycle"}


def __getattr__(name: str):
    """Import on first use: aiohttp and pydantic cost 0.2 s, and the simulated engine and the load
    generator, which live in or import this package too, need not pay for the fleet."""
    if name not in _HOME:
        raise AttributeError(f"module 'replicas' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"replicas.{_HOME[name]}"), name)
