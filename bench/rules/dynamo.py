"""`dynamo`: blocks to compute, after what is cached, plus the blocks active requests would then hold.

Formula: max(0, (prefill tokens queued there + prompt tokens) / block - credit) + active blocks there with this prompt,
the least wins, ties at random (temperature 0). Credit is the overlap in blocks, 0.75 a block in host memory, 0.25 on
disk. A request's blocks are active from when it is sent until it ends, each block once however many share it. Source:
NVIDIA Dynamo's documentation, "Routing concepts" and "Configuration and tuning" (1.2 to 1.5), defaults throughout:
overlap credit 1 without decay, prefill scale 1, output blocks not tracked.

The product's `overlap_cost` is this without sharing among active blocks. Left out: Dynamo's queue before the workers
(`--router-queue-threshold`), since here a request is sent when it comes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from policies import Candidate, Choice, Demand

from .least import Least

_CREDIT = {"cpu": 0.75, "disk": 0.25, "remote": 0.25}


class Dynamo:
    name = "dynamo"
    source = (
        "NVIDIA Dynamo 1.2 to 1.5, docs 'Routing concepts': prefill blocks - credits + active blocks, temperature 0"
    )

    def __init__(self, seed: int = 0) -> None:
        self._least = Least(seed)
        self._active: dict[str, dict[int, int]] = {}  # replica -> block -> active requests that have it
        self._partial: dict[str, int] = {}  # replica -> active prompts with a block not full

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        costs = []
        for candidate in candidates:
            credit = candidate.overlap
            for tier, tokens in candidate.lower:
                credit += _CREDIT.get(tier, 0.0) * tokens
            prefill = candidate.load.prefill_tokens + asked.tokens - credit
            costs.append(max(0.0, prefill / asked.block_size) + self._blocks(candidate.replica, asked))
        index = self._least(costs)
        return Choice(index, f"cost {costs[index]:.0f} blocks, {candidates[index].overlap} tokens held")

    def _blocks(self, replica: str, asked: Demand) -> int:
        """Active blocks if this prompt were sent there."""
        active, hashes = self._active.get(replica, {}), asked.hashes
        # An active chain is active from its first block on.
        shared = bisect_left(hashes, True, key=lambda block: block not in active) if active else 0
        return (
            len(active) + self._partial.get(replica, 0) + len(hashes) - shared + bool(asked.tokens % asked.block_size)
        )

    def placed(self, asked: Demand, candidates: Sequence[Candidate], choice: Choice) -> None:
        replica = candidates[choice.index].replica
        active = self._active.setdefault(replica, {})
        for block in asked.hashes:
            active[block] = active.get(block, 0) + 1
        self._partial[replica] = self._partial.get(replica, 0) + bool(asked.tokens % asked.block_size)

    def ended(self, replica: str, asked: Demand) -> None:
        if (active := self._active.get(replica)) is None:
            return  # the replica has gone in between, and its requests with it
        for block in asked.hashes:
            count = active.get(block, 0)
            if count > 1:
                active[block] = count - 1
            else:
                active.pop(block, None)
        self._partial[replica] = max(0, self._partial[replica] - bool(asked.tokens % asked.block_size))

    def gone(self, replica: str) -> None:
        self._active.pop(replica, None)
        self._partial.pop(replica, None)
