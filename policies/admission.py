"""Admission: whether a request is sent now, waits in front of the fleet, or is refused, and when it should retry.

A request can be served in one or more *ways*: by one replica, or by a pair that splits prefill and decode. Each way has
a *quote*, its predicted TTFT and TPOT (`quotes`). A way has *room* for a request if its replica is idle, or if the
replica's queue is no longer than `engine_wait` seconds and its streams keep the strictest TPOT limit of all classes. A
way *meets* a request's limits if its predicted TTFT, plus the time that the request has already waited, and its
predicted TPOT are within them. `fit` computes both.

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

Order: classes that have had less than their reserved fraction of the fleet precede those that have had it; among
equals, the higher priority goes first (`reserves`). Within a class, `lines` decides. When the queue is full, the lowest
class gives way.

Not every request can go to every replica. Requests of one class for the same replicas share one line, and a waiting
request claims only its own replicas against requests behind it. A request for which no replica is ready also waits, in
a line that claims nothing. No I/O and no clock: the caller passes `now` in seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from math import inf

from .classes import Classes, QosClass
from .control import CAP, HALVE, NONE_REFUSED, SHED, TIGHTEN, Control, Refused
from .costs import Costs
from .fit import Fit, Question, unclaimed
from .lines import ABSENT, Line, Resource, Ticket
from .quotes import Place, Quote
from .reserves import Reserves
from .verdicts import (
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
    Options,
    Rules,
    Verdict,
)

_GUESS = 0.5  # prefill seconds that one replica admits per second, assumed until a line's pace is measured
_MOST_LINES = 64  # lines that are kept; beyond that, empty ones are dropped with their measured paces
_LEARNED = 3  # observed first tokens from which a group's costs count as learned


class Space:
    """The bounded queue capacity shared by all lines of all fleets in this process, one fleet for each model.

    `requests`, `bytes`: what waits now; `untold`: requests that gave way to others and that `Admission.turned_out` has
        not reported yet.
    """

    __slots__ = ("requests", "bytes", "untold", "fleets")

    def __init__(self) -> None:
        self.fleets: list[Admission] = []
        self.requests = self.bytes = self.untold = 0


class Admission:
    """The admission of one fleet, the replicas of one model.

    `space`: the queue capacity, shared with other fleets of the same process.
    """

    def __init__(self, classes: Classes, rules: Rules, space: Space | None = None) -> None:
        self.classes, self.rules, self.space = classes, rules, space or Space()
        self.space.fleets.append(self)
        self.lines: list[Line] = []
        self._reserves = Reserves(classes)
        self.fit = Fit(classes, rules, self._reserves)
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._number = count()
        self._gave_way: deque[tuple[Ticket, str]] = deque()  # requests removed for others, with the reason
        # Names of the classes whose answers overload control (`control`) caps, and which it halves or sheds
        self.capped: frozenset[str] = frozenset()
        self.halved: frozenset[str] = frozenset()
        self.shed: frozenset[str] = frozenset()
        self.refused = {one.name: NONE_REFUSED for one in classes.all}  # refusals since the start, for `control`
        self._odd: set[str] = set()  # halved classes whose last newcomer was refused: the next one is admitted

    @property
    def waiting(self) -> bool:
        return any(line.count for line in self.lines)

    def close(self) -> bool:
        """Leave the shared queue space; return False, and stay, while requests still wait here."""
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
        """Return whether steps after `wait` may still send a request of this class once its deadline has passed."""
        steps = self.steps(qos)
        return not {DEGRADE, SPILL}.isdisjoint(steps[steps.index(WAIT) + 1 :] if WAIT in steps else ())

    def ask(
        self,
        ticket: Ticket,
        tokens: int,
        quotes: Sequence[Quote],
        now: float,
        places: Sequence[Place] = (),
        offers: Options = NO_OPTIONS,
    ) -> Verdict:
        """Judge a newcomer, or one of the waiting requests that `heads` yields.

        `tokens`: prompt tokens to be computed where it would go.
        `quotes`: one per way to serve it; `places`: the replicas of each way (empty: the quotes cover all replicas
            there are).
        `offers`: its alternatives, a capped answer and the overflow pool.
        """
        verdict, floor = self._judge(Question(ticket, quotes, now, places, offers), tokens), self._floor(ticket)
        if verdict.decision == REFUSED:
            return self._to_return(ticket, verdict, now)
        if ticket.qos.name in self.capped and verdict.decision == ADMITTED and offers.may_cap(floor):
            return verdict._replace(decision=DEGRADED, reason=CONTROL, cap=floor)
        return verdict

    def await_replica(self, ticket: Ticket, tokens: int, why: str, now: float) -> bool:
        """Queue a request for which no replica is ready, or keep it queued; return whether it waits.

        It waits as long as it may wait for room. `tokens`: of its prompt; `why`: a key shared by all requests that wait
        for the same replicas.
        """
        if ticket.waits and ticket.deadline <= now:
            self.leave(ticket, now)
            return False
        few = len(self.lines) < _MOST_LINES  # `why` may contain a model name that the client made up
        line = self._line(ticket.qos, frozenset((ABSENT, why if few else "others")), _GUESS)
        if ticket.waits:
            if ticket.line is not line:
                self._move(ticket, line, now)
            return True
        if WAIT not in self.steps(ticket.qos) or self._is_shed(ticket):
            return False
        ticket.tokens = tokens
        return self._queue(ticket, line, 0.0, now)

    def _judge(self, asked: Question, tokens: int) -> Verdict:
        ticket, now = asked.ticket, asked.now
        if not ticket.waits:
            ticket.tokens, ticket.own = tokens, asked.best.own
        elif ticket.line is not None and ticket.line.is_absent:  # replicas have become ready
            self._move(ticket, self._line(ticket.qos, asked.replicas, self._guess(asked)), now, tokens, asked.best.own)
        self._reserves.ask(ticket.qos, now)
        steps = self.steps(ticket.qos)
        asked.room = self.fit.room(asked, asked.quotes)
        if self._is_shed(ticket):
            return self._shed(asked)
        if WAIT not in steps and steps[0] != DEGRADE:
            verdict = self._at_once(asked, asked.room)
            if steps == (OBSERVE,):
                return verdict._replace(decision=OBSERVED) if verdict.decision == REFUSED else verdict
        elif ticket.waits:
            verdict = self._turn(asked)
            steps = steps[steps.index(WAIT) + 1 :]
        else:
            verdict = self._newcomer(asked)
        return self._otherwise(asked, steps, verdict) if verdict.decision == REFUSED else verdict

    @staticmethod
    def _move(ticket: Ticket, line: Line, now: float, tokens: int | None = None, own: float = 0.0) -> None:
        """Let a request wait in another line; `tokens`, `own`: those of its prompt, if they are known better by now."""
        if ticket.line is not None:
            ticket.line.drop(ticket, now)
        if tokens is not None:
            ticket.tokens, ticket.own = tokens, own
        line.add(ticket, now)

    def _otherwise(self, asked: Question, steps: Sequence[str], refused: Verdict) -> Verdict:
        """Try `steps` for a request that would be refused until one accepts it; return the last verdict.

        `refused`: the verdict so far, without these steps.
        """
        for step in steps:
            found: Verdict | None = None
            if step == WAIT and refused.reason != "tpot":  # waiting does not lower the TPOT
                found = self._line_up(asked)
            elif step == DEGRADE:
                found = self._degraded(asked, refused.reason)
                if found is None and WAIT not in self.steps(asked.ticket.qos):  # its answer may be short enough already
                    found = self._at_once(asked, ())
            elif step == SPILL:
                found = self._spilled(asked, refused.reason)
            if found is not None and found.decision != REFUSED:
                return found
            refused = found or refused
        return refused

    def _floor(self, ticket: Ticket) -> int:
        return ticket.qos.max_tokens_floor or self.rules.max_tokens_floor

    def _degraded(self, asked: Question, reason: str) -> Verdict | None:
        """Send a request with a capped answer where its limits are met that way, unless a higher class waits there.

        Return None if its answer cannot be capped, or if no way suits it even with a capped answer.
        """
        floor = self._floor(asked.ticket)
        quotes = asked.offers.capped(floor)
        if not quotes:
            return None

        def fits(quote: Quote, share: float, tight: float) -> bool:
            meets = asked.limited and quote.full <= share and self.fit.too_much(quote, asked) is None
            return meets or self.fit.has_room(quote, share, tight)

        order, own = self._in_order(asked.now), self._reserves.rank(asked.ticket.qos)
        higher = [one for one in order if self._reserves.rank(one.qos) < own]
        fast = self.fit.fast(asked.ticket, quotes, self.fit.room(asked, quotes, fits))
        room = unclaimed(fast, asked.places, higher)
        return Verdict(DEGRADED, reason, room, cap=floor) if room else None

    def _spilled(self, asked: Question, reason: str) -> Verdict | None:
        """Send a request to the overflow pool, even if it is late there, as long as it does not queue in an engine."""
        quotes = asked.offers.spilled()
        among = self.fit.meeting(quotes, asked) or [
            index
            for index, one in enumerate(quotes)
            if not one.there or (one.wait <= self.rules.engine_wait and one.full <= 1.0)
        ]
        return Verdict(SPILLED, reason, among) if among else None

    def _at_once(self, asked: Question, room: Sequence[int]) -> Verdict:
        meets = self.fit.meeting(asked.quotes, asked)
        if among := meets or self.fit.fast(asked.ticket, asked.quotes, room):
            return Verdict(ADMITTED, "met" if meets else "room", among)
        return self._refused(asked, self.fit.too_much(asked.best, asked) or "full", asked.ttft)

    def _newcomer(self, asked: Question) -> Verdict:
        """Send a request where there is room that no earlier request claims; otherwise refuse it."""
        room = unclaimed(asked.room, asked.places, self._before(asked.ticket, asked.now))
        if not room:
            return self._refused(asked, "full", asked.ttft)
        if fast := self.fit.fast(asked.ticket, asked.quotes, room):
            return Verdict(ADMITTED, "room", fast)
        return self._refused(asked, "tpot", asked.ttft)

    def _line_up(self, asked: Question) -> Verdict:
        ticket, now, places = asked.ticket, asked.now, asked.replicas
        ahead = self._before(ticket, now)
        line = self._line(ticket.qos, places, self._guess(asked))
        line.pace.passed(now, line.count > 0)
        others = [one.work for one in ahead if one is not line and not (places and one.targets.isdisjoint(places))]
        waits = sum(others) + line.ahead(ticket.tenant)
        ttft = asked.ttft + waits / max(line.pace.value, 1e-6)
        limit = ticket.slo.ttft
        if limit is not None and ttft * self.fit.ttft_margin.factor > limit and ttft > asked.waited + asked.best.own:
            return self._refused(asked, "ttft", ttft)
        if not self._queue(ticket, line, asked.best.own, now):
            return self._refused(asked, "queue_full", ttft)
        return Verdict(QUEUED, "full")

    def _guess(self, asked: Question) -> float:
        return _GUESS * max(len(asked.replicas), len(asked.computing(True)))

    def _line(self, qos: QosClass, targets: frozenset[str], guess: float) -> Line:
        """Return the line for requests of this class and these replicas, creating it if there is none.

        `guess`: prefill seconds that leave a new line per second, until that is measured.
        """
        found = next((one for one in self.lines if one.qos is qos and one.targets == targets), None)
        if found is None:
            if len(self.lines) >= _MOST_LINES:
                self.lines = [one for one in self.lines if one.count]
            self.lines.append(found := Line(qos, guess, targets))
        return found

    def _turn(self, asked: Question) -> Verdict:
        """Judge the first request of a line.

        It is refused if it would be late by now, so that nothing is computed in vain. It is also refused if no replica
        with room keeps the TPOT limit that the request brings: if it waited for an idle replica, it would block
        everything behind it.
        """
        ticket, now, line = asked.ticket, asked.now, asked.ticket.line
        assert line is not None
        late = ticket.deadline <= now
        if late and self.has_more_steps(ticket.qos):
            return self._late(ticket, now)
        line.targets = asked.replicas  # the set of ready replicas may have changed
        order = self._in_order(now)
        room = unclaimed(asked.room, asked.places, order[: order.index(line)])
        if not room and not late:
            return Verdict(QUEUED, "full")
        if (limit := ticket.slo.ttft) is not None:
            room = [index for index in room if self.fit.within(asked.quotes[index], asked.waited, limit)]
        if not room:
            return self._late(ticket, now)
        if not (fast := self.fit.fast(ticket, asked.quotes, room)):
            self.leave(ticket, now)
            return self._refused(asked, "tpot", asked.ttft)
        line.take(ticket, now)
        self._left(ticket)
        return Verdict(ADMITTED, "turn", fast)

    def _late(self, ticket: Ticket, now: float) -> Verdict:
        """Remove a request whose deadline has passed or cannot be kept, and return its refusal."""
        self.leave(ticket, now)
        return Verdict(REFUSED, "deadline", (), _drain(ticket.line))

    def _queue(self, ticket: Ticket, line: Line, own: float, now: float) -> bool:
        """Add a request to a line and return True; return False if the queue is full. `own`: seconds of its prefill."""
        space = self.space
        if not self._make_space(ticket, now):
            return False
        ticket.deadline = max(now, ticket.since + ticket.held + self._longest_wait(ticket, own))
        line.add(ticket, now)
        space.requests += 1
        space.bytes += ticket.size
        heapq.heappush(self._deadlines, (ticket.deadline, next(self._number), ticket))
        return True

    def _longest_wait(self, ticket: Ticket, own: float) -> float:
        """Return how many seconds a request may wait. `own`: seconds of its prefill.

        A TTFT limit that the request itself brings can shorten the wait, but not extend it beyond what the settings
        allow its class.
        """
        limit, of_class = ticket.slo.ttft, ticket.qos.slo.ttft
        if limit is None:
            return self.rules.max_wait
        return min(limit - own, max(self.rules.max_wait, of_class or 0.0))

    def _refused(self, asked: Question, reason: str, ttft: float) -> Verdict:
        slo, best = asked.ticket.slo, asked.best
        limit = slo.tpot if reason == "tpot" else slo.ttft
        if reason == "tpot" and limit is not None:  # as streams end, the remaining ones decode faster
            return Verdict(REFUSED, reason, (), best.left * max(0.0, 1.0 - limit / best.tpot))
        return Verdict(REFUSED, reason, (), ttft - (limit if limit is not None else 0.0))

    def sent(self, ticket: Ticket, quote: Quote, costs: Costs, tokens: float, now: float, replica: str = "") -> None:
        """Record that a request is sent, with its predicted latency `quote`.

        `costs`: those of the replica that writes its answer; `tokens`: of KV cache that it will hold there; `replica`:
        the name of the one that computes its prompt.
        """
        ticket.ttft, ticket.costs = now - ticket.since + quote.ttft, costs
        ticket.learned = costs.group.ttft.count >= _LEARNED
        ticket.streams, ticket.context = quote.streams, quote.context
        self._reserves.take(ticket.qos, quote.own, tokens * quote.tpot, now)
        self._reserves.compute(ticket.qos, replica, now + quote.ttft, now)

    # --- whose turn it is

    def head(self, now: float) -> Ticket | None:
        """Return the waiting request to judge next, or None."""
        return next(self.heads(now), None)

    def heads(self, now: float) -> Iterator[Ticket]:
        """Yield the waiting requests to judge, in order.

        First comes the head of the first line; if it still waits after being judged, the head of the next line that has
        replicas other than the lines before it; and so on.
        """
        full: list[frozenset[str]] = []
        while True:
            order = self._in_order(now)
            line = next((one for one in order if not any(one.targets <= targets for targets in full)), None)
            head = line.head() if line is not None else None
            if line is None or head is None:
                return
            yield head
            if head.waits and head.line is not None:  # the request may have moved to another line
                full.append(head.line.targets)

    def _in_order(self, now: float) -> list[Line]:
        """Return the non-empty lines in the order of service; within a class, the line with the oldest head first."""
        self._reserves.decay(now)
        rank = self._reserves.rank
        return sorted([one for one in self.lines if one.count], key=lambda one: (*rank(one.qos), _first_since(one)))

    def _before(self, ticket: Ticket, now: float) -> list[Line]:
        """Return the lines that precede a newcomer: those of its own class and of the classes ranked before it."""
        self._reserves.decay(now)
        rank = self._reserves.rank
        own = rank(ticket.qos)
        return [one for one in self.lines if one.count and rank(one.qos) <= own]

    def held_up(self, seconds: float) -> None:
        """Extend all deadlines by the seconds during which the process stalled and judged nobody."""
        waiting = [(deadline + seconds, number, ticket) for deadline, number, ticket in self._deadlines if ticket.waits]
        for deadline, _, ticket in waiting:
            ticket.deadline, ticket.held = deadline, ticket.held + seconds
        heapq.heapify(waiting)
        self._deadlines = waiting
        for line in self.lines:
            line.pace.held_up(seconds)

    # --- who leaves unsent

    def leave(self, ticket: Ticket, now: float) -> None:
        """Remove a request whose client has left or that cannot be served any more; a no-op if it does not wait."""
        if ticket.waits:
            assert ticket.line is not None
            ticket.line.drop(ticket, now)
            self._left(ticket)

    def _left(self, ticket: Ticket) -> None:
        """Release a request's queue space, and drop stale deadlines before they outnumber the waiting requests."""
        self.space.requests -= 1
        self.space.bytes -= ticket.size
        if len(self._deadlines) > 64 + 2 * sum([line.count for line in self.lines]):
            self._deadlines = [one for one in self._deadlines if one[2].waits]
            heapq.heapify(self._deadlines)

    def turned_out(self, now: float) -> Iterator[tuple[Ticket, Verdict]]:
        """Yield the requests that gave way since the last call, and those past their deadline, with their verdicts.

        A request past its deadline is yielded as QUEUED, to be judged again, if its class has steps after `wait` or if
        no replica is ready for it. Otherwise it is removed and refused.
        """
        while self._gave_way:
            ticket, reason = self._gave_way.popleft()
            self.space.untold -= 1
            seconds = self._until_judged if reason == CONTROL else _drain(ticket.line)
            yield ticket, self._to_return(ticket, Verdict(REFUSED, reason, (), seconds), now)
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].waits):
            ticket = heapq.heappop(self._deadlines)[2]
            absent = ticket.line is not None and ticket.line.is_absent
            if ticket.waits and (absent or self.has_more_steps(ticket.qos)):
                yield ticket, Verdict(QUEUED, "deadline")
            elif ticket.waits:
                yield ticket, self._to_return(ticket, self._late(ticket, now), now)

    def _to_return(self, ticket: Ticket, refused: Verdict, now: float) -> Verdict:
        """Count the refusal, and set `retry_after` so that the client retries after those refused before it."""
        if _is_for_its_class(ticket, refused.reason):
            self.refused[ticket.qos.name] = self._counted(ticket.qos, now)
        pace = sum([line.pace.value for line in self.lines if line.qos is ticket.qos])
        seconds = self._reserves.book_retry(ticket.qos, refused.retry_after, ticket.own, pace, now)
        return refused._replace(retry_after=seconds)

    def _counted(self, qos: QosClass, now: float) -> Refused:
        """Return the refusal counts of a class, incremented by one."""
        owed, beyond, flood = self.refused[qos.name]
        if self._reserves.is_owed(qos, now):
            return Refused(owed + 1, beyond, flood)
        floods = self._reserves.floods(qos)
        return Refused(owed, beyond + (not floods), flood + floods)

    def _make_space(self, ticket: Ticket, now: float) -> bool:
        """Make queue space for a request by displacing others, only if that suffices; return whether there is space.

        Requests of lower classes are displaced first, from the lowest class up and in all fleets. Then come requests of
        the same class, of the tenant that has more in the queue than this request's tenant.
        """
        rules, space = self.rules, self.space
        count, size = space.requests + 1 - rules.max_requests, space.bytes + ticket.size - rules.max_bytes
        if count <= 0 and size <= 0:
            return True
        if ticket.size > rules.max_bytes:
            return False
        lower = self._lower(ticket.qos)
        count -= sum([line.count for _, line in lower])
        size -= sum([line.size for _, line in lower])
        peers = self._of_peers(ticket, count, size) if count > 0 or size > 0 else []
        if peers is None:
            return False
        for fleet, line in lower:
            while (many := space.requests >= rules.max_requests) or space.bytes + ticket.size > rules.max_bytes:
                if (last := line.last("count" if many else "size")) is None:
                    break
                fleet._give_way(last, now)
        for one in peers:
            self._give_way(one, now)
        return True

    def _lower(self, qos: QosClass) -> list[tuple[Admission, Line]]:
        """Return the lines that give way to a class, the lowest first, each with its fleet.

        Other fleets' lines are compared by priority alone: what a class used of one fleet says nothing about another.
        """
        rank = self._reserves.rank
        own = rank(qos)
        found = [
            (fleet, line)
            for fleet in self.space.fleets
            for line in fleet.lines
            if line.count and (rank(line.qos) > own if fleet is self else line.qos.priority < qos.priority)
        ]
        return sorted(found, key=lambda one: one[0]._reserves.rank(one[1].qos), reverse=True)

    def _of_peers(self, ticket: Ticket, count: int, size: int) -> list[Ticket] | None:
        """Return which requests of the same class's largest tenant would give way; None if that is not fair or enough.

        `count`, `size`: requests and bytes of queue space that are lacking.
        """
        resource: Resource = "count" if count > 0 else "size"
        lines = [one for one in self.lines if one.qos is ticket.qos and one.count]
        most = max(lines, key=lambda one: one.most(resource), default=None)
        share = sum([one.has(ticket.tenant, resource) for one in lines]) + (1 if count > 0 else ticket.size)
        return most.gives(count, size, share) if most is not None else None

    def _give_way(self, ticket: Ticket, now: float, reason: str = "shed") -> None:
        self.leave(ticket, now)
        self._gave_way.append((ticket, reason))
        self.space.untold += 1

    # --- overload control

    def obey(self, control: Control, now: float) -> None:
        """Apply the present steps of the overload control, and displace the waiting requests of shed classes."""
        taken = [control.taken_from(step) for step in (TIGHTEN, CAP, HALVE, SHED)]
        self.fit.tight, self.capped, self.halved, self.shed = taken
        for line in self.lines:
            while line.qos.name in self.shed and (last := line.last("count")) is not None:
                self._give_way(last, now, CONTROL)

    def _is_shed(self, ticket: Ticket) -> bool:
        """Return whether overload control refuses it: all of a shed class, every other newcomer of a halved class."""
        name = ticket.qos.name
        if name in self.shed or name not in self.halved or ticket.waits:
            return name in self.shed
        self._odd ^= {name}
        return name in self._odd

    def _shed(self, asked: Question) -> Verdict:
        """Refuse a request that overload control refuses, unless an idle replica or the overflow pool can take it.

        An idle replica that no higher class claims takes it, and its answer helps to see whether the fault is over. The
        overflow pool takes it if the class has `spill` among its steps and the pool's replicas do not serve the other
        requests.
        """
        idle = [index for index in asked.room if not asked.quotes[index].there]
        if free := unclaimed(idle, asked.places, self._before(asked.ticket, asked.now)):
            return Verdict(ADMITTED, "room", free)
        may_spill = SPILL in self.steps(asked.ticket.qos) and asked.offers.spills_elsewhere()
        if may_spill and (found := self._spilled(asked, CONTROL)) is not None:
            return found
        return Verdict(REFUSED, CONTROL, (), self._until_judged)

    @property
    def _until_judged(self) -> float:
        """Seconds after which requests refused by overload control should retry: one window of the control.

        Not sooner, because only at the end of a window does it judge again which steps it takes.
        """
        return self.rules.control_window or 0.0

    # --- outcomes

    def first_token(self, ticket: Ticket, seconds: float) -> None:
        """Learn the TTFT margin from a first token, `seconds` after its client began to wait.

        It is learned at first tokens and not at the ends of answers, which come too late in a burst. Predictions by
        costs that had not learned yet are skipped: the costs correct that error themselves, and the margin would keep
        it for hundreds of answers.
        """
        if ticket.slo.ttft is not None and ticket.learned:
            self.fit.ttft_margin.learn(ticket.ttft, seconds, ticket.slo.ttft)

    def ended(self, ticket: Ticket, ttft: float, tpot: float | None, counted: bool = True) -> bool | None:
        """Learn the TPOT margin from a complete answer; return whether it kept its limits, None if it had none.

        `ttft`, `tpot`: measured seconds; `tpot` is None for answers too short to measure. `counted`: whether the engine
            reported the number of tokens; a count of events may take several tokens for one, so no margin is learned
            from it.
        """
        limits = ticket.slo
        if counted and tpot is not None and limits.tpot is not None and ticket.costs is not None:
            # Predict with the current costs: the margin must not repeat what the costs have learned since.
            self.fit.tpot_margin.learn(ticket.costs.stream_step(ticket.streams, ticket.context), tpot, limits.tpot)
        if limits.ttft is None and limits.tpot is None:
            return None
        return ttft <= (limits.ttft or inf) and (tpot or 0.0) <= (limits.tpot or inf)


def _is_for_its_class(ticket: Ticket, reason: str) -> bool:
    """Return whether a request was refused because of its class's limit, not a stricter one of its own."""
    own, of_class = ticket.slo, ticket.qos.slo
    if reason == "tpot":
        return of_class.tpot is not None and own.tpot == of_class.tpot
    return reason in ("ttft", "deadline") and of_class.ttft is not None and own.ttft == of_class.ttft


def _first_since(line: Line) -> float:
    head = line.head()
    return head.since if head is not None else inf


def _drain(line: Line | None) -> float:
    """Return the seconds until everything that waits in the line now is sent, at the line's measured pace."""
    return line.work / max(line.pace.value, 1e-6) if line is not None else 0.0
