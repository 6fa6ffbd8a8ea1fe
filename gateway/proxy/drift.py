"""Predict, then check: does a replica's part of the map still tell the truth?

Two witnesses. A response that reports its cached tokens is compared at once. Those that report nothing
(streams whose clients did not ask for usage, engines without the flag) are still in the engine's counts of
prompt tokens looked up and found; their growth is compared with what was predicted for the requests sent there
meanwhile. Pure: numbers in, a verdict out.
"""

from __future__ import annotations

# A prediction can be off by what was evicted or stored between choice and prefill. Over a window that averages
# out to under 1 % (bench.exactness); a tenth of all prompt tokens wrong means the map itself is wrong.
TOLERATED = 0.10
WINDOW = 32


class Drift:
    """Running comparison for one replica. All figures in tokens."""

    __slots__ = ("_count", "_error", "_tokens", "_promised", "_prompts", "_silent", "_aside", "_before")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new window, after a heal or a new incarnation."""
        self._count = self._error = self._tokens = 0
        self._promised = self._prompts = self._silent = 0
        self._aside = False
        self._before: tuple[float | None, float | None] = (None, None)

    def reported(self, predicted: int, cached: int, tokens: int, fetched: int = 0) -> bool:
        """One response told its cached tokens, in all tiers; `fetched` of those predicted are in slower ones. True: the
        map has drifted, heal it."""
        self._promised += max(0, cached - fetched)  # the engine counted it as well, but for what it fetched
        self._prompts += tokens
        self._count += 1
        self._error += abs(predicted - cached)
        self._tokens += tokens
        if self._count < WINDOW:
            return False
        drifted = self._error > TOLERATED * self._tokens
        self._count = self._error = self._tokens = 0
        return drifted

    def unreported(self, predicted: int, tokens: int) -> None:
        """One response that did not: the engine's counters will have to tell."""
        self._promised += predicted
        self._prompts += tokens
        self._silent += tokens

    def aside(self) -> None:
        """One response to a request of several prompts or choices: its report speaks of one of them, and what was
        predicted of another. The counters mean nothing until the next look."""
        self._aside = True

    def take(self) -> tuple[int, int, int, bool]:
        """What `counted` would judge by, to be judged elsewhere."""
        taken = self._promised, self._prompts, self._silent, self._aside
        self._promised = self._prompts = self._silent = 0
        self._aside = False
        return taken

    def add(self, promised: int, prompts: int, silent: int, aside: bool) -> None:
        """What another one has taken."""
        self._promised += promised
        self._prompts += prompts
        self._silent += silent
        self._aside |= aside

    def counted(self, queries: float | None, hits: float | None, idle: bool) -> bool:
        """The engine's totals of tokens looked up and of those found, scraped; `idle`: nothing is in flight that
        it may have counted already.

        True: the map has drifted. Only judged when idle and when the engine looked up just the prompts known here:
        others' requests and aborted ones are in its counts too.
        """
        if hits is None or not idle:
            return False
        (queried, hit), self._before = self._before, (queries, hits)
        promised, prompts, silent, aside = self.take()
        if hit is None or hits < hit or not silent or aside:
            return False
        if queries is not None and queried is not None and queries - queried != prompts:
            return False
        drifted = abs(hits - hit - promised) > TOLERATED * silent
        return drifted
