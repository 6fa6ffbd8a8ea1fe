"""Requests in two legs: one replica computes the prompt (prefill), another writes the answer (decode).

The first leg is the client's request, but for one token and not streamed. Its answer is not relayed; the KV transfer
parameters in it go into the second leg, whose answer the client gets. A request that is not split into legs "stays
whole". The Router prices pairs of replicas (`policies.legs`), the engine's dialect writes the bodies (`Transfer`), and
`retries` has the rules for failures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from policies import Candidate, Decision, Demand, Evaluation, Pairing, Router, legs, two_legs
from replicas.engines.transfer import PATHS, MeetingTransfer, with_first
from replicas.names import bracketed

from ...http.chunks import unchunked
from ...http.upstream import Head, UpstreamError
from ...prompt.prompt import as_variant
from .. import retries
from ..backend import Backend
from ..blame import DOUBTFUL
from ..exchange import Asker, Attempt, Exchange, Legs, Parent, request_head
from ..placement.eligibility import Eligibility
from ..responses.answers import error_status, foreign_head, media_type, read_usage
from ..retries import of_status
from ..settling import cut_short
from ..states import AttemptEvent, ExchangeEvent, Leg

if TYPE_CHECKING:
    from replicas.engines.transfer import Transfer

    from ...ops.metrics import Metrics
    from ...prompt import Prompt

log = logging.getLogger("hitherto.proxy")

# Writing the first leg's body parses the client's, at 2 ms per MiB on the event loop. Larger requests stay whole.
MOST_BYTES = 2 * 2**20
MOST_KEPT = 4 * 2**20  # bytes of a first leg's answer: for a million tokens it lists 65,536 blocks
# Seconds before the end of a lease at which parameters count as expired: the engine must begin to read before the end.
MARGIN = 10.0
# A second leg without a byte is given up after STALLS_TIMES the predicted time and STALLS_SECONDS more; engines give up
# a transfer after minutes, if at all.
STALLS_TIMES, STALLS_SECONDS = 10.0, 10.0


class LegPlan(NamedTuple):
    """A choice of replicas for two legs, before load is reserved. `first_body`: the first leg's request body."""

    chosen: legs.LegChoice
    transfer: Transfer
    first_body: bytes

    def to_decide(self, whole: Evaluation) -> tuple[Evaluation, Evaluation]:
        """Return the two evaluations for the shared ledger. `whole`: the evaluation of the request in one leg.

        By the first, the ledger chooses among prefillers that differ by their load alone; the second only reserves the
        decoder.
        """
        demand, choice, chosen = whole.demand, whole.choice, self.chosen
        near = chosen.near or (chosen.prefiller,)
        at = [one is chosen.prefiller for one in near].index(True)
        among = range(len(near)) if chosen.seconds is not None else None
        first = choice._replace(index=at, among=among)
        return (
            Evaluation(replace(demand, output=0.0, residual=0), near, first, chosen.prefiller.overlap),
            Evaluation(demand, (chosen.decoder,), choice._replace(index=0, among=None), chosen.decoder.overlap),
        )

    def among(self, decided: tuple[Decision, ...] | None) -> LegPlan:
        """Return the plan with the prefiller that the shared ledger chose (`decided`), if it was in time."""
        if decided is None:
            return self
        near = self.chosen.near or (self.chosen.prefiller,)
        return self._replace(chosen=self.chosen._replace(prefiller=near[decided[0].index]))


class LegPlacing:
    """The choice of both replicas of a request in two legs, with the load reserved on both in one step."""

    def __init__(self, eligible: Eligibility, router: Router, metrics: Metrics):
        self._eligible, self._router, self._metrics = eligible, router, metrics

    def plan(self, exchange: Exchange, evaluation: Evaluation, now: float) -> LegPlan | None:
        """Return a plan for two legs if these are chosen over one, else None; reserves nothing."""
        prompt, chosen, transfer, first_body = exchange.prompt, evaluation.legs, None, None
        if not evaluation.settled:
            chosen = two_legs.choose_among(self._router, self.ways(exchange, evaluation, now))
        if prompt is not None and chosen is not None:
            transfer = self._eligible.backends[chosen.prefiller.replica].replica.transfer
            if transfer is not None:
                first_body = transfer.first_body(prompt.path, exchange.request.body)
        if chosen is None or transfer is None or first_body is None:
            self._metrics.leg_choices.inc("whole")
            return None
        self._metrics.leg_choices.inc("apart")
        return LegPlan(chosen, transfer, first_body)

    def ways(self, exchange: Asker, evaluation: Evaluation, now: float) -> list[legs.Ways]:
        """Return the evaluated pairs of replicas to choose the legs from; none where the request stays whole."""
        return two_legs.ways(self._router, evaluation, self.pairings_of(exchange), now)

    def pairings_of(self, exchange: Asker) -> Sequence[Pairing]:
        """Return the candidates for the legs of a request; none where it stays whole."""
        if exchange.stays_whole or exchange.response is not None or len(exchange.request.body) > MOST_BYTES:
            return ()
        return self._pairings(exchange.prompt, exchange.tried)

    def look_into(self, exchange: Exchange) -> None:
        """Mark a request to stay whole if no first leg can be made of its body; called before admission judges it."""
        prompt, body = exchange.prompt, exchange.request.body
        sides = self._eligible.sides(prompt.model or None) if prompt is not None else None
        if prompt is None or prompt.path not in PATHS or sides is None or len(body) > MOST_BYTES:
            return
        ways = [kind.transfer for kind in sides.kinds]
        exchange.stays_whole = bool(ways) and all(one.first_body(prompt.path, body) is None for one in ways)

    def take(
        self,
        exchange: Exchange,
        evaluation: Evaluation,
        plan: LegPlan,
        now: float,
        decided: tuple[Decision, ...] | None = None,
    ) -> None:
        """Reserve a prefill and a decode replica for the request, and add an attempt at the prefill replica.

        Where both legs are sent at the same time, add the attempts of both.

        `decided`: the shared ledger's decisions for both legs, or None.
        """
        (chosen, transfer, first_body), prompt = plan, exchange.prompt
        assert prompt is not None
        backends = self._eligible.backends
        prefiller, decoder = backends[chosen.prefiller.replica], backends[chosen.decoder.replica]
        placement, reserved, move = two_legs.commit(
            self._router, evaluation, chosen, now, None if decided is None else (decided[0], decided[1])
        )
        held = exchange.legs = Legs(transfer, prefiller, decoder, reserved, placement.predicted, *move)
        prompt = exchange.prompt = as_variant(prompt, placement.demand.space)
        prompt.token_ids = b""  # legs carry text
        if transfer.header:  # the decoder's side sends the first leg itself
            held.unsent, held.computing = placement, placement.punctual_ttft
            second_leg(exchange, now)
            return
        if isinstance(transfer, MeetingTransfer):
            meeting = prefiller.replica.meeting
            assert meeting is not None, "one that nobody finds is given no first leg"
            members, held.parameters = transfer.meet(meeting)
            first_body = with_first(first_body, members)
        first = PrefillAttempt(prefiller, placement, prompt, False, now, leg=Leg.PREFILL, body=first_body)
        exchange.add_attempt(first)
        if isinstance(transfer, MeetingTransfer):
            held.first, held.computing = first, placement.punctual_ttft
            second_leg(exchange, now)

    def choose(
        self, prompt: Prompt, evaluation: Evaluation, now: float
    ) -> tuple[legs.LegChoice | None, legs.LegChoice | None]:
        """Return (the legs that a request would get, None) or (None, the cheapest legs or None); reserves nothing."""
        ways = two_legs.ways(self._router, evaluation, self._pairings(prompt, ()), now)
        chosen, cost = two_legs.choose_among(self._router, ways), legs.price(self._router.policy)
        if chosen is not None or cost is None:
            return chosen, None
        return None, legs.best(legs.cheapest(cost, one) for one in ways)

    def _pairings(self, prompt: Prompt | None, tried: tuple[Backend, ...]) -> list[Pairing]:
        """Return (prefillers, decoders) for a prompt, one pair of lists for each group that exchanges caches."""
        if prompt is None or prompt.path not in PATHS:
            return []
        if prompt.previous_response is not None or prompt.several or prompt.copies != 1:
            return []
        sides, now = self._eligible.sides(prompt.model or None), monotonic()

        def candidates(backends: list[Backend], may: Callable[[Backend, Prompt], bool]) -> list[Candidate]:
            left = [one for one in backends if one not in tried and may(one, prompt)]
            return [one.candidate for one in self._eligible.not_full(left, now)]

        return [
            (candidates(kind.prefillers, self._may_prefill), candidates(kind.decoders, self._eligible.has_room))
            for kind in (sides.kinds if sides is not None else ())
        ]

    def patience(self, exchange: Exchange, second: Attempt) -> float:
        """Return the seconds after the sending of a second leg at which its KV transfer counts as stalled."""
        held = exchange.legs
        assert held is not None
        computed = max(0.0, held.computed_at - second.sent_at)
        return computed + STALLS_SECONDS + STALLS_TIMES * (held.fetching + second.placement.ttft)

    def next_decoder(self, exchange: Exchange, demand: Demand, now: float) -> bool:
        """Add a second leg on another decoder, with the same transfer parameters; return whether there was one."""
        held, prompt = exchange.legs, exchange.prompt
        sides = self._eligible.sides(prompt.model or None) if prompt is not None else None
        if held is None or prompt is None or sides is None:
            return False
        left = {
            one.id: one
            for kind in sides.kinds
            if kind.transfer is held.transfer and held.prefiller in kind.prefillers
            for one in kind.decoders
            if one is not held.prefiller and one not in exchange.tried and self._eligible.has_room(one, prompt)
        }
        candidate = two_legs.weigh_decoder(self._router, demand, [one.candidate for one in left.values()], now)
        if candidate is None:
            return False
        held.decoder = left[candidate.replica]
        held.moved, held.moving = two_legs.begin_transfer(
            self._router, held.prefiller.candidate, candidate, demand, now
        )
        held.placement = two_legs.commit_decoder(self._router, demand, candidate, now)
        second_leg(exchange, now)
        return True

    def _may_prefill(self, backend: Backend, prompt: Prompt) -> bool:
        if isinstance(backend.replica.transfer, MeetingTransfer) and backend.replica.meeting is None:
            return False
        return prompt.path not in backend.keeps_nothing and self._eligible.has_room(backend, prompt)


def second_leg(exchange: Exchange, now: float) -> None:
    """Add the attempt of the second leg, on the reserved decoder."""
    held = exchange.legs
    assert held is not None and held.placement is not None and exchange.prompt is not None
    placement, held.placement = held.placement, None
    body = held.transfer.second_body(exchange.request.body, held.parameters)
    prompt = exchange.prompt
    second = exchange.attempt_type(held.decoder, placement, prompt, prompt.stream, now, leg=Leg.DECODE, body=body)
    exchange.add_attempt(second)


def leg_head(exchange: Exchange, attempt: Attempt, length: int, parent: Parent | None) -> bytes:
    """Return the request head of a leg, with the prefiller's address where the transfer has a header for it."""
    head, held = request_head(exchange, attempt, length, parent), exchange.legs
    if held is None or not held.transfer.header:
        return head
    replica = held.prefiller.replica
    at = bracketed(replica.address or replica.host).encode()
    return b"%b%b: %b:%d\r\n\r\n" % (head[:-2], held.transfer.header, at, replica.port)


class PrefillAttempt(Attempt):
    """A first leg, whose answer is collected, judged when complete, and never relayed."""

    __slots__ = ()

    def head(self, status: int, head: Head, body: bytes) -> None:
        self.status, self.response_head = status, head
        if (error := self._head_error()) is not None:
            self.handler.failures.failed(self, error)
        elif body:
            self.data(body)

    def data(self, data: bytes) -> None:
        self.withheld += data
        if len(self.withheld) > MOST_KEPT:
            self.handler.failures.failed(self, _foreign(f"answered a first leg with more than {MOST_KEPT} bytes"))

    def end(self) -> None:
        self.upstream = None
        self.exchange.run_isolated(self._complete)

    def _head_error(self) -> UpstreamError | None:
        status = self.status
        content_type = (self.response_head.get(b"content-type") or b"").lower()
        if status == 200:
            if content_type.startswith(b"application/json"):
                return None
            return _foreign(f"answered a first leg with {media_type(content_type)}")
        if foreign_head(status, content_type):
            return _foreign(f"answered {status} with {media_type(content_type)}")
        if status in retries.RETRYABLE or status in DOUBTFUL:
            self.handler.settling.record_error(self.exchange, self, of_status(status))
            return UpstreamError(of_status(status), f"answered {status}")
        return UpstreamError(retries.LEG_REFUSED, f"answered a first leg with {status}")

    def _complete(self) -> None:
        exchange, held = self.exchange, self.exchange.legs
        if held is None:
            return
        answer = self.withheld
        if self.response_head.is_chunked:
            answer = unchunked(answer)
        found = self._read(exchange, held, answer)
        if isinstance(found, UpstreamError):
            self.handler.failures.failed(self, found)
            return
        self.first_at = monotonic()
        held.usage = read_usage(answer)
        self.end_as(AttemptEvent.FINISHED)
        if held.first is self:
            held.first, held.computing, held.computed_at, self.body = None, 0.0, self.first_at, None
            self.handler.settling.handed_over(exchange, self, held)
            return
        held.parameters, held.until = found, self.first_at + held.transfer.lease_seconds - MARGIN
        self.handler.dispatch(exchange, ExchangeEvent.HANDED_OVER, found)

    def _read(self, exchange: Exchange, held: Legs, answer: bytes) -> bytes | UpstreamError:
        """Return the second leg's transfer parameters from a complete answer, or an error if it has none."""
        if fault := error_status(answer, False):
            self.handler.settling.record_error(exchange, self, retries.ERROR_ANSWER)
            return UpstreamError(retries.ERROR_ANSWER, f"answered 200 with an error that amounts to {fault}")
        if cut_short(self, exchange.request.path, answer):
            return UpstreamError(retries.ABORTED, "aborted it")
        try:
            parameters = held.transfer.parameters(answer)
        except ValueError as error:
            return _foreign(f"answered a first leg with {answer[:40]!r}: {error}")
        if parameters == b"":
            return UpstreamError(retries.NOT_KEPT, "ended the answer with its first token")
        if parameters is None:
            backend, path = self.backend, exchange.request.path
            if path not in backend.keeps_nothing:
                backend.keeps_nothing.add(path)
                log.warning("replica %s keeps no KV cache for other replicas (%s, %s), so requests to it stay whole: %s",
                            backend.id, held.transfer.name, path, backend.replica.dialect.remedies.transfer)  # fmt: skip
            return UpstreamError(retries.NOT_KEPT, "computed a prompt and kept nothing for another replica")
        return parameters


def _foreign(what: str) -> UpstreamError:
    return UpstreamError(retries.FOREIGN_ANSWER, what)
