"""What a rule of the field sees beyond the product's `Demand`, and the hooks it may have.

The product needs neither: its map knows who holds what, and its costs are learned from what the gateway
observes. Several peers keep a guess of the caches of their own, from the prompts they sent and when.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Sequence

from policies import Candidate, Choice, Demand, Policy


@dataclass(slots=True)
class Asked(Demand):
    """One request, as a rule of the field may want to know it."""
    now: float = 0.0                 # seconds, virtual; always told


class Rule(Policy, Protocol):
    """A policy that may hear what became of its choices. A caller looks each hook up once, by getattr: a
    rule has only those it needs."""

    def placed(self, asked: Asked, candidates: Sequence[Candidate], choice: Choice) -> None:
        """The request went to the candidate at `choice.index`."""
        ...

    def first(self, replica: str, asked: Asked) -> None:
        """Its first token came; `asked.now` is still when it was sent."""
        ...

    def ended(self, replica: str, asked: Asked) -> None:
        """Its reservation was released, however it ended."""
        ...

    def gone(self, replica: str) -> None:
        """A replica's incarnation ended, and with it all it held."""
        ...
