"""Peer pulls: a replica fetches the beginning of a prompt from another replica's memory instead of computing it.

vLLM's offloading connector does that with the secondary tier `p2p` (`remote_kv_source`): blocks that a prompt finds
neither in the GPU's cache nor in the replica's own memory are fetched from the replica that the request names. Here the
fetched tokens are one more entry of `Candidate.lower`, of the tier PEER, after the candidate's own. A policy that
counts in seconds therefore includes their price:

    LATENCY + bytes / BANDWIDTH seconds, times a factor learned for each pair of replicas (`transfers`)

Each candidate gets the pull that makes it cost least, or none where computing costs no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest

from .costs import PEER
from .legs import FEW, SLACK
from .rules.least_cost import Cost
from .transfers import Transfers
from .vocabulary import Candidate, Demand, Pull

_HOLDERS = 5  # replicas that are considered as sources for each candidate: those that hold most of the prompt


def offer(
    cost: Cost,
    demand: Demand,
    candidates: Sequence[Candidate],
    reach: Mapping[str, int],
    transfers: Transfers,
    now: float,
) -> list[Candidate]:
    """Set a pull on each candidate for which one pays off, and return these candidates.

    A pull is a fetch of the prompt's beginning from another replica's memory. `reach`: leading prompt tokens in the
    memory of each replica that takes part in pulls; only these replicas may fetch. `cost`: the policy's cost of a
    candidate in seconds. If many candidates may fetch, only the FEW (8) most promising ones are considered: those that
    would cost least if they held as much of the prompt as the replica that holds most.
    """
    longest = nsmallest(_HOLDERS, [one for one in reach if reach[one]], key=lambda one: -reach[one])
    if not longest:
        return []
    most = reach[longest[0]]
    able = [one for one in candidates if one.replica in reach and most - one.cached > demand.block_size]
    if len(able) > FEW:
        prices = [sum(terms) for terms in cost.of_all(demand, able, held=most)]
        able = [able[at] for at in nsmallest(FEW, range(len(able)), key=prices.__getitem__)]
    return [one for one in able if _give_best(cost, demand, one, longest, reach, transfers, now)]


def _give_best(
    cost: Cost,
    demand: Demand,
    one: Candidate,
    holders: Sequence[str],
    reach: Mapping[str, int],
    transfers: Transfers,
    now: float,
) -> bool:
    """Set on a candidate the pull that lowers its cost most, if any lowers it; return whether one does.

    A pull is a fetch of the prompt's beginning from another replica's memory. `one`: the candidate. `holders`: the
    replicas from which it may fetch. `reach`: the leading prompt tokens in the memory of each.
    """
    quickest: dict[int, Pull] = {}
    for holder in holders:
        tokens = reach[holder] - one.cached
        if holder != one.replica and tokens > demand.block_size and not transfers.paused(holder, one.replica, now):
            pull = Pull(holder, tokens, transfers.seconds(holder, one.replica, tokens, now))
            if tokens not in quickest or pull.seconds < quickest[tokens].seconds:
                quickest[tokens] = pull  # if several hold equally many tokens, only the fastest matters
    if not quickest:
        return False
    own, best = one.lower, None
    [terms] = cost.of_all(demand, (one,))
    limit = sum(terms)
    for pull in quickest.values():
        one.lower, one.pull = (*own, (PEER, pull.tokens)), pull
        [terms] = cost.of_all(demand, (one,))
        price = sum(terms)
        if price < limit if best is not None else price * SLACK[0] + SLACK[1] < limit:
            best, limit = pull, price
    one.lower, one.pull = ((*own, (PEER, best.tokens)), best) if best is not None else (own, None)
    return best is not None
