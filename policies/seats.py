"""Seats: how many requests an engine runs at once (vLLM's `max_num_seqs`), which its metrics do not tell.

A prompt waits in its engine for the step that computes others, for cache, for one that is fetched, or for a seat. It is
a seat where as many run at each look while others wait, there is cache, and all that are taken to decode do run: a step
of prompts lets others run behind it, and what is fetched is counted here as decoding. More that run, or none that wait
for a long time while all seats are taken, show that there are more. Pure.
"""

from __future__ import annotations

from math import inf

from .ledger import Load

ENOUGH = 5  # scrapes in a row that have to agree
CALM = 10  # scrapes in a row without anybody waiting, all seats taken, after which one seat more is tried
FULL = 0.9  # of the cache, from which on it may be cache that is waited for


class Seats:
    __slots__ = ("count", "_running", "_seen", "_calm")

    def __init__(self) -> None:
        self.count: float = inf  # infinite: not known to be short
        self._running = self._seen = self._calm = 0

    def scraped(self, load: Load, running: int) -> float:
        """Take over a load that was just scraped, and how many run, whoever sent them; return the count."""
        if running > self.count:
            self.count = inf
        short = load.waiting > 0 and load.kv_usage < FULL and 0 < running >= load.decoding
        self._seen = (self._seen + 1 if running == self._running else 1) if short else 0
        self._running = running
        if self._seen >= ENOUGH:
            self.count = float(running)
        self._calm = self._calm + 1 if not load.waiting and load.requests >= self.count else 0
        if self._calm >= CALM:
            self.count, self._calm = self.count + 1, 0
        return self.count
