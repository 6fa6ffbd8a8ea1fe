"""Whether a request is sent, and to whom: what the Router knows of it is put before an `Admission`, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .admission import Admission
from .lines import Ticket
from .quotes import Quote
from .router import Evaluation, Router, Targets
from .verdicts import SENT, SPILLED, Verdict
from .vocabulary import Candidate


def nobody() -> Targets | None:
    """Where there is no slow pool."""
    return None


class Offers:
    """What a request can be given besides what it asks for. Quotes are made when they are asked for."""

    def __init__(
        self, router: Router, evaluation: Evaluation, now: float, spill: Callable[[], Targets | None], may_cap: bool
    ) -> None:
        self._router, self._evaluation, self._now = router, evaluation, now
        self._spill, self._may_cap = spill, may_cap
        self.slow: Sequence[Candidate] = ()  # of the slow pool, once they were asked for

    def may_cap(self, most: int) -> bool:
        asked = self._evaluation.demand.max_tokens
        return self._may_cap and (asked is None or asked > most)

    def capped(self, most: int) -> Sequence[Quote]:
        demand, evaluation = self._evaluation.demand, self._evaluation
        if not self.may_cap(most):
            return ()
        if self.slow:  # they were weighed after it
            evaluation = self._router.evaluate(demand, Targets([*evaluation.candidates]), self._now)
        demand.output, output = min(demand.output, most), demand.output
        try:
            return self._router.quotes(evaluation)
        finally:
            demand.output = output

    def spilled(self) -> Sequence[Quote]:
        targets = self._spill()
        if not targets:
            return ()
        found = self._router.evaluate(self._evaluation.demand, targets, self._now)
        self.slow = [*found.candidates]
        return self._router.quotes(found)


def admit(
    router: Router,
    admission: Admission,
    ticket: Ticket,
    evaluation: Evaluation,
    now: float,
    spill: Callable[[], Targets | None] = nobody,
    may_cap: bool = False,
) -> tuple[Verdict, Evaluation]:
    """Ask whether to send a request, right after `Router.evaluate`; where not all candidates are good for it, evaluate
    it among those that are. One that is sent is to be committed at once. `spill`: the slow pool's replicas that can
    take it; `may_cap`: whether its answer can be capped."""
    demand, candidates, choice = evaluation.demand, evaluation.candidates, evaluation.choice
    quotes = router.quotes(evaluation)
    offers = Offers(router, evaluation, now, spill, may_cap)
    tokens = demand.tokens - candidates[choice.index].cached
    verdict = admission.ask(ticket, tokens, quotes, now, [(one.replica,) for one in candidates], offers)
    if verdict.among and (offers.slow or verdict.cap or choice.index not in verdict.among):
        among = offers.slow if verdict.decision == SPILLED else candidates
        if verdict.cap:
            demand.max_tokens = verdict.cap
            if demand.also is not None:
                demand.also.max_tokens = verdict.cap
        evaluation = router.evaluate(demand, Targets([among[index] for index in verdict.among]), now)
        quotes = router.quotes(evaluation)
    if verdict.decision in SENT:
        index = evaluation.choice.index
        costs = evaluation.candidates[index].costs
        admission.sent(ticket, quotes[index], costs, demand.tokens + demand.output, now)
    return verdict, evaluation
