"""`session_hash`: each session on the replica its name hashes to, whatever the load.

Formula: the replica with the highest hash(replica, session) (rendezvous hashing), which moves the same
sessions when a replica comes or goes as the ring of virtual nodes the routers use; only which session lands
where differs. No session header: the prompt's first block; a prompt shorter than that: any, at random.
Source: `consistent_hash` of vllm-router and the `session` routing of vLLM's production stack, both by a
session header and blind to load (the production stack sends requests without one to the lowest rate).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from policies import Candidate, Choice, Demand
from policies.rules.consistent_hash import key_of, weights_of


class SessionHash:
    name = "session_hash"
    source = "vllm-router consistent_hash; vLLM production stack, session routing"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed).random

    def choose(self, asked: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        key = key_of(asked)
        if key is None:
            return Choice(int(self._random() * len(candidates)), "no session, at random")
        weights = weights_of(candidates, key)
        return Choice(max(range(len(weights)), key=weights.__getitem__), "home of the session")
