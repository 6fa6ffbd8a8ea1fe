"""Requests in two legs: one replica computes the prompt (prefill), another writes the answer (decode).

The first leg is the client's request, changed to generate one token and not to stream. Its answer is not relayed to the
client, but contains parameters for the transfer of the KV cache. These go into the second leg, whose answer the client
gets. With some transfers (`MeetingTransfer`) both legs are sent at once, with others the decoder's side sends the first
one itself. A request that is not split into legs "stays whole".

The Router predicts the seconds of each pair of replicas (`policies.legs`), a `Transfer` of the engine's dialect writes
the bodies of the legs, and `retries` has the rules for failures.
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

from ...http.chunks import unframed
from ...http.upstream import Head, UpstreamError
from ...prompt.prompt import as_variant
from ..backend import Backend
from ..exchange import Attempt, Exchange, Legs
from ..failures import retries
from ..failures.blame import DOUBTFUL
from ..failures.retries import of_status
from ..placement.askers import Asker
from ..placement.eligibility import Eligibility
from ..responses.answers import error_status, foreign_head, media_type
from ..responses.usage import read_usage
from ..settling import cut_short
from ..states import AttemptEvent, ExchangeEvent, Leg

if TYPE_CHECKING:
    from replicas.engines.transfer import Transfer

    from ...ops.metrics import Metrics
    from ...prompt import Prompt

log = logging.getLogger("hitherto.proxy")

# The longest body of a request in two legs. Writing the first leg's body parses the client's, which takes 2 ms per MiB
# of the event loop.
MOST_BYTES = 2 * 2**20
MOST_KEPT = 4 * 2**20  # bytes of a first leg's answer: for a million tokens it lists 65,536 blocks
# The prefiller keeps the KV cache for the seconds of a lease. The transfer parameters count as expired this many
# seconds before its end, because the other engine must begin to read before that.
MARGIN = 10.0
# A second leg without a byte is given up after STALLS_TIMES the predicted time and STALLS_SECONDS more. Engines
# themselves give up a stalled transfer after minutes, if at all.
STALLS_TIMES, STALLS_SECONDS = 10.0, 10.0


class LegPlan(NamedTuple):
    """A choice of two replicas for the legs of a request, before load is reserved on them.

    `first_body`: the request body of the first leg.
    """

    chosen: legs.LegChoice
    transfer: Transfer
    first_body: bytes

    def to_decide(self, whole: Evaluation) -> tuple[Evaluation, Evaluation]:
        """Return the evaluations of both legs (prefill, decode), for the load ledger in Redis that gateways share.

        With the first evaluation, the ledger may choose another prefiller, if the cache gets from there to the decoder
        about as fast. With the second one, the ledger only reserves load on the decoder.

        `whole`: the evaluation of the request in one leg.
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
        """Return the plan with the prefiller that the shared ledger chose.

        `decided`: the ledger's decisions for both legs; None if they were late, in which case the plan stays as it is.
        """
        if decided is None:
            return self
        near = self.chosen.near or (self.chosen.prefiller,)
        return self._replace(chosen=self.chosen._replace(prefiller=near[decided[0].index]))


class LegPlacing:
    """The choice of both replicas for a request in two legs, which reserves load on both in one step."""

    def __init__(self, eligible: Eligibility, router: Router, metrics: Metrics):
        self._eligible, self._router, self._metrics = eligible, router, metrics

    def plan(self, exchange: Exchange, evaluation: Evaluation, now: float) -> LegPlan | None:
        """Return a plan for two legs, or None if the request goes to one replica; no load is reserved yet.

        A request that must stay in one leg (`stays_whole`), for example to resume a stream, is not counted as a choice.
        """
        if exchange.stays_whole:
            return None
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
        """Return the groups of replicas from which the two legs can be chosen, with their costs.

        There is one entry for each group of replicas that can exchange KV caches, and none if the request must stay in
        one leg.
        """
        return two_legs.ways(self._router, evaluation, self.pairings_of(exchange), now)

    def pairings_of(self, exchange: Asker) -> Sequence[Pairing]:
        """Return the prefillers and decoders that a request's legs may use, in pairs of lists.

        There is a pair for each group of replicas that can exchange KV caches. There are none if the request must stay
        in one leg.
        """
        if exchange.stays_whole or exchange.response is not None or len(exchange.request.body) > MOST_BYTES:
            return ()
        return self._pairings(exchange.prompt, exchange.tried)

    def look_into(self, exchange: Exchange) -> None:
        """Keep a request on one replica if its body cannot be changed into the body of a first leg (prefill).

        That is so if it cannot be done for any of the KV transfers that the model's replicas use. Must be called before
        admission, which otherwise assumes that replicas for two legs may be used.
        """
        prompt, body = exchange.prompt, exchange.request.body
        sides = self._eligible.sides(prompt.model or None) if prompt is not None else None
        if prompt is None or prompt.path not in PATHS or sides is None or len(body) > MOST_BYTES:
            return
        ways = [kind.transfer for kind in sides.kinds]
        exchange.stay_whole(bool(ways) and all(one.first_body(prompt.path, body) is None for one in ways))

    def take(
        self,
        exchange: Exchange,
        evaluation: Evaluation,
        plan: LegPlan,
        now: float,
        decided: tuple[Decision, ...] | None = None,
    ) -> None:
        """Reserve load on a prefill and a decode replica, and add the attempts that are to be sent now to the request.

        Usually this is the attempt of the first leg alone. If both legs are sent at the same time, both attempts are
        added. If the decoder's engine sends the first leg itself, only the attempt of the second leg is added.

        `decided`: the shared ledger's decisions for both legs, or None.
        """
        (chosen, transfer, first_body), prompt = plan, exchange.prompt
        assert prompt is not None
        backends = self._eligible.backends
        prefiller, decoder = backends[chosen.prefiller.replica], backends[chosen.decoder.replica]
        placement, reserved, move = two_legs.commit(
            self._router, evaluation, chosen, now, None if decided is None else (decided[0], decided[1])
        )
        held = Legs(transfer, prefiller, decoder, reserved, placement.predicted, *move)
        prompt = as_variant(prompt, placement.demand.space)
        prompt.forget_ids()  # both legs are sent as text
        exchange.split(held, prompt)
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
        """Return which legs a request would get, to explain a decision; no load is reserved.

        The result is (the chosen legs, None), or, if one replica would be chosen, (None, the cheapest legs). The
        cheapest legs are None if there are none, or if the policy does not count in seconds.
        """
        ways = two_legs.ways(self._router, evaluation, self._pairings(prompt, ()), now)
        chosen, cost = two_legs.choose_among(self._router, ways), legs.price(self._router.policy)
        if chosen is not None or cost is None:
            return chosen, None
        return None, legs.best(legs.cheapest(cost, one) for one in ways)

    def _pairings(self, prompt: Prompt | None, tried: tuple[Backend, ...]) -> list[Pairing]:
        """Return the (prefillers, decoders) for a prompt, one pair of lists for each group that exchanges KV caches.

        `tried`: replicas that have failed the request, which are left out.
        """
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
        """Return how many seconds a second leg (decode) may take to answer before its KV transfer counts as stalled.

        The seconds count from the time when the second leg was sent.
        """
        held = exchange.legs
        assert held is not None
        computed = max(0.0, held.computed_at - second.sent_at)
        return computed + STALLS_SECONDS + STALLS_TIMES * (held.fetching + second.placement.ttft)

    def next_decoder(self, exchange: Exchange, demand: Demand, now: float) -> bool:
        """Add another attempt of the second leg, on another decoder; return False if there is no other decoder.

        The transfer parameters from the first leg's answer are used again.

        `demand`: the request, as policies see it.
        `now`: in monotonic seconds.
        """
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
    """Create the attempt of the second leg, and add it as the exchange's last one.

    It goes to the decoder on which load was reserved for it.
    """
    held = exchange.legs
    assert held is not None and held.placement is not None and exchange.prompt is not None
    placement, held.placement = held.placement, None
    body = held.transfer.second_body(exchange.request.body, held.parameters)
    prompt, lines = exchange.prompt, b""
    if held.transfer.header:  # the decoder's side sends the first leg itself
        replica = held.prefiller.replica
        at = bracketed(replica.address or replica.host).encode()
        lines = b"%b: %b:%d\r\n" % (held.transfer.header, at, replica.port)
    second = exchange.attempt_type(
        held.decoder, placement, prompt, prompt.stream, now, leg=Leg.DECODE, body=body, lines=lines
    )
    exchange.add_attempt(second)


class PrefillAttempt(Attempt):
    """The attempt of a first leg (prefill), whose answer is collected, checked when complete, and never relayed."""

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
        """Return the error if a first leg's answer cannot be used, as far as its status and headers show; else None.

        An error status that may be the replica's fault is also recorded in the exchange.
        """
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
        """Use the complete answer to a first leg: end the attempt, and have the second leg sent if it was not sent yet.

        If the answer is an error, or has no parameters for the KV transfer, the attempt fails.
        """
        exchange, held = self.exchange, self.exchange.legs
        if held is None:
            return
        answer = unframed(self.withheld, self.response_head)
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
        exchange.happened(ExchangeEvent.HANDED_OVER, found)

    def _read(self, exchange: Exchange, held: Legs, answer: bytes) -> bytes | UpstreamError:
        """Return the parameters of the KV transfer from a first leg's (prefill's) complete answer.

        Returns an error if the answer is itself an error, was cut short, or has no parameters.
        """
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
