"""Admission: whether a request is sent now, waits in the gateway's queue, or is refused, and when it should retry.

A request can be served in one or more *ways*: by one replica, or by a pair that splits prefill and decode. Each way has
an *estimate*, its predicted TTFT and TPOT (`estimates`). A way has *room* for a request if its replica is idle, or if
the replica's queue is no longer than `engine_wait` seconds and its streams keep the strictest TPOT limit of all
classes. A way *meets* a request's limits if its predicted TTFT, plus the time that the request has already waited, and
its predicted TPOT are within them. `fit` computes both.

A request is sent where there is room and no earlier request has a claim. Unless the steps of its class (`when_full`)
contain `wait` or begin with `degrade`, it is also sent where its limits are met without room. Otherwise the steps are
tried in their order until one accepts the request; if none does, it is refused:

    wait      it is queued, unless its predicted wait exceeds its limit; if it is still waiting at its deadline, the
              steps after this one are tried
    degrade   its answer is capped at `max_tokens_floor` tokens, and it is sent where its limits are met that way, but
              not where a higher class waits
    spill     it is sent to a replica of the overflow pool that meets its limits, or that has room at all
    reject    it is refused
    observe   alone: always sent; requests that `reject` would have refused are counted

Order: classes that have used less than their reserved fraction of the replicas' capacity come before classes that have
used all of it. Among equals, the higher priority goes first (`fair_share`). Within a class, `class_queue` decides. When
the queue is full, requests of the lowest class are displaced.

A *fleet* is the replicas of one model. Not every request can go to every replica. Requests of one class for the same
replicas share one queue, and a waiting request claims only its own replicas against requests behind it. A request for
which no replica is ready also waits, in a queue that claims nothing. No I/O and no clock: the caller passes `now` in
seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from math import inf

from .class_queue import ABSENT, ClassQueue, QueuedRequest, Resource
from .classes import Classes, QosClass
from .control import CAP, HALVE, NONE_REFUSED, SHED, TIGHTEN, Control, Refused
from .costs import Costs
from .decisions import (
    ADMITTED,
    CONTROL,
    DEGRADE,
    DEGRADED,
    NO_OPTIONS,
    OBSERVE,
    OBSERVED,
    QUEUED,
    REFUSED,
    SPILL,
    SPILLED,
    WAIT,
    AdmissionDecision,
    AdmissionOptions,
    Rules,
)
from .estimates import Estimate, Place
from .fair_share import FairShare
from .fit import Fit, Question, unclaimed

_GUESS = 0.5  # seconds of prefill that one replica is assumed to admit per second, until a queue's pace is measured
_MOST_QUEUES = 64  # queues that are kept; beyond that, empty ones are dropped together with their measured paces
_LEARNED = 3  # how many first tokens must have been observed for a group's costs to count as learned


class Space:
    """The bounded capacity for waiting requests, shared by the queues of all models in this process.

    `requests`, `bytes`: how many requests wait now, and the bytes that they take in memory.
    `untold`: how many displaced requests `Admission.turned_out` has not yielded yet.
    """

    __slots__ = ("requests", "bytes", "untold", "fleets")

    def __init__(self) -> None:
        self.fleets: list[Admission] = []
        self.requests = self.bytes = self.untold = 0


class Admission:
    """The admission of requests to one fleet, the replicas of one model.

    `space`: the capacity for waiting requests, shared with other fleets of the same process.
    """

    def __init__(self, classes: Classes, rules: Rules, space: Space | None = None) -> None:
        self.classes, self.rules, self.space = classes, rules, space or Space()
        self.space.fleets.append(self)
        self.queues: list[ClassQueue] = []
        self._fair_share = FairShare(classes)
        self.fit = Fit(classes, rules, self._fair_share)
        self._deadlines: list[tuple[float, int, QueuedRequest]] = []
        self._number = count()
        self._gave_way: deque[tuple[QueuedRequest, str]] = deque()  # requests that were displaced, with the reason
        # The names of the classes whose answers overload control (`control`) caps, of which it refuses every other
        # request (halved), and of which it refuses all (shed).
        self.capped: frozenset[str] = frozenset()
        self.halved: frozenset[str] = frozenset()
        self.shed: frozenset[str] = frozenset()
        self.refused = {one.name: NONE_REFUSED for one in classes.all}  # refusals since the start
        self._odd: set[str] = set()  # halved classes whose last new request was refused, so that the next is admitted

    @property
    def waiting(self) -> bool:
        return any(queue.count for queue in self.queues)

    def close(self) -> bool:
        """Stop sharing the capacity for waiting requests with other fleets; return whether that was possible.

        It is not possible, and nothing changes, while requests still wait here.
        """
        if self.waiting or self._gave_way:
            return False
        self.space.fleets.remove(self)
        return True

    # --- a request asks

    def steps(self, qos: QosClass) -> tuple[str, ...]:
        """Return the steps that are tried in turn for a request of this class that finds no room."""
        return self.rules.when_full if qos.when_full is None else qos.when_full

    def observes(self, qos: QosClass) -> bool:
        """Return whether requests of this class are always sent, and those that would be refused only counted."""
        return self.steps(qos) == (OBSERVE,)

    def has_more_steps(self, qos: QosClass) -> bool:
        """Return whether steps after `wait` may still send a request of this class after its deadline has passed."""
        steps = self.steps(qos)
        return not {DEGRADE, SPILL}.isdisjoint(steps[steps.index(WAIT) + 1 :] if WAIT in steps else ())

    def ask(
        self,
        request: QueuedRequest,
        tokens: int,
        estimates: Sequence[Estimate],
        now: float,
        places: Sequence[Place] = (),
        offers: AdmissionOptions = NO_OPTIONS,
    ) -> AdmissionDecision:
        """Decide on a new request, or on one of the waiting requests that `heads` yields.

        The result says whether it is sent, waits in the queue (where it is put), or is refused.
        `tokens`: prompt tokens to be computed where it would go.
        `estimates`: the predicted latency of each way to serve it; `places`: the replicas of each way (empty: there is
            an estimate for each replica).
        `offers`: its alternatives, a capped answer and the overflow pool.
        """
        verdict, floor = self._judge(Question(request, estimates, now, places, offers), tokens), self._floor(request)
        if verdict.decision == REFUSED:
            return self._to_return(request, verdict, now)
        if request.qos.name in self.capped and verdict.decision == ADMITTED and offers.may_cap(floor):
            return verdict._replace(decision=DEGRADED, reason=CONTROL, cap=floor)
        return verdict

    def await_replica(self, request: QueuedRequest, tokens: int, why: str, now: float) -> bool:
        """Queue a request for which no replica is ready, or keep it queued; return whether it waits.

        It may wait as long as a request that waits for room. `tokens`: the number of its prompt tokens. `why`: a key
        that all requests which wait for the same replicas have in common.
        """
        if request.waits and request.deadline <= now:
            self.leave(request, now)
            return False
        few = len(self.queues) < _MOST_QUEUES  # `why` may contain a model name that the client made up
        queue = self._class_queue(request.qos, frozenset((ABSENT, why if few else "others")), _GUESS)
        if request.waits:
            if request.queue is not queue:
                self._move(request, queue, now)
            return True
        if WAIT not in self.steps(request.qos) or self._is_shed(request):
            return False
        request.tokens = tokens
        return self._enqueue(request, queue, 0.0, now)

    def _judge(self, asked: Question, tokens: int) -> AdmissionDecision:
        request, now = asked.request, asked.now
        if not request.waits:
            request.tokens, request.own = tokens, asked.best.own
        elif request.queue is not None and request.queue.is_absent:  # replicas have become ready
            self._move(
                request, self._class_queue(request.qos, asked.replicas, self._guess(asked)), now, tokens, asked.best.own
            )
        self._fair_share.ask(request.qos, now)
        steps = self.steps(request.qos)
        asked.room = self.fit.room(asked, asked.estimates)
        if self._is_shed(request):
            return self._shed(asked)
        if WAIT not in steps and steps[0] != DEGRADE:
            verdict = self._at_once(asked, asked.room)
            if steps == (OBSERVE,):
                return verdict._replace(decision=OBSERVED) if verdict.decision == REFUSED else verdict
        elif request.waits:
            verdict = self._turn(asked)
            steps = steps[steps.index(WAIT) + 1 :]
        else:
            verdict = self._newcomer(asked)
        return self._otherwise(asked, steps, verdict) if verdict.decision == REFUSED else verdict

    @staticmethod
    def _move(
        request: QueuedRequest, queue: ClassQueue, now: float, tokens: int | None = None, own: float = 0.0
    ) -> None:
        """Move a waiting request to another queue.

        `tokens`, `own`: the uncached tokens and the seconds of its prefill, if they are known better by now.
        """
        if request.queue is not None:
            request.queue.drop(request, now)
        if tokens is not None:
            request.tokens, request.own = tokens, own
        queue.add(request, now)

    def _otherwise(self, asked: Question, steps: Sequence[str], refused: AdmissionDecision) -> AdmissionDecision:
        """Try the steps for a request that would be refused, until one of them accepts it; return the decision.

        If no step accepts the request, it is refused. `steps`: wait, degrade, spill and reject, in the order that the
        request's class sets. `refused`: the decision without these steps.
        """
        for step in steps:
            found: AdmissionDecision | None = None
            if step == WAIT and refused.reason != "tpot":  # waiting does not lower the TPOT
                found = self._wait_in_queue(asked)
            elif step == DEGRADE:
                found = self._degraded(asked, refused.reason)
                # Its answer may be short enough without a cap.
                if found is None and WAIT not in self.steps(asked.request.qos):
                    found = self._at_once(asked, ())
            elif step == SPILL:
                found = self._in_overflow_pool(asked, refused.reason)
            if found is not None and found.decision != REFUSED:
                return found
            refused = found or refused
        return refused

    def _floor(self, request: QueuedRequest) -> int:
        return request.qos.max_tokens_floor or self.rules.max_tokens_floor

    def _degraded(self, asked: Question, reason: str) -> AdmissionDecision | None:
        """Decide to send a request with a capped answer where its latency limits are met that way.

        Replicas for which a higher class waits are left out. `reason`: why the request is not sent with a full answer.
        Returns None if the answer cannot be capped, or if no replica suits it even with a capped answer.
        """
        floor = self._floor(asked.request)
        estimates = asked.offers.capped(floor)
        if not estimates:
            return None

        def fits(estimate: Estimate, share: float, tight: float) -> bool:
            meets = asked.limited and estimate.full <= share and self.fit.too_much(estimate, asked) is None
            return meets or self.fit.has_room(estimate, share, tight)

        order, own = self._in_order(asked.now), self._fair_share.rank(asked.request.qos)
        higher = [one for one in order if self._fair_share.rank(one.qos) < own]
        fast = self.fit.fast(asked.request, estimates, self.fit.room(asked, estimates, fits))
        room = unclaimed(fast, asked.places, higher)
        return AdmissionDecision(DEGRADED, reason, room, cap=floor) if room else None

    def _in_overflow_pool(self, asked: Question, reason: str) -> AdmissionDecision | None:
        """Decide to send a request to the overflow pool, to replicas that meet its limits or at least have room.

        Returns None if the pool has neither. `reason`: why the request is not sent to its usual replicas.
        """
        estimates = asked.offers.in_overflow_pool()
        among = self.fit.meeting(estimates, asked) or [
            index
            for index, one in enumerate(estimates)
            if not one.there or (one.wait <= self.rules.engine_wait and one.full <= 1.0)
        ]
        return AdmissionDecision(SPILLED, reason, among) if among else None

    def _at_once(self, asked: Question, room: Sequence[int]) -> AdmissionDecision:
        meets = self.fit.meeting(asked.estimates, asked)
        if among := meets or self.fit.fast(asked.request, asked.estimates, room):
            return AdmissionDecision(ADMITTED, "met" if meets else "room", among)
        return self._refused(asked, self.fit.too_much(asked.best, asked) or "full", asked.ttft)

    def _newcomer(self, asked: Question) -> AdmissionDecision:
        """Decide to send a new request where there is room that no earlier request claims, or else to refuse it."""
        room = unclaimed(asked.room, asked.places, self._before(asked.request, asked.now))
        if not room:
            return self._refused(asked, "full", asked.ttft)
        if fast := self.fit.fast(asked.request, asked.estimates, room):
            return AdmissionDecision(ADMITTED, "room", fast)
        return self._refused(asked, "tpot", asked.ttft)

    def _wait_in_queue(self, asked: Question) -> AdmissionDecision:
        request, now, places = asked.request, asked.now, asked.replicas
        ahead = self._before(request, now)
        queue = self._class_queue(request.qos, places, self._guess(asked))
        queue.pace.passed(now, queue.count > 0)
        others = [one.work for one in ahead if one is not queue and not (places and one.targets.isdisjoint(places))]
        waits = sum(others) + queue.ahead(request.tenant)
        ttft = asked.ttft + waits / max(queue.pace.value, 1e-6)
        limit = request.slo.ttft
        if limit is not None and ttft * self.fit.ttft_margin.factor > limit and ttft > asked.waited + asked.best.own:
            return self._refused(asked, "ttft", ttft)
        if not self._enqueue(request, queue, asked.best.own, now):
            return self._refused(asked, "queue_full", ttft)
        return AdmissionDecision(QUEUED, "full")

    def _guess(self, asked: Question) -> float:
        return _GUESS * max(len(asked.replicas), len(asked.computing(True)))

    def _class_queue(self, qos: QosClass, targets: frozenset[str], guess: float) -> ClassQueue:
        """Return the queue for requests of this class that may go to these replicas; create it if there is none.

        `guess`: the pace that a new queue is assumed to have until its pace is measured. A pace is how many predicted
        seconds of prefill leave the queue per second (`Pace`).
        """
        found = next((one for one in self.queues if one.qos is qos and one.targets == targets), None)
        if found is None:
            if len(self.queues) >= _MOST_QUEUES:
                self.queues = [one for one in self.queues if one.count]
            self.queues.append(found := ClassQueue(qos, guess, targets))
        return found

    def _turn(self, asked: Question) -> AdmissionDecision:
        """Decide on the first request of a queue: it is sent, waits on, or is refused.

        It is refused if it would miss its TTFT limit by now, so that nothing is computed in vain. It is also refused if
        no replica with room meets the request's own TPOT limit: if it waited for an idle replica, it would block all
        requests behind it.
        """
        request, now, queue = asked.request, asked.now, asked.request.queue
        assert queue is not None
        late = request.deadline <= now
        if late and self.has_more_steps(request.qos):
            return self._late(request, now)
        queue.targets = asked.replicas  # the set of ready replicas may have changed
        order = self._in_order(now)
        room = unclaimed(asked.room, asked.places, order[: order.index(queue)])
        if not room and not late:
            return AdmissionDecision(QUEUED, "full")
        if (limit := request.slo.ttft) is not None:
            room = [index for index in room if self.fit.within(asked.estimates[index], asked.waited, limit)]
        if not room:
            return self._late(request, now)
        if not (fast := self.fit.fast(request, asked.estimates, room)):
            self.leave(request, now)
            return self._refused(asked, "tpot", asked.ttft)
        queue.take(request, now)
        self._left(request)
        return AdmissionDecision(ADMITTED, "turn", fast)

    def _late(self, request: QueuedRequest, now: float) -> AdmissionDecision:
        """Remove a waiting request whose deadline has passed or cannot be kept, and return its refusal."""
        self.leave(request, now)
        return AdmissionDecision(REFUSED, "deadline", (), _drain(request.queue))

    def _enqueue(self, request: QueuedRequest, queue: ClassQueue, own: float, now: float) -> bool:
        """Add a request to a queue and set its deadline; return whether there was space for it.

        `own`: the predicted seconds of its prefill.
        """
        space = self.space
        if not self._make_space(request, now):
            return False
        request.deadline = max(now, request.since + request.held + self._longest_wait(request, own))
        queue.add(request, now)
        space.requests += 1
        space.bytes += request.size
        heapq.heappush(self._deadlines, (request.deadline, next(self._number), request))
        return True

    def _longest_wait(self, request: QueuedRequest, own: float) -> float:
        """Return how many seconds a request may wait in the queue; `own`: the predicted seconds of its prefill.

        A request's own TTFT limit can shorten the wait, but not extend it beyond the time that the settings allow its
        class.
        """
        limit, of_class = request.slo.ttft, request.qos.slo.ttft
        if limit is None:
            return self.rules.max_wait
        return min(limit - own, max(self.rules.max_wait, of_class or 0.0))

    def _refused(self, asked: Question, reason: str, ttft: float) -> AdmissionDecision:
        slo, best = asked.request.slo, asked.best
        limit = slo.tpot if reason == "tpot" else slo.ttft
        if reason == "tpot" and limit is not None:  # retry once enough streams have ended for the TPOT limit
            return AdmissionDecision(REFUSED, reason, (), best.left * max(0.0, 1.0 - limit / best.tpot))
        return AdmissionDecision(REFUSED, reason, (), ttft - (limit if limit is not None else 0.0))

    def sent(
        self, request: QueuedRequest, estimate: Estimate, costs: Costs, tokens: float, now: float, replica: str = ""
    ) -> None:
        """Record that a request is sent, and add its predicted work to its class's use of the replicas.

        `estimate`: its predicted latency; `costs`: the predicted costs of the replica that writes its answer; `tokens`:
        the tokens of KV cache that it will take there; `replica`: the name of the replica that computes its prompt.
        """
        request.ttft, request.costs = now - request.since + estimate.ttft, costs
        request.learned = costs.group.ttft.count >= _LEARNED
        request.streams, request.context = estimate.streams, estimate.context
        self._fair_share.take(request.qos, estimate.own, tokens * estimate.tpot, now)
        self._fair_share.compute(request.qos, replica, now + estimate.ttft, now)

    # --- whose turn it is

    def head(self, now: float) -> QueuedRequest | None:
        """Return the waiting request to decide on next (`ask`), or None."""
        return next(self.heads(now), None)

    def heads(self, now: float) -> Iterator[QueuedRequest]:
        """Yield the waiting requests to decide on, in order; call `ask` for each before taking the next.

        The first one is the head of the first queue. If a request still waits after `ask`, the replicas of its queue
        count as full. The next request is then the head of the first queue that is not limited to replicas of one such
        full set.
        """
        full: list[frozenset[str]] = []
        while True:
            order = self._in_order(now)
            queue = next((one for one in order if not any(one.targets <= targets for targets in full)), None)
            head = queue.head() if queue is not None else None
            if queue is None or head is None:
                return
            yield head
            if head.waits and head.queue is not None:  # the request may have moved to another queue
                full.append(head.queue.targets)

    def _in_order(self, now: float) -> list[ClassQueue]:
        """Return the non-empty queues in the order in which they are served.

        The rank of their classes decides, and within a class the age of a queue's first request.
        """
        self._fair_share.decay(now)
        rank = self._fair_share.rank
        return sorted([one for one in self.queues if one.count], key=lambda one: (*rank(one.qos), _first_since(one)))

    def _before(self, request: QueuedRequest, now: float) -> list[ClassQueue]:
        """Return the queues that precede a new request: those of its own class and of the classes ranked before it."""
        self._fair_share.decay(now)
        rank = self._fair_share.rank
        own = rank(request.qos)
        return [one for one in self.queues if one.count and rank(one.qos) <= own]

    def held_up(self, seconds: float) -> None:
        """Extend the deadlines of all waiting requests by the seconds during which this process was stalled."""
        waiting = [
            (deadline + seconds, number, request) for deadline, number, request in self._deadlines if request.waits
        ]
        for deadline, _, request in waiting:
            request.deadline, request.held = deadline, request.held + seconds
        heapq.heapify(waiting)
        self._deadlines = waiting
        for queue in self.queues:
            queue.pace.held_up(seconds)

    # --- who leaves unsent

    def leave(self, request: QueuedRequest, now: float) -> None:
        """Remove a waiting request, as its client has left or it cannot be served any more; otherwise do nothing."""
        if request.waits:
            assert request.queue is not None
            request.queue.drop(request, now)
            self._left(request)

    def _left(self, request: QueuedRequest) -> None:
        """Release the queue capacity of a request that no longer waits.

        Also removes the entries of such requests from the list of deadlines once they may outnumber the waiting
        requests.
        """
        self.space.requests -= 1
        self.space.bytes -= request.size
        if len(self._deadlines) > 64 + 2 * sum([queue.count for queue in self.queues]):
            self._deadlines = [one for one in self._deadlines if one[2].waits]
            heapq.heapify(self._deadlines)

    def turned_out(self, now: float) -> Iterator[tuple[QueuedRequest, AdmissionDecision]]:
        """Yield the requests displaced since the last call and those past their deadline, each with the decision on it.

        A displaced request is refused. A request past its deadline leaves its queue and is refused too, unless its
        class has further steps after `wait` or no replica is ready for it. In these cases it stays in its queue with
        the decision QUEUED, and the caller must decide on it again (`ask`).
        """
        while self._gave_way:
            request, reason = self._gave_way.popleft()
            self.space.untold -= 1
            seconds = self._until_judged if reason == CONTROL else _drain(request.queue)
            yield request, self._to_return(request, AdmissionDecision(REFUSED, reason, (), seconds), now)
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].waits):
            request = heapq.heappop(self._deadlines)[2]
            absent = request.queue is not None and request.queue.is_absent
            if request.waits and (absent or self.has_more_steps(request.qos)):
                yield request, AdmissionDecision(QUEUED, "deadline")
            elif request.waits:
                yield request, self._to_return(request, self._late(request, now), now)

    def _to_return(self, request: QueuedRequest, refused: AdmissionDecision, now: float) -> AdmissionDecision:
        """Count a refusal, and return it with the time after which the client should retry.

        This time (`retry_after`, in seconds) is booked after those of the class's earlier refusals, so that refused
        requests come back one after another.
        """
        qos, share = request.qos, self._fair_share
        if _is_for_its_class(request, refused.reason):
            owed, beyond, flood = self.refused[qos.name]
            if share.is_owed(qos, now):
                owed += 1
            elif share.floods(qos):
                flood += 1
            else:
                beyond += 1
            self.refused[qos.name] = Refused(owed, beyond, flood)
        pace = sum([queue.pace.value for queue in self.queues if queue.qos is qos])
        seconds = share.book_retry(qos, refused.retry_after, request.own, pace, now)
        return refused._replace(retry_after=seconds)

    def _make_space(self, request: QueuedRequest, now: float) -> bool:
        """Displace waiting requests to make space in the queue for a new one; return whether there is space for it.

        Nobody is displaced unless that makes enough space. Requests of lower classes are displaced first, from the
        lowest class up, whichever model they wait for. If that is not enough, requests of the same class follow, from a
        tenant that has more in the queue than the new request's tenant.
        """
        rules, space = self.rules, self.space
        count, size = space.requests + 1 - rules.max_requests, space.bytes + request.size - rules.max_bytes
        if count <= 0 and size <= 0:
            return True
        if request.size > rules.max_bytes:
            return False
        lower = self._lower(request.qos)
        count -= sum([queue.count for _, queue in lower])
        size -= sum([queue.size for _, queue in lower])
        peers = self._of_peers(request, count, size) if count > 0 or size > 0 else []
        if peers is None:
            return False
        for fleet, queue in lower:
            while (many := space.requests >= rules.max_requests) or space.bytes + request.size > rules.max_bytes:
                if (last := queue.last("count" if many else "size")) is None:
                    break
                fleet._give_way(last, now)
        for one in peers:
            self._give_way(one, now)
        return True

    def _lower(self, qos: QosClass) -> list[tuple[Admission, ClassQueue]]:
        """Return the queues from which requests of lower classes may be displaced, the lowest class first.

        `qos`: the class of the request that needs the space. Each queue comes with the admission of its fleet, which is
        the replicas of one model. Queues of this fleet are compared by the rank of their classes. Those of other fleets
        are compared by priority alone, since a class's use of one fleet says nothing about another.
        """
        rank = self._fair_share.rank
        own = rank(qos)
        found = [
            (fleet, queue)
            for fleet in self.space.fleets
            for queue in fleet.queues
            if queue.count and (rank(queue.qos) > own if fleet is self else queue.qos.priority < qos.priority)
        ]
        return sorted(found, key=lambda one: one[0]._fair_share.rank(one[1].qos), reverse=True)

    def _of_peers(self, request: QueuedRequest, count: int, size: int) -> list[QueuedRequest] | None:
        """Return the requests of the same class that a new request would displace.

        They belong to the tenant that has most in a queue. Returns None if displacing them would be unfair to that
        tenant, or would not make enough space. `count`, `size`: how many requests and bytes of queue space are lacking.
        """
        resource: Resource = "count" if count > 0 else "size"
        queues = [one for one in self.queues if one.qos is request.qos and one.count]
        most = max(queues, key=lambda one: one.most(resource), default=None)
        share = sum([one.has(request.tenant, resource) for one in queues]) + (1 if count > 0 else request.size)
        return most.gives(count, size, share) if most is not None else None

    def _give_way(self, request: QueuedRequest, now: float, reason: str = "shed") -> None:
        self.leave(request, now)
        self._gave_way.append((request, reason))
        self.space.untold += 1

    # --- overload control

    def obey(self, control: Control, now: float) -> None:
        """Apply the steps that overload control takes now, and displace waiting requests of classes that it sheds."""
        taken = [control.taken_from(step) for step in (TIGHTEN, CAP, HALVE, SHED)]
        self.fit.tight, self.capped, self.halved, self.shed = taken
        for queue in self.queues:
            while queue.qos.name in self.shed and (last := queue.last("count")) is not None:
                self._give_way(last, now, CONTROL)

    def _is_shed(self, request: QueuedRequest) -> bool:
        """Return whether overload control refuses a request.

        Of a shed class it refuses all requests, of a halved class every other new one.
        """
        name = request.qos.name
        if name in self.shed or name not in self.halved or request.waits:
            return name in self.shed
        self._odd ^= {name}
        return name in self._odd

    def _shed(self, asked: Question) -> AdmissionDecision:
        """Refuse a request for overload control, unless an idle replica or the overflow pool can take it.

        It is sent to an idle replica for which no request of its own or a higher class waits: its answer helps to see
        whether the overload is over. It is sent to the overflow pool if `spill` is among its class's steps and no
        replica of the pool is one of its candidates anyway.
        """
        idle = [index for index in asked.room if not asked.estimates[index].there]
        if free := unclaimed(idle, asked.places, self._before(asked.request, asked.now)):
            return AdmissionDecision(ADMITTED, "room", free)
        may_spill = SPILL in self.steps(asked.request.qos) and asked.offers.has_separate_overflow_pool()
        if may_spill and (found := self._in_overflow_pool(asked, CONTROL)) is not None:
            return found
        return AdmissionDecision(REFUSED, CONTROL, (), self._until_judged)

    @property
    def _until_judged(self) -> float:
        """The seconds after which requests refused by overload control should retry: one of its windows.

        A sooner retry would be in vain, because overload control changes its steps only at the end of a window.
        """
        return self.rules.control_window or 0.0

    # --- outcomes

    def first_token(self, request: QueuedRequest, seconds: float) -> None:
        """Learn the TTFT margin, a factor on predicted TTFTs, from one measured first token.

        `seconds`: the time from when the request's client began to wait. The margin is learned at first tokens because
        in a burst the ends of answers come too late. It is not learned from a prediction by costs that had not learned
        anything yet: the costs correct such an error themselves, but the margin would keep it for hundreds of answers.
        """
        if request.slo.ttft is not None and request.learned:
            self.fit.ttft_margin.learn(request.ttft, seconds, request.slo.ttft)

    def ended(self, request: QueuedRequest, ttft: float, tpot: float | None, counted: bool = True) -> bool | None:
        """Learn the TPOT margin, a factor on predicted TPOTs, from a complete answer.

        Returns whether the request met its latency limits, None if it had none.
        `ttft`, `tpot`: measured seconds; `tpot` is None for answers too short to measure.
        `counted`: whether the engine reported the number of tokens. If it did not, the gateway counted events, each of
        which may carry several tokens, and no margin is learned.
        """
        limits = request.slo
        if counted and tpot is not None and limits.tpot is not None and request.costs is not None:
            # Predict with the costs as they are now: the margin must not repeat what they have learned since.
            self.fit.tpot_margin.learn(request.costs.stream_step(request.streams, request.context), tpot, limits.tpot)
        if limits.ttft is None and limits.tpot is None:
            return None
        return ttft <= (limits.ttft or inf) and (tpot or 0.0) <= (limits.tpot or inf)


def _is_for_its_class(request: QueuedRequest, reason: str) -> bool:
    """Return whether a request was refused because of its class's latency limit, not because of one of its own."""
    own, of_class = request.slo, request.qos.slo
    if reason == "tpot":
        return of_class.tpot is not None and own.tpot == of_class.tpot
    return reason in ("ttft", "deadline") and of_class.ttft is not None and own.ttft == of_class.ttft


def _first_since(queue: ClassQueue) -> float:
    head = queue.head()
    return head.since if head is not None else inf


def _drain(queue: ClassQueue | None) -> float:
    """Return the seconds until all requests that wait in the queue now are sent, at the queue's measured pace."""
    return queue.work / max(queue.pace.value, 1e-6) if queue is not None else 0.0
