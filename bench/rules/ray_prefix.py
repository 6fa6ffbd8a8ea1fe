"""`ray_prefix`: the shortest queue among the holders of the longest match, or among the smallest trees.

Formula: if the longest match in a tree of what was sent is at least 0.1 of the prompt, the fewest requests among the
replicas that have it; else the fewest among the replicas with the least in their trees; ties at random. Load matters no
further: the threshold that would fall back to power of two choices is infinite by default. Source: Ray Serve LLM,
`PrefixCacheAffinityRouter`, its documentation ("Prefix-aware routing") and defaults.

Approximated: a match ends at a block, not at a character. Ray evicts nothing unless told to; here a replica's tree
keeps the last 2**20 blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies import Candidate, Choice, Demand

from .guess import Guess
from .least import Least

_MATCH = 0.1
_TREE = 2**20


class RayPrefix:
    name = "ray_prefix"
    source = "Ray Serve LLM, PrefixCacheAffinityRouter (docs.ray.io, 'Prefix-aware routing')"

    def __init__(self, seed: int = 0) -> None:
        self._tree, self._least = Guess(_TREE), Least(seed)

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        matches = [self._tree.blocks(candidate.replica, asked.hashes) for candidate in candidates]
        longest = max(matches)
        if longest and longest * asked.block_size >= _MATCH * asked.tokens:
            among, why = [i for i, match in enumerate(matches) if match == longest], f"was sent {longest} of its blocks"
        else:
            sizes = [self._tree.size(candidate.replica) for candidate in candidates]
            smallest = min(sizes)
            among, why = [i for i, size in enumerate(sizes) if size == smallest], f"smallest tree, {smallest} blocks"
        return Choice(among[self._least([candidates[index].load.requests for index in among])], why)

    def placed(self, asked: Demand, candidates: Sequence[Candidate], choice: Choice) -> None:
        self._tree.add(candidates[choice.index].replica, asked.hashes)

    def gone(self, replica: str) -> None:
        self._tree.forget(replica)
