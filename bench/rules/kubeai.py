"""`kubeai`: consistent hashing of the prompt's beginning, with bounded loads.

Formula: a ring of 256 points a replica; from the hash of the prompt's prefix on, the first replica whose requests + 1
are at most 1.25 x (requests in the fleet + 1) / N; if none is, the first met. An idle fleet takes the first met.
Source: KubeAI, "Load balancing" (strategy PrefixHash: `meanLoadFactor` 125, `replication` 256, `prefixCharLength` 100),
after Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018.

Approximated: KubeAI hashes the first 100 characters of a completion's prompt or of a chat's first user message. The
session stands for the latter, where there is one, else the prompt's first block of 16 tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from policies import Candidate, Choice, Demand

_BOUND = 1.25
_POINTS = 256


class KubeAi:
    name = "kubeai"
    source = "KubeAI, PrefixHash (kubeai.org, 'Load balancing': 125 %, 256 points, 100 characters)"

    def __init__(self, seed: int = 0) -> None:
        self._of: tuple[str, ...] = ()
        self._ring: list[tuple[int, int]] = []  # (point, index into the candidates)

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        names = tuple([candidate.replica for candidate in candidates])
        if names != self._of:
            self._of = names
            self._ring = sorted(
                (xxh3_64_intdigest(f"{name}{point}".encode()), index)
                for index, name in enumerate(names)
                for point in range(_POINTS)
            )
        loads = [candidate.load.requests for candidate in candidates]
        total = sum(loads)
        bound = _BOUND * (total + 1) / len(loads) if total else 1.0
        start = bisect_left(self._ring, (self._key(asked), -1)) % len(self._ring)
        home = self._ring[start][1]
        if loads[home] + 1 <= bound:
            return Choice(home, "home of the prefix")
        if min(loads) + 1 > bound:
            return Choice(home, f"home of the prefix, all are above {bound:.2f}")
        place = start
        while loads[self._ring[place][1]] + 1 > bound:
            place = (place + 1) % len(self._ring)
        return Choice(self._ring[place][1], f"home has {loads[home]} requests, bound {bound:.2f}")

    def _key(self, asked: Demand) -> int:
        return asked.root if asked.session is None else xxh3_64_intdigest(asked.session.encode())
