"""`least_time`: the replica where this request, and those it holds up, lose the fewest seconds.

Formula, per candidate, in seconds:

    queue         tokens ahead x seconds a queued token
    + prefill     base + uncached tokens (linear and attention term)
    + crowd       the decode step it shares
    + interference  0.05 x own prefill x streams decoding there

The least wins. Inputs: overlaps, the ledger, learned costs.
"""
from __future__ import annotations

import random
from typing import Sequence

from .vocabulary import Candidate, Choice, Demand

_INTERFERENCE = 0.05


class LeastTime:
    name = "least_time"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed).random

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        tokens = demand.tokens
        totals, terms, group = [], [] if explain else None, None
        for candidate in candidates:
            load, costs, cached = candidate.load, candidate.costs, candidate.overlap
            if costs.group is not group:
                group = costs.group
                base, token, pair, queued, busy, crowd = group.ttft.coefficients
                step_base, step_stream, step_context = group.step.coefficients
            speed, uncached, decoding = costs.ttft.value, tokens - cached, load.decoding
            own = speed * uncached * (token + pair * (cached + 0.5 * uncached))
            queue = speed * (queued * load.prefill_tokens + busy) if load.prefilling else 0.0
            step = interference = 0.0
            if decoding:
                step = crowd * costs.step.value * (step_base + step_stream * decoding
                                                   + step_context * load.context_tokens)
                interference = _INTERFERENCE * own * decoding
            totals.append(speed * base + own + queue + step + interference)
            if terms is not None:
                terms.append({"base": speed * base, "prefill": own, "queue": queue, "crowd": step,
                              "interference": interference})
        least = min(totals)
        limit = least * 1.001 + 1e-4
        ties = [index for index, total in enumerate(totals) if total <= limit]
        index = ties[int(self._random() * len(ties))]
        return Choice(index, f"{least * 1e3:.1f} ms, {candidates[index].overlap} of {tokens} tokens held", terms)
