"""`llmd_sticky`: sticky until saturated, then least tokens in flight.

Formula: keep the replicas that hold at least 0.8 of the prompt's blocks, if there are any; but keep all if the best of
these has an estimated TTFT more than 18 s above the best of the others. TTFT is its uncached tokens in flight / the
peak prefill throughput. Of those kept, the one with the least uncached tokens in flight, this prompt's included, ties
at random. Tokens are in flight until the first token comes. Source: the README of llm-d-router's
`prefix-cache-affinity-filter` with its defaults (exploration off), in front of `token-load-scorer` as it recommends for
prefill-bound loads.

Approximated: the peak throughput is what an idle engine here does on one prompt of 8,192 tokens by the learned costs,
the way the README says to measure it; its default, 15,928 tokens/s, is that of a 32B model on two H100.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies import Candidate, Choice, Demand

from .least import Least
from .llmd_weights import held

_STICKY = 0.8
_PENALTY = 18.0  # seconds
_CALIBRATION = 8192  # tokens
_FULL = 4 * 2**20  # tokens in flight above which all are equal to the scorer


class LlmdSticky:
    name = "llmd_sticky"
    source = "llm-d-router, prefix-cache-affinity-filter (0.8, 18 s) before token-load-scorer; 'Sticky until saturated'"

    def __init__(self, seed: int = 0) -> None:
        self._least = Least(seed)

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        sticky = [held(asked, candidate) >= _STICKY for candidate in candidates]
        kept = [index for index, holds in enumerate(sticky) if holds]
        why = "sticky"
        if not kept:
            kept, why = list(range(len(candidates))), f"nobody holds {_STICKY:.0%}"
        elif len(kept) < len(candidates):
            waits = [_wait(candidate) for candidate in candidates]
            others = min(wait for wait, holds in zip(waits, sticky) if not holds)
            if min(waits[index] for index in kept) - others > _PENALTY:
                kept, why = list(range(len(candidates))), "its holders are saturated"
        flights = [min(_FULL, c.load.prefill_tokens + asked.tokens - c.overlap) for c in (candidates[i] for i in kept)]
        best = self._least(flights)
        return Choice(kept[best], f"{why}, {flights[best]} tokens in flight")


def _wait(candidate: Candidate) -> float:
    """Seconds to the first token, as the filter estimates them."""
    base = candidate.costs.ttft.value * candidate.costs.group.ttft.coefficients[0]
    seconds = base + candidate.costs.prefill_seconds(_CALIBRATION, 0)
    return candidate.load.prefill_tokens * seconds / _CALIBRATION
