"""Predict, then check: does a replica's part of the map still tell the truth?

Two witnesses. A response that reports its cached tokens is compared at once. Those that report nothing
(streams whose clients did not ask for usage, engines without the flag) are still in the engine's counts of
prompt tokens looked up and found; their growth is compared with what was predicted for the requests sent there
meanwhile. Pure: numbers in, a verdict out.

Answers that are off by the same number of tokens, whatever was predicted, show how the engine looks its cache up, say
that it drops the last block it finds: the map is right, and stays. `offset` has that number.
"""

from __future__ import annotations

# A prediction can be off by what was evicted or stored between choice and prefill. Over a window that averages
# out to under 1 % (bench.exactness); a tenth of all prompt tokens wrong means the map itself is wrong.
TOLERATED = 0.10
WINDOW = 32
STEADY = 3  # answers in a row with the same offset: one may be what was stored or evicted since the choice


class Drift:
    """Running comparison for one replica. All figures in tokens."""

    __slots__ = (
        "_count",
        "_error",
        "_tokens",
        "_telling",
        "_offsets",
        "_promised",
        "_prompts",
        "_silent",
        "_silent_prompts",
        "_aside",
        "_before",
        "_offset",
        "_steady",
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new window, after a heal or a new incarnation."""
        self._new_window()
        self._promised = self._prompts = self._silent = 0
        self._silent_prompts = [0, 0]
        self._aside = False
        self._before: tuple[float | None, float | None] = (None, None)
        self._offset = self._steady = 0

    def _new_window(self) -> None:
        self._count = self._error = self._tokens = self._telling = 0
        self._offsets: dict[int, list[int]] = {}

    @property
    def offset(self) -> int:
        """Tokens that were predicted and not found in each of the last answers; negative: found and not predicted."""
        return self._offset if self._steady >= STEADY else 0

    def reported(self, predicted: int, cached: int, tokens: int, fetched: int = 0, block_size: int = 0) -> bool:
        """Compare one response that reported its cached tokens, and return whether the map has drifted and must heal.

        `cached` counts those in all tiers; `fetched` of the predicted ones are in slower tiers.
        """
        self._promised += max(0, cached - fetched)  # the engine counted it as well, but for what it fetched
        self._prompts += tokens
        self._count += 1
        error = predicted - cached
        self._error += abs(error)
        self._tokens += tokens
        if predicted or cached:
            self._telling += 1
            self._follow(error, 1)
        if error and (abs(error) == block_size or (predicted and cached)):
            self._offsets.setdefault(error, []).append(predicted)
        if self._count < WINDOW:
            return False
        drifted = self._error - self._explained(block_size) > TOLERATED * self._tokens
        self._new_window()
        return drifted

    def _explained(self, block_size: int) -> int:
        """Return how many tokens of the window's error come from one offset that most of its answers share.

        An offset of one block is always believed. Another one only if it came with different predictions: where each
        answer was predicted the same, an equal error may also mean that the map is wrong about that one prompt.
        """
        error, predicted = max(self._offsets.items(), key=lambda one: len(one[1]), default=(0, []))
        steady = 2 * len(predicted) > self._telling and (abs(error) == block_size or len(set(predicted)) > 1)
        return abs(error) * len(predicted) if steady else 0

    def _follow(self, error: int, answers: int) -> None:
        if error != self._offset:
            self._offset, self._steady = error, 0
        self._steady += answers

    def unreported(self, predicted: int, tokens: int) -> None:
        """Note a response that did not report its cached tokens, so that only the engine's counters can tell."""
        self._promised += predicted
        self._prompts += tokens
        self._silent += tokens
        self._silent_prompts[predicted > 0] += 1

    def aside(self) -> None:
        """Note a response to a request of several prompts or choices. Its report is about one of them, the prediction
        may be about another, so the counters mean nothing until they are next compared."""
        self._aside = True

    def _take(self) -> tuple[int, int, int, bool]:
        """Return what `counted` judges by, and begin to count anew."""
        taken = self._promised, self._prompts, self._silent, self._aside
        self._promised = self._prompts = self._silent = 0
        self._silent_prompts = [0, 0]
        self._aside = False
        return taken

    def counted(self, queries: float | None, hits: float | None, idle: bool, block_size: int = 0) -> bool:
        """The engine's totals of tokens looked up and of those found, scraped; `idle`: nothing is in flight that
        it may have counted already.

        True: the map has drifted. Only judged when idle and when the engine looked up just the prompts known here:
        others' requests and aborted ones are in its counts too.
        """
        if hits is None or not idle:
            return False
        (queried, hit), self._before = self._before, (queries, hits)
        without, expected = self._silent_prompts
        promised, prompts, silent, aside = self._take()
        if hit is None or hits < hit or not silent or aside:
            return False
        if queries is not None and queried is not None and queries - queried != prompts:
            return False
        error = promised - int(hits - hit)
        blocks, parts = divmod(abs(error), block_size) if block_size else (0, 1)
        # what answers were off by alone is not known, but a block each of those with a hit is no accident
        if blocks and not parts and (blocks == expected or (error < 0 and expected < blocks <= expected + without)):
            self._follow(block_size if error > 0 else -block_size, blocks)
            return False
        return abs(error) > TOLERATED * silent
