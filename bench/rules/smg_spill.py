"""`smg_spill`: the least loaded holder of the longest match, unless that one is far above the fleet's mean.

Formula: if the longest match in a tree of what was sent is more than 0.3 of the prompt, the holder of it with the
fewest requests (ties at random, the first 8 holders only); if it has more than 1.5 x the mean of the fleet and more
than the mean + 64, or if the match is shorter, the replica with the least (requests, requests ever sent there). A
prompt that spills enters the tree of where it went, so a hot prefix gets a further holder. Source: smg pull request
2161 ("pressure-select among matched cache tenants with a per-request load gate", in smg 1.13), thresholds as on its
command line.

Approximated as `sglang_tokens`, and the 2**26 tokens smg keeps for all replicas together are kept for each. Left out
because they are off by default: overlap decay, the KV usage triggers, and the overload veto.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from policies import Candidate, Choice, Demand

from .guess import Guess
from .least import Least

_MATCH, _APART, _TIMES = 0.3, 64, 1.5
_HOLDERS = 8
_TREE = 2**26 // 16  # blocks


class SmgSpill:
    name = "smg_spill"
    source = "smg 1.13, cache_aware with a gate per request (smg-project/smg pull request 2161)"

    def __init__(self, seed: int = 0) -> None:
        self._tree, self._least = Guess(_TREE), Least(seed)
        self._ever: Counter[str] = Counter()

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        loads = [candidate.load.requests for candidate in candidates]
        fewest = min(range(len(loads)), key=lambda i: (loads[i], self._ever[candidates[i].replica]))
        matches = [self._tree.blocks(candidate.replica, asked.hashes) for candidate in candidates]
        longest = max(matches)
        if longest * asked.block_size <= _MATCH * asked.tokens:
            return Choice(fewest, f"no match above {_MATCH:.0%}")
        holders = [index for index, match in enumerate(matches) if match == longest][:_HOLDERS]
        home = holders[self._least([loads[index] for index in holders])]
        mean = sum(loads) / len(loads)
        if loads[home] > _TIMES * mean and loads[home] > mean + _APART:
            return Choice(fewest, f"spilled, its holder has {loads[home]} requests, the mean is {mean:.1f}")
        return Choice(home, f"was sent {longest} of its blocks")

    def placed(self, asked: Demand, candidates: Sequence[Candidate], choice: Choice) -> None:
        self._ever[candidates[choice.index].replica] += 1
        self._tree.add(candidates[choice.index].replica, asked.hashes)

    def gone(self, replica: str) -> None:
        self._tree.forget(replica)
        del self._ever[replica]
