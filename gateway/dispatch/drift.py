"""Predict, then check: does a replica's part of the map still tell the truth?

Two witnesses. A response that reports its cached tokens is compared at once. Engines that report
nothing still count `prefix_cache_hits` (in tokens); the growth of that counter is compared with what was
predicted for the requests sent there meanwhile. Pure: numbers in, a verdict out.
"""

from __future__ import annotations

# A prediction can be off by what was evicted or stored between choice and prefill. Over a window that averages
# out to under 1 % (bench.exactness); a tenth of all prompt tokens wrong means the map itself is wrong.
TOLERATED = 0.10
WINDOW = 32


class Drift:
    """Running comparison for one replica. All figures in tokens."""

    __slots__ = ("_count", "_error", "_tokens", "_promised", "_prompts", "_hits", "verdicts")

    def __init__(self) -> None:
        self.verdicts = 0
        self._hits: float | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a new window, after a heal or a new incarnation."""
        self._count = self._error = self._tokens = 0
        self._promised = self._prompts = 0

    def reported(self, predicted: int, cached: int, tokens: int) -> bool:
        """One response told its cached tokens. True: the map has drifted, heal it."""
        self._count += 1
        self._error += abs(predicted - cached)
        self._tokens += tokens
        if self._count < WINDOW:
            return False
        drifted = self._error > TOLERATED * self._tokens
        self._count = self._error = self._tokens = 0
        self.verdicts += drifted
        return drifted

    def unreported(self, predicted: int, tokens: int) -> None:
        """One response that did not: the engine's counters will have to tell."""
        self._promised += predicted
        self._prompts += tokens

    def counted(self, hits: float | None, idle: bool) -> bool:
        """The engine's total of hit tokens, scraped; `idle`: nothing is in flight that it may have counted already.

        True: the map has drifted. Only judged when idle, so that both sides speak of the same requests.
        """
        if hits is None or not idle:
            return False
        before, self._hits = self._hits, hits
        if before is None or hits < before:
            self._promised = self._prompts = 0
            return False
        if self._prompts == 0:
            return False
        drifted = abs(hits - before - self._promised) > TOLERATED * self._prompts
        self._promised = self._prompts = 0
        self.verdicts += drifted
        return drifted
