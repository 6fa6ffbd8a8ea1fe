"""Requests in two legs: one replica computes the prompt (prefill), another writes the answer (decode).

The first leg is the client's request, but for one token and not streamed. Its answer is not relayed; the KV transfer
parameters in it go into the second leg, whose answer the client gets. A request that is not split into legs "stays
whole". The Router prices pairs of replicas (`policies.legs`), the engine's dialect writes the bodies (`Transfer`), and
`retries` has the rules for failures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from policies import Candidate, Decision, Demand, Evaluation, Pairing, Router, legs, two_legs
from replicas import TAKES_TRAFFIC, pairing
from replicas.engines.transfer import PATHS, MeetingTransfer, with_first
from replicas.names import bracketed
from replicas.problems import Problem
from replicas.roles import BOTH, PREFILL, REMEDY, SPEAK_ALIKE, lacks, unlike
from replicas.served import base_names

from ..http.upstream import Upstream, UpstreamError
from ..prompt.prompt import as_variant
from .answers import error_status, foreign_head, media_type, read_usage
from .backend import Backend
from .blame import DOUBTFUL
from .chunks import unchunked
from .exchange import Attempt, Exchange, Legs, Parent, request_head
from .retries import (
    ABORTED,
    ERROR_ANSWER,
    FOREIGN_ANSWER,
    LEG_REFUSED,
    NOT_KEPT,
    RETRYABLE,
    of_status,
)
from .settling import Settling, cut_short
from .states import AttemptEvent, ExchangeEvent, Leg

if TYPE_CHECKING:
    from replicas.engines.transfer import Transfer

    from ..ops.metrics import Metrics
    from ..prompt import Prompt

log = logging.getLogger("hitherto.proxy")

# Writing the first leg's body parses the client's, at 2 ms per MiB on the event loop. Larger requests stay whole.
MOST_BYTES = 2 * 2**20
MOST_KEPT = 4 * 2**20  # bytes of a first leg's answer: for a million tokens it lists 65,536 blocks
# Seconds before the end of a lease at which parameters count as expired: the engine must begin to read before the end.
MARGIN = 10.0
# A second leg without a byte is given up after STALLS_TIMES the predicted time and STALLS_SECONDS more; engines give up
# a transfer after minutes, if at all.
STALLS_TIMES, STALLS_SECONDS = 10.0, 10.0


class Kind(NamedTuple):
    """A group of replicas in which each prefiller can give its cache to each decoder, by the same KV transfer."""

    transfer: Transfer
    prefillers: list[Backend]
    decoders: list[Backend]


def _sides_of(transfer: Transfer, backends: Sequence[Backend]) -> tuple[list[Backend], list[Backend]]:
    return pairing.sides_of(transfer, backends, lambda one: one.replica)


def _by_transfer(backends: Iterable[Backend]) -> dict[Transfer, list[Backend]]:
    ways: dict[Transfer, list[Backend]] = {}
    for one in backends:
        if (transfer := one.replica.transfer) is not None:
            ways.setdefault(transfer, []).append(one)
    return ways


def _sentence(remedy: str) -> str:
    """Return the text of a remedy with a capital first letter."""
    return remedy[0].upper() + remedy[1:]


class Sides:
    """The prefillers and decoders among one model's ready replicas, in groups that can exchange caches."""

    def __init__(self, backends: Sequence[Backend]):
        self.any = any(one.replica.role != BOTH for one in backends)
        self.kinds = [
            Kind(transfer, *group)
            for transfer, alike in _by_transfer(backends if self.any else ()).items()
            for group in pairing.groups(*_sides_of(transfer, alike), transfer)
        ]


class Roles:
    """The roles of all known replicas; each misconfiguration is logged once."""

    def __init__(self) -> None:
        self.any = False  # whether some replica has a role other than both
        self._said: set[str] = set()
        self._pressed: set[str | None] = set()

    def look(self, backends: Sequence[Backend], awaited: Set[str] = frozenset()) -> None:
        """Check the roles of the replicas, and log what is newly wrong.

        `awaited`: roles of replicas that have never been ready, whose models are not known yet.
        """
        self.any = any(one.replica.role != BOTH for one in backends)
        if not any(one.replica.state in TAKES_TRAFFIC for one in backends):
            return
        wrong, unlike_ones = set(), dict[Backend, list[str]]()
        if self.any:
            models: set[str | None] = {name for one in backends for name in base_names(one.replica.models)}
            for model in models or {None}:
                serving = [one.replica for one in backends if one.serves(model)]
                said = f"model {model}: " if model else ""
                if what := lacks({one.role for one in serving} | awaited):
                    wrong.add(f"{said}{what}. {_sentence(REMEDY)}")
                elif what := unlike((one.role, None if one.transfer is None else one.transfer.name) for one in serving):
                    wrong.add(f"{said}{what}. {_sentence(SPEAK_ALIKE)}")
                else:
                    for complaint in unlike_pairs([one for one in backends if one.serves(model)]):
                        lacks_it = complaint.lacking
                        remedy = lacks_it.replica.dialect.remedies.transfer if lacks_it is not None else pairing.REMEDY
                        wrong.add(f"{said}{complaint.text}. {_sentence(remedy)}")
                        for one in (*complaint.prefillers, *complaint.decoders):
                            unlike_ones.setdefault(one, []).append(str(Problem(complaint.text, remedy)))
        for one in backends:
            one.replica.unlike = tuple(dict.fromkeys(unlike_ones.get(one, ())))
        for what in wrong - self._said:
            log.warning("%s", what)
        self._said = wrong

    def pressed(self, model: str | None) -> None:
        """Log that prefill replicas get a model's requests in one leg, since no other replicas are left."""
        if model not in self._pressed:
            self._pressed.add(model)
            log.warning("only replicas with role=%s are left for %s: they get whole requests",
                        PREFILL, f"model {model}" if model else "requests")  # fmt: skip


def unlike_pairs(backends: Sequence[Backend]) -> list[pairing.Complaint[Backend]]:
    """Return why replicas of one model cannot exchange caches."""
    return [
        complaint
        for transfer, alike in _by_transfer(backends).items()
        for complaint in pairing.complaints(*_sides_of(transfer, alike), transfer)
    ]


class Eligible(Protocol):
    """The part of `Eligibility` that legs need."""

    roles: Roles
    backends: dict[str, Backend]

    def sides(self, model: str | None) -> Sides | None: ...
    def has_room(self, backend: Backend, prompt: Prompt) -> bool: ...
    def not_full(self, backends: list[Backend], now: float) -> list[Backend]: ...


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

    def among(self, near: Sequence[Candidate], decided: tuple[Decision, Decision] | None) -> LegPlan:
        """Return the plan with the one of the `near` prefillers that the shared ledger chose (`decided`)."""
        if decided is None:
            return self
        return self._replace(chosen=self.chosen._replace(prefiller=near[decided[0].index]))


class LegPlacing:
    """The choice of both replicas of a request in two legs, with the load reserved on both in one step."""

    def __init__(self, eligible: Eligible, router: Router, metrics: Metrics):
        self._eligible, self._router, self._metrics = eligible, router, metrics

    def plan(self, exchange: Exchange, evaluation: Evaluation, now: float) -> LegPlan | None:
        """Return a plan for two legs if these are chosen over one, else None; reserves nothing."""
        made = self._plan(exchange, evaluation, now)
        self._metrics.leg_choices.inc("apart" if made is not None else "whole")
        return made

    def _plan(self, exchange: Exchange, evaluation: Evaluation, now: float) -> LegPlan | None:
        prompt = exchange.prompt
        if prompt is None:
            return None
        chosen = evaluation.legs
        if not evaluation.settled:
            chosen = two_legs.choose_among(self._router, self.ways(exchange, evaluation, now))
        if chosen is None:
            return None
        transfer = self._eligible.backends[chosen.prefiller.replica].replica.transfer
        if transfer is None or (first_body := transfer.first_body(prompt.path, exchange.request.body)) is None:
            return None
        return LegPlan(chosen, transfer, first_body)

    def ways(self, exchange: Exchange, evaluation: Evaluation, now: float) -> list[legs.Ways]:
        """Return the evaluated pairs of replicas to choose the legs from; none where the request stays whole."""
        return two_legs.ways(self._router, evaluation, self.pairings_of(exchange), now)

    def pairings_of(self, exchange: Exchange) -> Sequence[Pairing]:
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

    def are_there(self, chosen: legs.LegChoice) -> bool:
        """Return whether both chosen replicas are still the same processes and accept requests."""
        backends = self._eligible.backends
        return all(
            (backend := backends.get(one.replica)) is not None
            and backend.candidate is one
            and backend.replica.state in TAKES_TRAFFIC
            for one in (chosen.prefiller, chosen.decoder)
        )

    def take(
        self,
        exchange: Exchange,
        evaluation: Evaluation,
        plan: LegPlan,
        now: float,
        decided: tuple[Decision, Decision] | None = None,
    ) -> None:
        """Reserve the prefill and the decode replica, and add the attempt of the prefill.

        Where both legs are sent at the same time, add the attempts of both.

        `decided`: the shared ledger's decisions for both legs, or None.
        """
        (chosen, transfer, first_body), prompt = plan, exchange.prompt
        assert prompt is not None
        backends = self._eligible.backends
        prefiller, decoder = backends[chosen.prefiller.replica], backends[chosen.decoder.replica]
        placement, reserved, move = two_legs.commit(self._router, evaluation, chosen, now, decided)
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
        first = exchange.attempt_type(prefiller, placement, prompt, False, now, leg=Leg.PREFILL, body=first_body)
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
            (candidates(kind.prefillers, self._may_prefill), candidates(kind.decoders, self._may_decode))
            for kind in (sides.kinds if sides is not None else ())
        ]

    def patience(self, exchange: Exchange, second: Attempt) -> float:
        """Return the seconds after the sending of a second leg at which its KV transfer counts as stalled."""
        held = exchange.legs
        assert held is not None
        computed = max(0.0, held.computed_at - second.sent_at)
        return computed + STALLS_SECONDS + STALLS_TIMES * (self.fetching(held) + second.placement.ttft)

    def fetching(self, held: Legs) -> float:
        """Return the seconds that a decoder is predicted to wait for the prompt's cache.

        The seconds include the prompt's computation where both legs run at the same time.
        """
        return held.moving + held.computing

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
            if one is not held.prefiller and one not in exchange.tried and self._may_decode(one, prompt)
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
        return prompt.path not in backend.keeps_nothing and self._may_decode(backend, prompt)

    def _may_decode(self, backend: Backend, prompt: Prompt) -> bool:
        return self._eligible.has_room(backend, prompt)


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


class LegConductor(Protocol):
    """The part of `Conductor` that handles attempts of all kinds."""

    settling: Settling

    def connected(self, attempt: Attempt, upstream: Upstream) -> None: ...
    def failed(self, attempt: Attempt, error: UpstreamError) -> None: ...
    def lost(self, attempt: Attempt, error: UpstreamError) -> None: ...
    def dispatch(self, exchange: Exchange, event: ExchangeEvent, detail: bytes) -> None: ...


class FirstLegs:
    """The handler of first legs, whose answers are collected, judged when complete, and never relayed."""

    def __init__(self, conductor: LegConductor):
        self._conductor = conductor

    def connected(self, attempt: Attempt, upstream: Upstream) -> None:
        self._conductor.connected(attempt, upstream)

    def lost(self, attempt: Attempt, error: UpstreamError) -> None:
        self._conductor.lost(attempt, error)

    def head(self, attempt: Attempt, body: bytes) -> None:
        error = self._head_error(attempt)
        if error is not None:
            self._conductor.failed(attempt, error)
        elif body:
            self.on_body(attempt, body)

    def _head_error(self, attempt: Attempt) -> UpstreamError | None:
        status = attempt.status
        content_type = (attempt.response_head.get(b"content-type") or b"").lower()
        if status == 200:
            if content_type.startswith(b"application/json"):
                return None
            return _foreign(f"answered a first leg with {media_type(content_type)}")
        if foreign_head(status, content_type):
            return _foreign(f"answered {status} with {media_type(content_type)}")
        if status in RETRYABLE or status in DOUBTFUL:
            self._conductor.settling.record_error(attempt.exchange, attempt, of_status(status))
            return UpstreamError(of_status(status), f"answered {status}")
        return UpstreamError(LEG_REFUSED, f"answered a first leg with {status}")

    def on_body(self, attempt: Attempt, data: bytes) -> None:
        attempt.withheld += data
        if len(attempt.withheld) > MOST_KEPT:
            self._conductor.failed(attempt, _foreign(f"answered a first leg with more than {MOST_KEPT} bytes"))

    def on_complete(self, attempt: Attempt) -> None:
        attempt.exchange.run_isolated(self._complete, attempt)

    def _complete(self, attempt: Attempt) -> None:
        exchange, held = attempt.exchange, attempt.exchange.legs
        if held is None or attempt.leg is not Leg.PREFILL:
            return
        answer = attempt.withheld
        if attempt.response_head.is_chunked:
            answer = unchunked(answer)
        found = self._read(exchange, attempt, held, answer)
        if isinstance(found, UpstreamError):
            self._conductor.failed(attempt, found)
            return
        attempt.first_at = monotonic()
        held.usage = read_usage(answer)
        attempt.end_as(AttemptEvent.FINISHED)
        if held.first is attempt:
            held.first, held.computing, held.computed_at, attempt.body = None, 0.0, attempt.first_at, None
            self._conductor.settling.handed_over(exchange, attempt, held)
            return
        held.parameters, held.until = found, attempt.first_at + held.transfer.lease_seconds - MARGIN
        self._conductor.dispatch(exchange, ExchangeEvent.HANDED_OVER, found)

    def _read(self, exchange: Exchange, attempt: Attempt, held: Legs, answer: bytes) -> bytes | UpstreamError:
        """Return the second leg's transfer parameters from a complete answer, or an error if it has none."""
        if fault := error_status(answer, False):
            self._conductor.settling.record_error(exchange, attempt, ERROR_ANSWER)
            return UpstreamError(ERROR_ANSWER, f"answered 200 with an error that amounts to {fault}")
        if cut_short(attempt, exchange.request.path, answer):
            return UpstreamError(ABORTED, "aborted it")
        try:
            parameters = held.transfer.parameters(answer)
        except ValueError as error:
            return _foreign(f"answered a first leg with {answer[:40]!r}: {error}")
        if parameters == b"":
            return UpstreamError(NOT_KEPT, "ended the answer with its first token")
        if parameters is None:
            self._keeps_nothing(attempt.backend, exchange.request.path, held)
            return UpstreamError(NOT_KEPT, "computed a prompt and kept nothing for another replica")
        return parameters

    def _keeps_nothing(self, backend: Backend, path: str, held: Legs) -> None:
        if path not in backend.keeps_nothing:
            backend.keeps_nothing.add(path)
            log.warning("replica %s keeps no KV cache for other replicas (%s, %s), so requests to it stay whole: %s",
                        backend.id, held.transfer.name, path, backend.replica.dialect.remedies.transfer)  # fmt: skip


def _foreign(what: str) -> UpstreamError:
    return UpstreamError(FOREIGN_ANSWER, what)
