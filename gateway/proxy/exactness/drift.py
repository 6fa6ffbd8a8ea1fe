"""The check of a replica's part of the map of cached KV blocks against the cached tokens that its engine reports.

An answer that reports its cached tokens is compared with its prediction at once. Other answers report none: streams
whose clients did not request usage, and all answers of engines without the flag for reports. But the engine's metrics
count, for all prompts, the tokens that it looked up and found in its cache. The growth of these counters is compared
with the predictions made in the same time.

If answers differ from their predictions by the same number of tokens (`offset`), whatever was predicted, the cause is
how the engine looks up its cache. For example it may recompute the last block. Then the map is right, and is kept.

This module has no clock and no I/O.
"""

from __future__ import annotations

# The share of wrongly predicted prompt tokens above which the map itself counts as wrong. Single predictions are wrong
# if blocks are evicted or stored between choice and prefill, which averages out to under 1 % (bench.exactness).
TOLERATED = 0.10
WINDOW = 32  # answers over which that share is taken
# Answers in a row with the same offset after which it is believed; a single one may be due to blocks stored or evicted
# meanwhile.
STEADY = 3


class Drift:
    """The running comparison of predicted and reported cached tokens for one replica."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all comparisons, after the replica's map of cached blocks was rebuilt, or its process was replaced."""
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
        """By how many tokens predictions steadily exceed the reports of cached tokens; negative if they fall short.

        The difference counts as steady if it was the same in the last `STEADY` (3) answers or more; otherwise this is
        0.
        """
        return self._offset if self._steady >= STEADY else 0

    def reported(self, predicted: int, cached: int, tokens: int, fetched: int = 0, block_size: int = 0) -> bool:
        """Compare an answer that reports its cached tokens with the prediction; return whether the map must be rebuilt.

        This is decided once per `WINDOW` (32) answers. The map must be rebuilt if the predictions were wrong by more
        than the share `TOLERATED` (10 %) of all prompt tokens.

        `predicted`: cached tokens that were predicted.
        `cached`: the reported ones, in all tiers (GPU memory and slower ones).
        `tokens`: prompt tokens.
        `fetched`: how many of the predicted tokens are in slower tiers.
        `block_size`: tokens per block; 0 if unknown.
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
        """Return how many tokens of the window's error are due to one difference that most of its answers have.

        A difference of one block is always accepted. Another difference is accepted only if it came with different
        predictions: if all predictions were equal, the map may just be wrong about that one prompt.
        """
        error, predicted = max(self._offsets.items(), key=lambda one: len(one[1]), default=(0, []))
        steady = 2 * len(predicted) > self._telling and (abs(error) == block_size or len(set(predicted)) > 1)
        return abs(error) * len(predicted) if steady else 0

    def _follow(self, error: int, answers: int) -> None:
        """Update `offset` by `answers` more answers that each differed by `error` tokens (predicted minus reported)."""
        if error != self._offset:
            self._offset, self._steady = error, 0
        self._steady += answers

    def unreported(self, predicted: int, tokens: int) -> None:
        """Note an answer that did not report its cached tokens, for the next comparison with the engine's counters.

        `predicted`: cached tokens that were predicted, in GPU memory.
        `tokens`: prompt tokens.
        """
        self._predicted += predicted
        self._prompts += tokens
        self._unreported += tokens
        self._unreported_prompts[predicted > 0] += 1

    def exclude(self) -> None:
        """Skip the next comparison with the engine's counters, after an answer whose cached tokens cannot be predicted.

        For example, a request with several prompts may report on another prompt than the predicted one.
        """
        self._excluded = True

    def counted(self, queries: float | None, hits: float | None, idle: bool, block_size: int = 0) -> bool:
        """Compare the engine's counters, read from its metrics, with the predictions; return whether the map is wrong.

        `queries`, `hits`: prompt tokens looked up in the cache and found there, in all; None if not reported.
        `idle`: whether no request is in flight; the counters might contain only a part of such a request.
        `block_size`: tokens per block; 0 if unknown.

        The counters include aborted requests and requests of other clients. So they are compared only if the engine is
        idle and has looked up exactly the prompts that this gateway has sent.
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
        # How far single answers were wrong is not known, but one block for each answer with a hit is no accident.
        if blocks and not parts and (blocks == expected or (error < 0 and expected < blocks <= expected + without)):
            self._follow(block_size if error > 0 else -block_size, blocks)
            return False
        return abs(error) > TOLERATED * unreported
