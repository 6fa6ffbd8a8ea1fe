"""A peer pull: a replica fetches the beginning of a prompt from another's memory instead of computing it.

vLLM's offloading connector with the secondary tier `p2p` does that (`remote_kv_source`): what a prompt finds neither in
the GPU's cache nor in the replica's own memory comes from the memory of the replica that the request names. So it is a
run of one more tier, PEER, behind the candidate's own, and a policy that counts in seconds sees what it would take:

    LATENCY + tokens x TOKEN seconds, times a factor learned of each pair of replicas (`legs.Transfers`)

Each candidate is given the pull that makes it cost least, or none where computing costs no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from .costs import PEER
from .legs import SLACK, Transfers
from .rules.least_cost import Cost
from .vocabulary import Candidate, Demand, Pull

_FEW = 4  # holders that are priced for each candidate, those with the longest run


def offer(
    cost: Cost,
    demand: Demand,
    candidates: Iterable[Candidate],
    reach: Mapping[str, int],
    transfers: Transfers,
    now: float,
) -> list[Candidate]:
    """Give candidates their pulls, and return those that have one. `reach`: leading prompt tokens in the memory of each
    replica that others may fetch from; only those are candidates for it themselves."""
    longest = sorted((one for one in reach if reach[one]), key=reach.__getitem__, reverse=True)[: _FEW + 1]
    given = []
    for one in candidates if longest else ():
        if one.replica in reach and (pull := _best(cost, demand, one, longest, reach, transfers, now)) is not None:
            one.lower, one.pull = (*one.lower, (PEER, pull.tokens)), pull
            given.append(one)
    return given


def _best(
    cost: Cost,
    demand: Demand,
    one: Candidate,
    holders: Sequence[str],
    reach: Mapping[str, int],
    transfers: Transfers,
    now: float,
) -> Pull | None:
    held, pulls = one.cached, []
    for holder in holders:
        tokens = reach[holder] - held
        if holder != one.replica and tokens > demand.block_size and not transfers.paused(holder, one.replica, now):
            pulls.append(Pull(holder, tokens, transfers.seconds(holder, one.replica, tokens)))
    if not pulls:
        return None
    ways = [one, *(replace(one, lower=(*one.lower, (PEER, pull.tokens)), pull=pull) for pull in pulls)]
    computed, *pulled = [sum(terms) for terms in cost.of_all(demand, ways)]
    least = min(pulled)
    return pulls[pulled.index(least)] if least * SLACK[0] + SLACK[1] < computed else None
