"""The queue in front of the replicas: a request is sent if a replica has room, else waits or gets a Retry-After.

`policies.Admission` decides. There is one instance of it for each group of replicas with the same prompt format (their
prompt space, `gateway.spaces`), here called a fleet. Each request has a ticket, a `QueuedRequest`. This module has the
clock, the requests and the metrics.

A waiting request has no attempt, so no load is reserved for it; its replica is chosen by the load at the time when it
leaves the queue. Retries do not wait again. Without service classes and limits there is no queue, and `Placing.queue`
is None.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Set
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, Any

from policies import Admission, AdmissionDecision, Evaluation, QosClass, QueuedRequest, Slo, admit
from policies.admission import Space
from policies.classes import NO_LIMITS
from policies.decisions import LEFT, NO_REPLICA, QUEUED, REFUSED, SENT, SHUTTING_DOWN, SPILLED

from ...durations import parse_limits
from ...errors import ApiError, bad
from ...prompt.prompt import NO_PREFILL, PROMPT_PATHS, unread
from ..exchange import MOST, Attempt, Exchange, output_tokens, time_per_token
from ..paths import UNREAD_PROMPTS
from ..placement.askers import Asker
from ..placement.placing import Placing
from ..responses.usage import Usage
from .capping import LIMITS, capped
from .overload import Overload

if TYPE_CHECKING:
    from ...ops.metrics import Metrics
    from ...prompt import Prompt
    from .control import OverloadControl

SLO_HEADER = b"x-hitherto-slo"
SLOW_POOL = b"slow pool"  # the note for the client that its answer comes from a slow pool of replicas
# Seconds between two checks of waiting requests: deadlines may pass, and other gateways' load may end.
LOOK_SECONDS = 0.05
MOST_RETRY_AFTER = 600  # seconds
# Why a request is refused, in words for the client, by the reason of the decision.
WHY = {
    "ttft": "its first token would come too late, after the {limit:g} s that it may take",
    "tpot": "its tokens would come too slowly, and so would those of the answers under way",
    "full": "all replicas are full",
    "queue_full": "all replicas are full, and so is the queue",
    "shed": "all replicas and the queue are full, and its place went to a request of a higher class, or of who has less in it",
    "deadline": "it has waited in the queue as long as it may, and all replicas are still full",
    "control": "requests of its class are refused until those of higher classes are answered in time again",
}


class Queue:
    """The admission of requests, and the queue of those that wait for a replica with room."""

    def __init__(
        self, overload: Overload, placing: Placing, metrics: Metrics, model_of: Callable[[Prompt], str] = lambda _: ""
    ):
        """Create an empty queue. `model_of(prompt)`: returns the prompt's model label in metrics."""
        self._model_of = model_of
        self._classes, self._rules, self._tenant_header = overload
        self._placing, self._metrics = placing, metrics
        self._space = Space()  # the number and bytes of the waiting requests of all fleets, which are bounded together
        self._fleets: dict[int, Admission] = {}  # by the number of a prompt space
        self._names: Mapping[int, str] = {}  # the number of a prompt space -> its base model
        self._tickets: dict[Asker, tuple[Admission, QueuedRequest]] = {}  # with the fleet that admits the request
        self.control: OverloadControl | None = None
        self._notes: dict[Asker, bytes] = {}  # request -> how its answer is degraded, for a header
        self._looks = False  # whether a check of the waiting requests is scheduled or under way
        self._under_way: Iterator[None] | None = None  # the rest of a check, for the next event-loop iteration
        self._again = False  # whether to check again after the present check, since something has changed meanwhile
        self._timer: asyncio.TimerHandle | None = None
        placing.pulse.on_held_up.append(self._held_up)
        placing.router.on_room(self.look)
        metrics.read_from(self.reading)

    @property
    def classes(self) -> tuple[QosClass, ...]:
        return self._classes.all

    # --- admission, of a new request or one whose turn it may be

    def admit(self, asker: Asker, evaluation: Evaluation, now: float) -> Evaluation | None:
        """Decide whether a request for which a replica could be chosen is sent now, queued or refused.

        The request is new, or it waits in the queue and may be the next to leave. Returns the evaluation by which to
        place it, or None if it was queued or refused.

        `evaluation`: the policy's choice for it and its candidates.
        `now`: in monotonic seconds.
        """
        known = self._tickets.get(asker)
        if known is None:
            prompt = _computed(asker)
            if prompt is None or asker.tried:
                return evaluation
            if self._placing.eligible.roles.any and asker.is_forwarded:
                self._placing.legs.look_into(asker)
            known = self._ticket(asker, prompt, evaluation.candidates[0].space, now)
            if known is None:
                return None
        elif not known[1].waits:
            return evaluation  # it was admitted before, and is placed again
        return self._judge(asker, *known, evaluation, now)

    def await_replica(self, asker: Asker, error: ApiError, now: float) -> bool:
        """Queue a request for whose model no replica is ready, unless it must not wait.

        Returns True if the request was queued or refused here, False if the caller has to refuse it with `error`.

        `error`: why no replica can take the request. It may wait only after a 503 without a code, since only these may
            pass.
        """
        known, may_come = self._tickets.get(asker), error.status == 503 and error.code is None
        if known is None:
            prompt = _computed(asker)
            if prompt is None or asker.tried or not may_come:
                return False
            known = self._ticket(asker, prompt, self._placing.eligible.models.spaces[0].number, now)
            if known is None:
                return True
        elif not known[1].waits or not may_come:
            self._leave_line(*known, REFUSED, NO_REPLICA)  # its ticket is kept until `ended` is called
            self.look()
            return False
        fleet, ticket = known
        waited, tokens = ticket.waits, asker.prompt.tokens if asker.prompt is not None else 0
        if not fleet.await_replica(ticket, tokens, error.discreet, now):
            self._metrics.admission.inc(REFUSED, ticket.qos.name, NO_REPLICA)
            return False
        if not waited:
            self._metrics.admission.inc(QUEUED, ticket.qos.name, NO_REPLICA)
            self._look_if_displaced()
        return True

    def _judge(
        self, asker: Asker, fleet: Admission, ticket: QueuedRequest, evaluation: Evaluation, now: float
    ) -> Evaluation | None:
        """Have the admission of a group of replicas (`fleet`) decide about a request, and act on its decision.

        The decision is counted in metrics. Returns the evaluation by which to place the request, or None if it was
        queued or refused.
        """
        waited, prompt, placing = ticket.waits, _computed(asker), self._placing
        verdict, evaluation = admit(
            placing.router,
            fleet,
            ticket,
            evaluation,
            now,
            lambda: placing.eligible.slow_pool(prompt),
            # /decide requests are not sent by the gateway, so their bodies cannot be rewritten.
            asker.is_forwarded and prompt is not None and prompt.path in LIMITS,
            placing.legs.pairings_of(asker) if placing.eligible.roles.any else (),
        )
        if not (waited and verdict.decision == QUEUED):
            self._metrics.admission.inc(verdict.decision, ticket.qos.name, verdict.reason)
        if verdict.decision in SENT:
            if waited:
                self._metrics.queue_seconds.observe(ticket.qos.name, now - ticket.since)
            if verdict.cap:
                self._cap(asker, verdict.cap)
            elif verdict.decision == SPILLED:
                self._notes[asker] = SLOW_POOL
            return evaluation
        if verdict.decision == QUEUED:
            if not waited:
                self._look_if_displaced()
        else:
            self._turn_away(asker, ticket, verdict)
        return None

    def _cap(self, asker: Asker, tokens: int) -> None:
        """Limit the request's answer to so many output tokens, in its body and in its prepared prompts."""
        prompt = asker.prompt
        assert prompt is not None
        asker.request.body = capped(asker.request.body, prompt.path, tokens)
        for one in (prompt, prompt.also):
            if one is not None:
                one.cap(tokens)
        self._notes[asker] = b"max_tokens=%d" % tokens

    def note(self, exchange: Exchange, attempt: Attempt) -> bytes:
        """Return the header line that tells the client how its answer was degraded; b"" if it was not."""
        note = self._notes.get(exchange)
        if note is SLOW_POOL and not attempt.backend.replica.spill:
            return b""  # a retry or the shared ledger has chosen another replica
        return b"" if note is None else b"x-hitherto-degraded: %b\r\n" % note

    def _ticket(self, asker: Asker, prompt: Prompt, space: int, now: float) -> tuple[Admission, QueuedRequest] | None:
        """Return the admission that decides on a request, and a new ticket for it; None if it was refused.

        A ticket (`QueuedRequest`) is what admission knows of a request. The admission is that of the replicas with the
        prompt's format, called its space. A request is refused here if one of its headers is invalid.

        `space`: the number of the space, for a request whose prompt is not read.
        """
        key, header = asker.tenant, asker.request.header
        try:
            qos = self._class(asker, prompt)
            slo, given = qos.slo, header(SLO_HEADER)
            if given is not None:
                slo = _of_request(given).within(slo)
        except ApiError as error:
            asker.unplaced(error)
            return None
        name = key.name if key is not None else None
        tenant = header(self._tenant_header) if self._tenant_header is not None else name
        fleet = self._fleet(prompt.space if asker.prompt is not None else space)
        if self.control is not None and asker.prompt is not None:  # there are no metrics of prompts that are not read
            self.control.follow(fleet, self._model_of(prompt), self._names.get(prompt.space, ""))
        ticket = QueuedRequest(qos, slo, asker.begun, tenant or "", asker.size, asker)
        ticket.held = now - asker.begun - self._placing.pulse.ran(asker.begun, now)
        self._tickets[asker] = fleet, ticket
        return fleet, ticket

    def _class(self, asker: Asker, prompt: Prompt) -> QosClass:
        key = asker.tenant
        return self._classes.of(
            asker.request.header, prompt.path, prompt.model, key.name if key else None, key.qos_class if key else None
        )

    def class_of(self, exchange: Exchange) -> str:
        """Return the name of the service class of a request with a prompt."""
        assert exchange.prompt is not None
        return self.qos_of(exchange, exchange.prompt).name

    def qos_of(self, exchange: Exchange, prompt: Prompt) -> QosClass:
        """Return a request's service class.

        It is the class on the request's ticket (`QueuedRequest`) if it has one, else the one that its headers and API
        key select.
        """
        known = self._tickets.get(exchange)
        return known[1].qos if known is not None else self._class(exchange, prompt)

    def _fleet(self, space: int) -> Admission:
        if space not in self._fleets:
            self._fleets[space] = Admission(self._classes, self._rules, self._space)
        return self._fleets[space]

    def keep(self, spaces: Mapping[int, str], models: Set[str]) -> None:
        """Drop the admission state of groups of replicas that no longer exist, once no request waits there.

        `spaces`: the number of each existing prompt space (group of replicas with one prompt format) -> its base model.
        `models`: the model labels in metrics.
        """
        self._names = {number: name for number, name in spaces.items() if name in models}
        for space in self._fleets.keys() - spaces.keys():
            if self._fleets[space].close():
                del self._fleets[space]
        if self.control is not None:
            self.control.keep(self._fleets.values(), models)

    def _turn_away(self, asker: Asker, ticket: QueuedRequest, verdict: AdmissionDecision) -> None:
        """Refuse a request with a 429 that says why, and when to ask again; its ticket (`QueuedRequest`) is dropped."""
        self._take_ticket(asker)
        seconds = min(MOST_RETRY_AFTER, max(1, ceil(verdict.retry_after)))
        why = WHY[verdict.reason].format(limit=ticket.slo.ttft or 0.0)
        error = ApiError(
            429,
            f"{why}; ask again in {seconds} s",
            code="overloaded",
            headers=[(b"retry-after", b"%d" % seconds)],
        )
        asker.run_isolated(asker.unplaced, error)

    # --- waiting requests

    def look(self) -> None:
        """Schedule a check of the waiting requests: there may be room for some, or no replica left."""
        if self._looks:
            self._again = True
        elif self._space.requests or self._space.untold:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Check the waiting requests, at most `MOST` (12) of them per event-loop iteration."""
        steps, self._under_way = self._under_way or self._steps(), None
        try:
            if any(next(steps, steps) is steps for _ in range(MOST)):
                return
            self._under_way = steps
            asyncio.get_running_loop().call_soon(self._look)
        finally:
            if self._under_way is None:
                self._looks = False
                if self._again:
                    self._again = False
                    self.look()
                self._look_later()

    def _look_later(self) -> None:
        if self._space.requests and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self.look()

    def _held_up(self, now: float, seconds: float) -> None:
        for fleet in self._fleets.values():
            fleet.held_up(seconds)

    def _look_if_displaced(self) -> None:
        """Schedule checks after a request began to wait, since it may have displaced others from the queue."""
        if self._space.untold:
            self.look()
        self._look_later()

    def _steps(self) -> Iterator[None]:
        """Refuse the requests that have waited too long or were displaced, and place those that have room now.

        Yields after each request.
        """
        self._placing.pulse.look(monotonic())
        for fleet in [*self._fleets.values()]:
            for ticket, verdict in fleet.turned_out(monotonic()):
                if verdict.decision == QUEUED:
                    self._call(ticket)
                else:
                    self._metrics.admission.inc(REFUSED, ticket.qos.name, verdict.reason)
                    if ticket.payload is not None:  # else its client has left meanwhile
                        self._turn_away(ticket.payload, ticket, verdict)
                yield
            for head in fleet.heads(monotonic()):
                if not self._call(head):
                    break
                yield

    def _call(self, ticket: QueuedRequest) -> bool:
        """Have a waiting request placed if there is room for it; return whether the next one may be checked at once.

        It may not if the shared load ledger in Redis has yet to count this request. Another check follows then.
        """
        asker: Asker = ticket.payload
        asker.run_isolated(self._placing.place, asker)
        shared = self._placing.shared
        # In the shared ledger the load of an admitted request is counted later, and another check follows then.
        return shared is None or not shared.joined or ticket.costs is None

    # --- requests that leave

    def forget(self, asker: Asker, decision: str = LEFT, reason: str = "client") -> None:
        """Drop a request's ticket, since the request has ended or needs no replica any more.

        `decision`, `reason`: the labels by which metrics count the request if it was still waiting.
        """
        known = self._take_ticket(asker)
        if known is not None:
            self._leave_line(*known, decision, reason)
        self.look()

    def _leave_line(self, fleet: Admission, ticket: QueuedRequest, decision: str, reason: str) -> None:
        """Take a request out of its queue and count that in metrics, if it is still waiting."""
        if ticket.waits:
            fleet.leave(ticket, monotonic())
            self._metrics.admission.inc(decision, ticket.qos.name, reason)

    def _take_ticket(self, asker: Asker) -> tuple[Admission, QueuedRequest] | None:
        """Drop a request's ticket; return it with the admission that it belongs to, or None if there is no ticket.

        The queue of its class may keep the ticket for a while. So the ticket's reference to the request, with its
        prompt and headers, is removed.
        """
        known = self._tickets.pop(asker, None)
        if known is not None:
            self._notes.pop(asker, None)
            known[1].payload = None
        return known

    def first_token(self, attempt: Attempt, held_up: bool) -> None:
        """Compare the predicted and the measured time to a stream's first token, from which admission learns.

        `held_up`: whether the event loop was stalled meanwhile, so that the time was not measured well.
        """
        known = self._tickets.get(attempt.exchange)
        if known is not None and not held_up and _is_as_estimated(attempt.exchange, attempt, known[1]):
            known[0].first_token(known[1], attempt.first_at - known[1].since)

    def ended(self, exchange: Exchange, outcome: str, usage: Usage | None) -> None:
        """Compare the predictions for a request that has ended with its answer, and count whether the SLO was met.

        Its ticket is dropped.
        """
        known = self._tickets.get(exchange)
        if known is None:
            return
        if outcome == "aborted":
            self.forget(exchange)
        else:  # if it still waits, the gateway is shutting down, or its request timeout has passed
            stops = isinstance(exchange.error, ApiError) and exchange.error.code == SHUTTING_DOWN
            self.forget(exchange, REFUSED, SHUTTING_DOWN if stops else "deadline")
        fleet, ticket = known
        attempt, name, prompt, slo = exchange.attempt, ticket.qos.name, exchange.prompt, ticket.slo
        if prompt is None:  # its first token is not seen
            return
        first_at = exchange.first_answering.first_at if attempt is not None else 0.0
        met: bool | None = None
        as_estimated = attempt is not None and _is_as_estimated(exchange, attempt, ticket)
        if _failed(exchange, outcome):
            if ticket.costs is not None and _is_judged(prompt.stream, prompt, slo):  # it was admitted
                self._metrics.slo_requests.inc(name, self._model_of(prompt), "failed")
            return
        if not as_estimated:
            ticket.costs = None
        if outcome == "aborted":
            # A stream whose client left after the limit without a first token has missed its SLO. If the client left
            # before the limit, or within the answer, the request is not counted.
            if slo.ttft is not None and prompt.stream and not first_at and monotonic() - ticket.since > slo.ttft:
                met = False
        elif outcome != "complete" or attempt is None:
            return
        elif not attempt.streams:
            if _is_judged(False, prompt, slo) and usage is not None and (tokens := usage.completion):
                assert slo.ttft is not None and slo.tpot is not None
                met = attempt.ended_at - ticket.since <= slo.ttft + slo.tpot * (tokens - 1)
        elif first_at and attempt.status < 400:
            ttft, tpot = first_at - ticket.since, time_per_token(attempt, output_tokens(attempt, usage))
            met = fleet.ended(ticket, ttft, tpot, counted=usage is not None and usage.completion is not None)
            if met is not None and as_estimated:
                self._metrics.predicted_answers.inc(name)
                self._metrics.predicted_ttft_seconds.inc(name, by=ticket.ttft)
                self._metrics.delivered_ttft_seconds.inc(name, by=ttft)
        if met is not None:
            self._metrics.slo_requests.inc(name, self._model_of(prompt), "met" if met else "missed")

    def waiting(self) -> dict[str, int]:
        """Return the number of waiting requests of each service class, for all models together."""
        waiting = {one.name: 0 for one in self._classes.all}
        for fleet in self._fleets.values():
            for line in fleet.queues:
                waiting[line.qos.name] += line.count
        return waiting

    def reading(self) -> dict[str, Any]:
        """Return the number and the bytes of waiting requests, as gauges for `Metrics.read_from`."""
        return {"queued_requests": self.waiting(), "queued_bytes": self._space.bytes}


def _failed(exchange: Exchange, outcome: str) -> bool:
    """Return whether a request got no complete answer, through no fault of its client."""
    if outcome in ("complete", "failed"):
        return exchange.result >= 500
    return outcome == "cut" or (outcome == "refused" and exchange.status >= 500)


def _is_judged(streams: bool, prompt: Prompt, limits: Slo) -> bool:
    """Return whether an answer can be compared with these limits on its latency (an SLO).

    A streamed answer can be, if there is any limit. The first token of a non-streamed answer is not seen. Such an
    answer is compared as a whole, which needs both limits (TTFT and TPOT) and an API that generates text.
    """
    return limits != NO_LIMITS if streams else None not in limits and prompt.path in LIMITS


def _is_as_estimated(exchange: Exchange, attempt: Attempt, ticket: QueuedRequest) -> bool:
    """Return whether the predictions that were made at a request's admission hold for the replica that answers it.

    They do not if the prompt's size is unknown, if another replica has failed the request before, or if the shared load
    ledger has chosen another replica.
    """
    sized = attempt.prompt is not None and attempt.prompt.tokens > 0
    return sized and not exchange.tried and attempt.placement.candidate.costs is ticket.costs


def _computed(asker: Asker) -> Prompt | None:
    """Return the prompt that an engine has to compute for a request; None if there is none, so it need not wait.

    A prompt that the gateway does not read is returned as one without tokens, and waits like a short one.
    """
    prompt = asker.prompt
    if prompt is not None:
        path = prompt.path
        return prompt if path in UNREAD_PROMPTS or (path in PROMPT_PATHS and path not in NO_PREFILL) else None
    if asker.request.path in UNREAD_PROMPTS and asker.request.method == "POST":
        return unread(asker.request.path, asker.model)
    return None


def _of_request(given: str) -> Slo:
    """Return the limits on latency (SLO) that a client wrote into its request's header `x-hitherto-slo`.

    Raises ApiError if they are invalid. `given`: the header's value, such as "ttft=2s,tpot=50ms".
    """
    if not given.strip():
        raise bad(f"the header {SLO_HEADER.decode()}: it has no value; write ttft=2s,tpot=50ms, or one of the two")
    try:
        return Slo(**parse_limits(given))
    except ValueError as error:
        raise bad(f"the header {SLO_HEADER.decode()}: {error}") from None
