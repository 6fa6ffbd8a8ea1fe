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
        totals, terms = [], [] if explain else None
        for candidate in candidates:
            load, costs, cached = candidate.load, candidate.costs, candidate.overlap
            uncached = tokens - cached
            own = uncached * (costs.token + costs.pair * (cached + 0.5 * uncached))
            queue = costs.queued * load.prefill_tokens + costs.busy if load.prefilling else 0.0
            crowd = 0.0
            if load.decoding:
                crowd = costs.crowd * (costs.decode_base + costs.decode_seq * load.decoding
                                       + costs.decode_ctx * load.context_tokens)
            interference = _INTERFERENCE * own * load.decoding
            totals.append(costs.base + own + queue + crowd + interference)
            if terms is not None:
                terms.append({"base": costs.base, "prefill": own, "queue": queue, "crowd": crowd,
                              "interference": interference})
        least = min(totals)
        limit = least * 1.001 + 1e-4
        ties = [index for index, total in enumerate(totals) if total <= limit]
        index = ties[int(self._random() * len(ties))]
        return Choice(index, f"{least * 1e3:.1f} ms, {candidates[index].overlap} of {tokens} tokens held", terms)
