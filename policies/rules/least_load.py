"""`least_load`: the replica with the fewest requests.

Formula: argmin of the requests reserved there (or of the engine's own waiting queue, if the last scrape saw a longer
one, from traffic of other clients); ties at random. Inputs: the ledger; `waiting` may be missing and then counts as
zero. The rule is blind to prefixes and to prompt lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ledger import Load
from ..vocabulary import Candidate, Choice, Demand
from .least_cost import Cost, least


def busy(load: Load) -> int:
    """Return the number of requests on a replica: those of the ledger, or the engine's own queue if that is longer."""
    return max(load.requests, load.waiting)


def _of_all(
    demand: Demand, candidates: Sequence[Candidate], future: float = 0.0, after: float = 1.0, held: int = 0
) -> Sequence[tuple[float, ...]]:
    return [(busy(candidate.load),) for candidate in candidates]


COST = Cost("least_load", ("requests",), _of_all)


def fewest_requests(demand: Demand, candidates: Sequence[Candidate]) -> int:
    """Return the index of the candidate with the fewest requests, drawn at random among equal ones."""
    return least([busy(candidate.load) for candidate in candidates], COST.slack, demand.draw)


class LeastLoad:
    name = "least_load"
    cost = COST

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        index = fewest_requests(demand, candidates)
        return Choice(index, f"{busy(candidates[index].load)} requests there", among=range(len(candidates)))
