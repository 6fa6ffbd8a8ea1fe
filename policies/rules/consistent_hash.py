"""`consistent_hash`: a session stays on its replica while that replica is not overloaded.

Formula: rank the candidates by hash(replica, key), highest first (rendezvous hashing, Thaler and Ravishankar, IEEE/ACM
ToN 6(1), 1998), and take the first with fewer than ceil(1.25 x (requests in the fleet + 1) / N) requests (bounded
loads: Mirrokni, Thorup and Zadimoghaddam, SODA 2018). Adding or removing a replica moves only that replica's keys. The
key is the session or, without one, the prompt's first block; without either, the rule is `least_load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from xxhash import xxh3_64_intdigest

from ..vocabulary import Candidate, Choice, Demand
from .least_load import busy, fewest_requests

# A session's home may have a quarter more requests than its share. A lower bound balances load better, but moves more
# sessions away from their cache.
_BOUND = 1.25


def key_of(demand: Demand) -> int | None:
    """Return the key by which a request is hashed; None if it has neither a session nor a full block."""
    return demand.root or None if demand.session is None else xxh3_64_intdigest(demand.session.encode())


def weights_of(candidates: Sequence[Candidate], key: int) -> list[int]:
    """Return a hash of each candidate's name and the key; the candidate with the highest hash is the key's home."""
    return [xxh3_64_intdigest(candidate.replica.encode(), seed=key) for candidate in candidates]


class ConsistentHash:
    name = "consistent_hash"

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        key = key_of(demand)
        if key is None:
            return Choice(fewest_requests(demand, candidates), "no session and no full block: the fewest requests")
        loads = [busy(candidate.load) for candidate in candidates]
        bound = ceil(_BOUND * (sum(loads) + 1) / len(loads))
        weights = weights_of(candidates, key)
        home = max(range(len(weights)), key=weights.__getitem__)
        if loads[home] < bound:
            return Choice(home, "home of the session" if demand.session is not None else "home of the first block")
        index = max((i for i in range(len(loads)) if loads[i] < bound), key=weights.__getitem__)
        return Choice(index, f"home has {loads[home]} requests, bound {bound}")
