"""A global prefill queue, as Dynamo had it until 0.7: first legs wait in one line, and whoever is free takes the next.

`queue`     two legs where the gateway's own rule would have them, and it is the prefiller that waits for a request
            rather than a request for the prefiller: none is sent a second prompt while it computes one.
`queue:N`   Dynamo's conditional disaggregation: two legs where N prompt tokens or more are not cached on the decoder
            and fewer than two requests wait in the queue (its defaults: 1,000 tokens, 2 requests).

Source: Dynamo's documentation, archive of 0.2 to 0.7, "Disaggregation: Separating Prefill and Decode" (conditional
disaggregation, prefill queue). Its queue lies in NATS, so it is one of all frontends here, too. A decoder is chosen
first, and its blocks are counted from then on, as there. Left out: a prefiller that takes several prompts at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from policies import leg_rules, legs

NAMES = ("queue", "queue:N")
MOST_WAITING = 2

One = TypeVar("One")


class PrefillQueue(Generic[One]):
    """Who waits for a prefiller, and which prefillers have something to compute."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._waiting: deque[One] = deque()
        self._busy: set[int] = set()

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._most

    def add(self, one: One) -> None:
        self._waiting.append(one)

    def ready(self, prefillers: Iterable[int]) -> Iterator[tuple[int, One]]:
        """Take those whose turn it is, each with a prefiller that is free."""
        for free in prefillers:
            if self._waiting and free not in self._busy:
                self._busy.add(free)
                yield free, self._waiting.popleft()

    def freed(self, prefiller: int) -> None:
        self._busy.discard(prefiller)

    def leave(self) -> list[One]:
        """Take all that wait: nobody is going to compute for them."""
        left, self._waiting = [*self._waiting], deque()
        return left


def make_legs(text: str) -> tuple[legs.LegRule, PrefillQueue | None]:
    """The rule of this name, and its queue. ValueError where there is none."""
    name, _, threshold = text.partition(":")
    if text == "queue":
        return legs.choose, PrefillQueue(float("inf"))
    if name == "queue" and threshold.isascii() and threshold.isdigit():
        return leg_rules.make_leg_rule(f"over:{threshold}"), PrefillQueue(MOST_WAITING)
    try:
        return leg_rules.make_leg_rule(text), None
    except ValueError:
        raise ValueError(f"{text!r} is no rule for legs; there are {', '.join((*leg_rules.NAMES, *NAMES))}") from None
