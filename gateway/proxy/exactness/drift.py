"""The check of a replica's part of the map of cached blocks against the cached tokens that its engine reports. Pure.

Two sources are compared with the predictions. A response that reports its cached tokens is compared at once. Responses
that do not (streams whose clients did not request usage, engines without the flag) still count in the engine's metrics
of prompt tokens looked up and found; the growth of these is compared with the predictions made in the same time.

If answers differ from their predictions by the same number of tokens (`offset`), whatever was predicted, the cause is
how the engine looks up its cache, for example that it recomputes the last block: the map is right and is kept.
"""

from __future__ import annotations

# The share of wrong prompt tokens above which the map itself is wrong. Blocks evicted or stored between choice and
# prefill make single predictions wrong, which averages out to under 1 % over a window (bench.exactness).
TOLERATED = 0.10
WINDOW = 32
STEADY = 3  # answers in a row with the same offset; a single one may be due to blocks stored or evicted meanwhile


class Drift:
    """The running comparison for one replica, in tokens."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new window, after the map was rebuilt ("healed") or the replica's process was replaced."""
        self._new_window()
        self._begin_comparison()
        self._before: tuple[float | None, float | None] = (None, None)
        self._offset = self._steady = 0

    def _begin_comparison(self) -> None:
        self._predicted = self._prompts = self._unreported = 0
        self._unreported_prompts = [0, 0]
        self._excluded = False

    def _new_window(self) -> None:
        self._count = self._error = self._tokens = self._telling = 0
        self._offsets: dict[int, list[int]] = {}

    @property
    def offset(self) -> int:
        """Tokens that were predicted and not found in each of the last answers; negative if found and not predicted."""
        return self._offset if self._steady >= STEADY else 0

    def reported(self, predicted: int, cached: int, tokens: int, fetched: int = 0, block_size: int = 0) -> bool:
        """Compare a response that reported its cached tokens; return whether the map has drifted and must be rebuilt.

        `predicted`: cached tokens that were predicted.
        `cached`: the reported ones, in all tiers.
        `tokens`: prompt tokens.
        `fetched`: predicted tokens that are in slower tiers.
        `block_size`: tokens per block.
        """
        self._predicted += max(0, cached - fetched)  # the engine's counters include it, except for fetched tokens
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

        An offset of one block is always believed. Another one is believed only if it came with different predictions:
        if all predictions were equal, equal errors may also mean that the map is wrong about that one prompt.
        """
        error, predicted = max(self._offsets.items(), key=lambda one: len(one[1]), default=(0, []))
        steady = 2 * len(predicted) > self._telling and (abs(error) == block_size or len(set(predicted)) > 1)
        return abs(error) * len(predicted) if steady else 0

    def _follow(self, error: int, answers: int) -> None:
        if error != self._offset:
            self._offset, self._steady = error, 0
        self._steady += answers

    def unreported(self, predicted: int, tokens: int) -> None:
        """Note a response that did not report its cached tokens, for comparison with the engine's counters."""
        self._predicted += predicted
        self._prompts += tokens
        self._unreported += tokens
        self._unreported_prompts[predicted > 0] += 1

    def exclude(self) -> None:
        """Ignore the engine's counters until they are next compared, after a response that cannot be compared.

        For example, the report on a request with several prompts may be about another prompt than the prediction.
        """
        self._excluded = True

    def counted(self, queries: float | None, hits: float | None, idle: bool, block_size: int = 0) -> bool:
        """Compare the engine's scraped totals; return whether the map has drifted.

        `queries`, `hits`: tokens looked up and found.
        `idle`: the engine has no request in flight that it may have counted.

        The totals are only judged if the engine is idle and has looked up exactly the prompts known here, since the
        totals include aborted requests and other clients' requests.
        """
        if hits is None or not idle:
            return False
        (queried, hit), self._before = self._before, (queries, hits)
        without, expected = self._unreported_prompts
        predicted, prompts, unreported, excluded = self._predicted, self._prompts, self._unreported, self._excluded
        self._begin_comparison()
        if hit is None or hits < hit or not unreported or excluded:
            return False
        if queries is not None and queried is not None and queries - queried != prompts:
            return False
        error = predicted - int(hits - hit)
        blocks, parts = divmod(abs(error), block_size) if block_size else (0, 1)
        # The error of single answers is not known, but one block for each answer with a hit is no accident.
        if blocks and not parts and (blocks == expected or (error < 0 and expected < blocks <= expected + without)):
            self._follow(block_size if error > 0 else -block_size, blocks)
            return False
        return abs(error) > TOLERATED * unreported
