"""MaxNumSeqs: how many requests an engine runs at once (vLLM's `max_num_seqs`), learned because no metric reports it.

A prompt waits in its engine for the current step, for free KV cache, for a transfer, or for a place among the requests
that run. A lack of places is inferred from several scrapes in a row, in all of which the same number of requests
runs while others wait. The cache must not be nearly full then, and no fewer requests may run than the ledger counts as
decoding (its count includes requests whose cache is being fetched). The number of places is raised again if more
requests run than it allows, or if no request waits for a while although all places are taken.
"""

from __future__ import annotations

from math import inf

from .ledger import Load

ENOUGH = 5  # how many scrapes in a row have to agree on the number
CALM = 10  # after so many scrapes in a row without waiting requests although all places are taken, one more is assumed
FULL = 0.9  # from this share of the KV cache in use, requests may be waiting for cache


class MaxNumSeqs:
    """The number of requests that one engine runs at once, learned from scrapes."""

    __slots__ = ("count", "_running", "_seen", "_calm")

    def __init__(self) -> None:
        self.count: float = inf  # the number of requests; infinite: no limit noticed yet
        self._running = self._seen = self._calm = 0

    def scraped(self, load: Load, running: int) -> float:
        """Learn from a scrape of the engine's metrics, and return how many requests the engine runs at once.

        The result is infinite while no limit was noticed. `load`: the load of the engine's replica. `running`: how many
        requests of all clients run there now.
        """
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
