"""Seats: how many requests an engine runs at once (vLLM's `max_num_seqs`), which its metrics do not tell.

A prompt waits in its engine for the step that computes others, for cache, or for a seat. It is a seat where nobody's
prompt is computed although some wait, and there is cache: then as many are seated as write. One scrape may show that by
chance, between two steps, so it takes a few that count the same. More that write, or none that wait for a long time
while all seats are taken, show that there are more. Pure.
"""

from __future__ import annotations

from math import inf

from .ledger import Load

ENOUGH = 3  # scrapes in a row that have to agree
CALM = 10  # scrapes without anybody waiting, all seats taken, after which one seat more is tried
FULL = 0.9  # of the cache, from which on it may be cache that is waited for


class Seats:
    __slots__ = ("count", "_decoding", "_seen", "_calm")

    def __init__(self) -> None:
        self.count: float = inf  # infinite: not known to be short
        self._decoding = self._seen = self._calm = 0

    def scraped(self, load: Load) -> float:
        """Take over a load that was just scraped; return the count."""
        if load.decoding > self.count:
            self.count = inf
        if not load.waiting:
            self._seen = 0
            self._calm += load.requests >= self.count
            if self._calm >= CALM:
                self.count, self._calm = self.count + 1, 0
        elif load.decoding and load.prefilling <= load.waiting and load.kv_usage < FULL:
            self._seen = self._seen + 1 if load.decoding == self._decoding else 1
            self._decoding = load.decoding
            if self._seen >= ENOUGH:
                self.count, self._calm = float(load.decoding), 0
        return self.count
