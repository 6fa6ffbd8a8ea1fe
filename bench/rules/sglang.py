"""`sglang_chars`, `sglang_tokens`, `sglang_32`, `sglang_4`: the longest match in a tree of what was sent, unless the
fleet is out of balance.

Formula: if max - min > 64 requests and max > 1.5 min, the fewest requests; else, if the longest match is more than
0.3 of the prompt, a replica that has it; else the fewest requests; of equals the first. Every prompt enters the tree
of the replica it goes to. The tree keeps 2**26 characters (HTTP) or tokens (gRPC) of each replica, far more than its
KV cache, and hears of no eviction there. Source: the comment on top of `cache_aware` in sglang's router (v0.3) and in
smg before 1.13, the defaults of their command lines. `sglang_32` and `sglang_4` are the rule on tokens with 32 / 1.5
and 4 / 1.1 in place of 64 / 1.5: the defaults of vllm-router, and what NVIDIA-NeMo/Gym sets there (its pull request
3345, which found hits of 84 and 65 % with them).

Approximated: a match ends at a block, not at a character; 4 characters a token; too large a tree is cut when it is,
not every 120 s; which of several holders sglang takes is an accident of its hash map: here the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies import Candidate, Choice, Demand

from .guess import Guess

_MATCH = 0.3
_TREE = 2**26
_CHARACTERS = 4  # a token


class SglangChars:
    name = "sglang_chars"
    source = "sglang router 0.3, cache_aware over HTTP (sgl-model-gateway/src/policies/cache_aware.rs, opening comment)"
    units = _CHARACTERS
    apart, times = 64, 1.5

    def __init__(self, seed: int = 0) -> None:
        self._tree = Guess(_TREE // self.units // 16)

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        loads = [candidate.load.requests for candidate in candidates]
        low, high = min(loads), max(loads)
        if high - low > self.apart and high > self.times * low:
            return Choice(loads.index(low), f"out of balance, {low} to {high} requests")
        matches = [self._tree.blocks(candidate.replica, asked.hashes) for candidate in candidates]
        longest = max(matches)
        if longest * asked.block_size > _MATCH * asked.tokens:
            return Choice(matches.index(longest), f"was sent {longest} of its blocks")
        return Choice(loads.index(low), f"no match above {_MATCH:.0%}, {low} requests there")

    def placed(self, asked: Demand, candidates: Sequence[Candidate], choice: Choice) -> None:
        self._tree.add(candidates[choice.index].replica, asked.hashes)

    def gone(self, replica: str) -> None:
        self._tree.forget(replica)


class SglangTokens(SglangChars):
    name = "sglang_tokens"
    source = "sglang router 0.3, cache_aware over gRPC: the same rule on a tree of tokens in pages of 16"
    units = 1


class Sglang32(SglangTokens):
    name = "sglang_32"
    source = "vllm-router, cache_aware at its defaults, as in NVIDIA-NeMo/Gym pull request 3345"
    apart, times = 32, 1.5


class Sglang4(SglangTokens):
    name = "sglang_4"
    source = "NVIDIA-NeMo/Gym, its thresholds for vllm-router's cache_aware (pull request 3345)"
    apart, times = 4, 1.1
