"""Admission: whether a request is sent now, waits in front of the fleet, or is told to come back, and when.

A candidate has *room* for a request if it is idle, or if what waits there is no longer than `engine_wait` seconds and
its streams stay within the strictest limit of all classes. It *meets* a request's limits if the predicted seconds to
its first token, with those that it has waited already, and those from one token to the next are within them. `fit` says
which ones do.

A request is sent where there is room and nobody goes before it; and, unless the steps of its class (`when_full`) have
`wait` or begin with `degrade`, where its limits are met all the same. Else it goes through the steps in their order
until one takes it, and is refused if none does:

    wait      it waits, unless it is predicted to wait longer than its limit allows; if it comes to that all the same,
              the steps after this one are tried then
    degrade   its answer is capped at `max_tokens_floor` tokens, and it is sent where its limits are met so, though not
              where a higher class waits
    spill     it is sent to a replica of the slow pool that meets its limits, or that has room at all
    reject    it is refused
    observe   alone: always sent; what `reject` would have refused is counted

Whose turn it is: classes that have had less than their reserved fraction go before those that have had it, the higher
priority first in each (`reserves`); in a class `lines` has the rule. Where a queue is full, the lowest class gives way.

Not every request may go to every replica. Those that may go to the same ones wait in a line of their own, and whoever
waits keeps only its own replicas from those behind it. While no replica is ready for a request it waits as well, in a
line that keeps nothing from anybody.

What is a candidate here is one *way* of a request: through one replica, or through two, of which one computes its
prompt and the other writes its answer (`quotes`). No I/O, no clock: `now` is in seconds of the caller's.
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
from .returns import Returns
from .verdicts import (
    ADMITTED,
    CONTROL,
    DEGRADE,
    DEGRADED,
    NO_OFFERS,
    OBSERVE,
    OBSERVED,
    QUEUED,
    REFUSED,
    SPILL,
    SPILLED,
    WAIT,
    Offers,
    Rules,
    Verdict,
)

_GUESS = 0.5  # seconds of prefill that a replica does in a second, until a line's pace is known
_MOST_LINES = 64  # before those in which nobody waits are forgotten, with their paces
_LEARNED = 3  # answers, until which costs are those of an engine that nobody has seen


class Space:
    """What waits in all lines of all `fleets` together, within its bounds. `untold`: requests that had to give way, and
    were not told yet."""

    __slots__ = ("requests", "bytes", "untold", "fleets")

    def __init__(self) -> None:
        self.fleets: list[Admission] = []
        self.requests = self.bytes = self.untold = 0


class Admission:
    """Of one fleet. `space`: shared with other fleets of the same process."""

    def __init__(self, classes: Classes, rules: Rules, space: Space | None = None) -> None:
        self.classes, self.rules, self.space = classes, rules, space or Space()
        self.space.fleets.append(self)
        self.lines: list[Line] = []
        self._reserves, self._returns = Reserves(classes), Returns()
        self.fit = Fit(classes, rules, self._reserves)
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._number = count()
        self._gave_way: deque[tuple[Ticket, str]] = deque()  # and why
        self.capped: frozenset[str] = frozenset()  # classes from which `control` takes this
        self.halved: frozenset[str] = frozenset()
        self.shed: frozenset[str] = frozenset()
        self.refused = {one.name: NONE_REFUSED for one in classes.all}  # since the beginning, for `control`
        self._odd: set[str] = set()  # of halved classes, those of which the next newcomer is admitted

    @property
    def waiting(self) -> bool:
        return any(line.count for line in self.lines)

    def close(self) -> bool:
        """Leave the other fleets' space, as nobody asks here any more; False: not yet, since some wait."""
        if self.waiting or self._gave_way:
            return False
        self.space.fleets.remove(self)
        return True

    # --- a request asks

    def steps(self, qos: QosClass) -> tuple[str, ...]:
        return self.rules.when_full if qos.when_full is None else qos.when_full

    def observes(self, qos: QosClass) -> bool:
        """Whether all of its requests are sent, and those that would be refused are counted."""
        return self.steps(qos) == (OBSERVE,)

    def has_more_steps(self, qos: QosClass) -> bool:
        """Whether its requests may still be sent once they have waited too long."""
        steps = self.steps(qos)
        return not {DEGRADE, SPILL}.isdisjoint(steps[steps.index(WAIT) + 1 :] if WAIT in steps else ())

    def ask(
        self,
        ticket: Ticket,
        tokens: int,
        quotes: Sequence[Quote],
        now: float,
        places: Sequence[Place] = (),
        offers: Offers = NO_OFFERS,
    ) -> Verdict:
        """Judge a request that has just come, or that is one of the `heads` of those that wait. `tokens`: those that
        must be computed where it would go; `quotes`: of each of its ways; `places`: the replicas of each, which are all
        there are if they are not said; `offers`: what there is besides."""
        verdict = self._judge(Question(ticket, quotes, now, places, offers), tokens)
        floor = self._floor(ticket)
        if verdict.decision == REFUSED:
            return self._to_return(ticket, verdict, now)
        if ticket.qos.name in self.capped and verdict.decision == ADMITTED and offers.may_cap(floor):
            return verdict._replace(decision=DEGRADED, reason=CONTROL, cap=floor)
        return verdict

    def await_replica(self, ticket: Ticket, tokens: int, why: str, now: float) -> bool:
        """No replica is ready that could take a request: return whether it waits for one, as long as it may wait for
        room. `tokens`: of its prompt; `why`: the same for all that wait for the same replicas."""
        if ticket.waits and ticket.deadline <= now:
            self.leave(ticket, now)
            return False
        few = len(self.lines) < _MOST_LINES  # clients choose the names of models that nobody serves
        line = self._line(ticket.qos, frozenset((ABSENT, why if few else "others")), _GUESS)
        if ticket.waits:
            if ticket.line is not None and ticket.line is not line:
                ticket.line.remove(ticket, now)
                line.add(ticket, now)
            return True
        if WAIT not in self.steps(ticket.qos) or self._is_shed(ticket):
            return False
        ticket.tokens = tokens
        return self._queue(ticket, line, 0.0, now)

    def _judge(self, asked: Question, tokens: int) -> Verdict:
        ticket, now = asked.ticket, asked.now
        absent = ticket.line if ticket.waits and ticket.line is not None and ticket.line.is_absent else None
        if absent is not None:
            absent.remove(ticket, now)
        if not ticket.waits:
            ticket.tokens, ticket.own = tokens, asked.best.own
        if absent is not None:  # replicas are ready for it now
            self._line(ticket.qos, asked.replicas, self._guess(asked)).add(ticket, now)
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

    def _otherwise(self, asked: Question, steps: Sequence[str], refused: Verdict) -> Verdict:
        """Go through the steps of a request that would be refused so, until one takes it."""
        for step in steps:
            found: Verdict | None = None
            if step == WAIT and refused.reason != "tpot":  # waiting does not make an answer quicker
                found = self._line_up(asked)
            elif step == DEGRADE:
                found = self._degraded(asked, refused.reason)
                if found is None and WAIT not in self.steps(asked.ticket.qos):  # it may be short already
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
        """Send it where it meets its limits with a short answer, unless a higher class waits for that replica."""
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
        """Send it to the slow pool, also if it is late there, as long as it does not wait in front of an engine."""
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
        """Send it where there is room that nobody before it waits for; else say that all is full."""
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
        """Return where such requests wait."""
        found = next((one for one in self.lines if one.qos is qos and one.targets == targets), None)
        if found is None:
            if len(self.lines) >= _MOST_LINES:
                self.lines = [one for one in self.lines if one.count]
            self.lines.append(found := Line(qos, guess, targets))
        return found

    def _turn(self, asked: Question) -> Verdict:
        """Judge the first of a line. One that would be late now is not computed for nothing. One that brings a TPOT
        limit which no replica with room keeps is refused: if it waited for an idle one, all behind it would."""
        ticket, now, line = asked.ticket, asked.now, asked.ticket.line
        assert line is not None
        if ticket.deadline <= now and self.has_more_steps(ticket.qos):
            self.leave(ticket, now)
            return Verdict(REFUSED, "deadline", (), _drain(line))
        line.targets = asked.replicas  # they may have come and gone
        order = self._in_order(now)
        room = unclaimed(asked.room, asked.places, order[: order.index(line)])
        if not room:
            if ticket.deadline > now:
                return Verdict(QUEUED, "full")
            self.leave(ticket, now)
            return Verdict(REFUSED, "deadline", (), _drain(line))
        limit = ticket.slo.ttft
        if limit is not None:
            room = [index for index in room if self.fit.within(asked.quotes[index], asked.waited, limit)]
            if not room:
                self.leave(ticket, now)
                return Verdict(REFUSED, "deadline", (), _drain(line))
        if not (fast := self.fit.fast(ticket, asked.quotes, room)):
            self.leave(ticket, now)
            return self._refused(asked, "tpot", asked.ttft)
        line.take(ticket, now)
        self._left(ticket)
        return Verdict(ADMITTED, "turn", fast)

    def _queue(self, ticket: Ticket, line: Line, own: float, now: float) -> bool:
        """Return whether the queue has space for it; it waits in this line then. `own`: seconds of its prefill."""
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
        """Return the seconds for which it may wait. A limit that the request itself brings makes them fewer, and not
        more than what the settings give its class."""
        limit, of_class = ticket.slo.ttft, ticket.qos.slo.ttft
        if limit is None:
            return self.rules.max_wait
        return min(limit - own, max(self.rules.max_wait, of_class or 0.0))

    def _refused(self, asked: Question, reason: str, ttft: float) -> Verdict:
        slo, best = asked.ticket.slo, asked.best
        limit = slo.tpot if reason == "tpot" else slo.ttft
        if reason == "tpot" and limit is not None:  # streams end, and those that are left are quicker
            return Verdict(REFUSED, reason, (), best.left * max(0.0, 1.0 - limit / best.tpot))
        return Verdict(REFUSED, reason, (), ttft - (limit if limit is not None else 0.0))

    def sent(self, ticket: Ticket, quote: Quote, costs: Costs, tokens: float, now: float, replica: str = "") -> None:
        """It goes where this was quoted by these costs, and holds so many tokens of cache there; its prompt is computed
        on that `replica`."""
        ticket.ttft, ticket.costs = now - ticket.since + quote.ttft, costs
        ticket.learned = costs.group.ttft.count >= _LEARNED
        ticket.streams, ticket.context = quote.streams, quote.context
        self._reserves.take(ticket.qos, quote.own, tokens * quote.tpot, now)
        self._reserves.compute(ticket.qos, replica, now + quote.ttft, now)

    # --- whose turn it is

    def head(self, now: float) -> Ticket | None:
        """Who is to be asked about next, of those that wait."""
        return next(self.heads(now), None)

    def heads(self, now: float) -> Iterator[Ticket]:
        """Who is to be asked about, one after the other: the first in the first line, and while it still waits then,
        the first in the next line that has other replicas."""
        full: list[frozenset[str]] = []
        while True:
            order = self._in_order(now)
            line = next((one for one in order if not any(one.targets <= targets for targets in full)), None)
            head = line.head() if line is not None else None
            if line is None or head is None:
                return
            yield head
            if head.waits and head.line is not None:  # perhaps in another line now
                full.append(head.line.targets)

    def _in_order(self, now: float) -> list[Line]:
        """Return the lines in which somebody waits; of a class those first whose first came first."""
        self._reserves.decay(now)
        rank = self._reserves.rank
        return sorted([one for one in self.lines if one.count], key=lambda one: (*rank(one.qos), _first_since(one)))

    def _before(self, ticket: Ticket, now: float) -> list[Line]:
        """Return the lines with somebody who goes before a newcomer: its class's, and those that are before that."""
        self._reserves.decay(now)
        rank = self._reserves.rank
        own = rank(ticket.qos)
        return [one for one in self.lines if one.count and rank(one.qos) <= own]

    def held_up(self, seconds: float) -> None:
        """Until now nobody was asked about for so long: it is no time that anybody has waited for a replica."""
        waiting = [(deadline + seconds, number, ticket) for deadline, number, ticket in self._deadlines if ticket.waits]
        for deadline, _, ticket in waiting:
            ticket.deadline, ticket.held = deadline, ticket.held + seconds
        heapq.heapify(waiting)
        self._deadlines = waiting
        for line in self.lines:
            line.pace.held_up(seconds)

    # --- who leaves unsent

    def leave(self, ticket: Ticket, now: float) -> None:
        """Its client has left, or nobody can take it any more. Nothing happens if it does not wait."""
        if ticket.waits:
            assert ticket.line is not None
            ticket.line.drop(ticket, now)
            self._left(ticket)

    def _left(self, ticket: Ticket) -> None:
        """It waits no more. Its deadline is forgotten with others', before they are more than those that wait."""
        self.space.requests -= 1
        self.space.bytes -= ticket.size
        if len(self._deadlines) > 64 + 2 * sum([line.count for line in self.lines]):
            self._deadlines = [one for one in self._deadlines if one[2].waits]
            heapq.heapify(self._deadlines)

    def turned_out(self, now: float) -> Iterator[tuple[Ticket, Verdict]]:
        """Take out those for whom it is too late, and tell of those that had to give way since the last call. Where a
        class has further steps after waiting, those that are late are told of as queued, as are those for which no
        replica is ready: they are to be asked about."""
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
                self.leave(ticket, now)
                yield ticket, self._to_return(ticket, Verdict(REFUSED, "deadline", (), _drain(ticket.line)), now)

    def _to_return(self, ticket: Ticket, refused: Verdict, now: float) -> Verdict:
        """Count it, and have it come back behind those that were refused before it."""
        if _is_for_its_class(ticket, refused.reason):
            self.refused[ticket.qos.name] = self._counted(ticket.qos, now)
        in_line = sum([line.pace.value for line in self.lines if line.qos is ticket.qos])
        pace = max(in_line, self._reserves.pace(now))
        return refused._replace(retry_after=self._returns.book(ticket.qos, refused.retry_after, ticket.own, pace, now))

    def _counted(self, qos: QosClass, now: float) -> Refused:
        """Return how many of a class were refused for its limits, with one more."""
        owed, beyond, flood = self.refused[qos.name]
        if self._reserves.is_owed(qos, now):
            return Refused(owed + 1, beyond, flood)
        floods = self._reserves.floods(qos)
        return Refused(owed, beyond + (not floods), flood + floods)

    def _make_space(self, ticket: Ticket, now: float) -> bool:
        """Have others give way to it where the queue is full, if that suffices; else nobody does. Those of lower
        classes do, the lowest first, in the lines of other fleets as well; then a tenant in its own class that has
        more of the queue than its tenant."""
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
        """Return the lines that give way to a class, the lowest first. What a class has had of one fleet says nothing
        of another."""
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
        resource: Resource = "count" if count > 0 else "size"
        lines = [one for one in self.lines if one.qos is ticket.qos and one.count]
        most = max(lines, key=lambda one: one.most(resource), default=None)
        share = sum([one.has(ticket.tenant, resource) for one in lines]) + (1 if count > 0 else ticket.size)
        return most.gives(count, size, share) if most is not None else None

    def _give_way(self, ticket: Ticket, now: float, reason: str = "shed") -> None:
        self.leave(ticket, now)
        self._gave_way.append((ticket, reason))
        self.space.untold += 1

    # --- what the control of overload takes

    def obey(self, control: Control, now: float) -> None:
        """Take from classes what it says now. Those of a shed class that wait are told of next."""
        taken = [control.taken_from(step) for step in (TIGHTEN, CAP, HALVE, SHED)]
        self.fit.tight, self.capped, self.halved, self.shed = taken
        for line in self.lines:
            while line.qos.name in self.shed and (last := line.last("count")) is not None:
                self._give_way(last, now, CONTROL)

    def _is_shed(self, ticket: Ticket) -> bool:
        """Whether it is refused for the sake of higher classes: all of its class, or every other newcomer."""
        name = ticket.qos.name
        if name in self.shed or name not in self.halved or ticket.waits:
            return name in self.shed
        self._odd ^= {name}
        return name in self._odd

    def _shed(self, asked: Question) -> Verdict:
        """Refuse a newcomer, unless there is an idle replica, which nobody of a higher class has anything of: by its
        answer it is seen as well whether the fault is over. Nor is it refused where its class has the slow pool among
        its steps, and that can take it without being in the way of others. Nobody of a shed class waits (`obey`)."""
        idle = [index for index in asked.room if not asked.quotes[index].there]
        if free := unclaimed(idle, asked.places, self._before(asked.ticket, asked.now)):
            return Verdict(ADMITTED, "room", free)
        may_spill = SPILL in self.steps(asked.ticket.qos) and asked.offers.spills_elsewhere()
        if may_spill and (found := self._spilled(asked, CONTROL)) is not None:
            return found
        return Verdict(REFUSED, CONTROL, (), self._until_judged)

    @property
    def _until_judged(self) -> float:
        """Seconds after which who is refused for the control of overload is to come back: not before what was taken is
        judged again."""
        return self.rules.control_window or 0.0

    # --- what became of it

    def first_token(self, ticket: Ticket, seconds: float) -> None:
        """It came so many `seconds` after its client began to wait, where it was admitted to. Told at once: what is
        learned at the end of answers comes too late for a crowd, and only from those that end. What costs predict
        that have learned nothing is their own error, which they mend: a margin would keep it for hundreds of answers.
        """
        if ticket.slo.ttft is not None and ticket.learned:
            self.fit.ttft_margin.learn(ticket.ttft, seconds, ticket.slo.ttft)

    def ended(self, ticket: Ticket, ttft: float, tpot: float | None, counted: bool = True) -> bool | None:
        """Its answer is complete: return whether it was within its limits, None if it had none. `tpot`: None where it
        is too short to tell. `counted`: by tokens that the engine counted; events may be of several, and no margin is
        learned from those."""
        limits = ticket.slo
        if counted and tpot is not None and limits.tpot is not None and ticket.costs is not None:
            # By what is known now: what the costs have learned since needs no margin besides.
            self.fit.tpot_margin.learn(ticket.costs.stream_step(ticket.streams, ticket.context), tpot, limits.tpot)
        if limits.ttft is None and limits.tpot is None:
            return None
        return (limits.ttft is None or ttft <= limits.ttft) and (
            limits.tpot is None or tpot is None or tpot <= limits.tpot
        )


def _is_for_its_class(ticket: Ticket, reason: str) -> bool:
    """Whether a request was refused because nobody could meet a limit of its class. One that it brings itself may be
    such that nobody ever does."""
    own, of_class = ticket.slo, ticket.qos.slo
    if reason == "tpot":
        return of_class.tpot is not None and own.tpot == of_class.tpot
    return reason in ("ttft", "deadline") and of_class.ttft is not None and own.ttft == of_class.ttft


def _first_since(line: Line) -> float:
    head = line.head()
    return head.since if head is not None else inf


def _drain(line: Line | None) -> float:
    """Return the seconds until all that waits in the line now is sent, at its pace."""
    return line.work / max(line.pace.value, 1e-6) if line is not None else 0.0
