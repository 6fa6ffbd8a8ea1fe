"""Admission in virtual time: the counterpart of the queue in the gateway, on records instead of sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from policies import Admission, Control, Placement, Ticket, admit
from policies.control import LATELY, Change, Refusals, Seen, pressure
from policies.outputs import LEAST_OUTPUT
from policies.verdicts import QUEUED, REFUSED, Verdict

from .gateway import Gateway, Legs
from .turns import Turn

# Send a request with its placement (None: no replica can take it), or refuse it with a verdict.
Send = Callable[[Any, Placement | Legs | None], None]
Refuse = Callable[[Any, Verdict], None]


class Asking(Protocol):
    """A request as a gate sees it."""

    @property
    def turn(self) -> Turn: ...

    @property
    def session(self) -> str | None: ...

    def cap(self, tokens: int) -> None:
        """Limit the answer to `tokens` tokens."""


class Gate:
    """The admission of one gateway; `at` schedules a call on the virtual clock."""

    def __init__(
        self, gateway: Gateway, admission: Admission, send: Send, refuse: Refuse, at: Callable[..., None]
    ) -> None:
        self.admission, self._gateway = admission, gateway
        self._send, self._refuse, self._at = send, refuse, at
        self._classes = {one.name: one for one in admission.classes.all}
        self._window = admission.rules.control_window
        self._until = self._window or 0.0
        self._control = Control(admission.classes.all, admission.observes)
        self._refusals, self._late = Refusals(admission.refused), False  # late: the last third of the window has begun
        self.changes: list[tuple[float, Change]] = []
        self._ttfts: dict[str, list[tuple[float, float]]] = {}  # of this window, by class: (time, seconds)
        self._tpots: dict[str, list[tuple[float, float]]] = {}

    def ask(self, request: Asking, now: float) -> Ticket:
        """Admit, queue or refuse a request and return its ticket."""
        self._look(now)
        turn = request.turn
        qos = self._classes.get(turn.qos) or self.admission.classes.last
        ticket = Ticket(qos, qos.slo, now, turn.tenant, payload=request)
        self._judge(ticket, now)
        if ticket.waits:
            self._at(ticket.deadline, self.drain, ticket.deadline)
        return ticket

    def drain(self, now: float) -> None:
        """Send the requests at the heads of the queues as far as there is capacity.

        Those past their deadline or displaced are refused, unless their class has further steps.
        """
        self._look(now)
        admission = self.admission
        for ticket, verdict in admission.turned_out(now):
            if verdict.decision == QUEUED:
                self._judge(ticket, now)
            else:
                self._refuse(ticket.payload, verdict)
        for ticket in admission.heads(now):
            self._judge(ticket, now)

    def _judge(self, ticket: Ticket, now: float) -> None:
        request, gateway = ticket.payload, self._gateway
        evaluation = gateway.evaluate(request.turn, request.session, now)
        if evaluation is None:
            self.admission.leave(ticket, now)
            self._send(request, None)
            return
        pairings = gateway.pairings(request.turn)
        verdict, evaluation = admit(
            gateway.router, self.admission, ticket, evaluation, now, may_cap=True, pairings=pairings
        )
        if verdict.cap:
            request.cap(verdict.cap)
        if verdict.decision == REFUSED:
            self._refuse(request, verdict)
        elif not ticket.waits:
            self._send(request, gateway.commit(evaluation, request.turn, now))

    def first(self, ticket: Ticket, now: float) -> None:
        """Note the first token of an admitted request."""
        self._look(now)
        self._ttfts.setdefault(ticket.qos.name, []).append((now, now - ticket.since))
        self.admission.first_token(ticket, now - ticket.since)

    def complete(self, ticket: Ticket, first: float, now: float, output: int) -> None:
        """Note the end of an admitted request whose first token came at `first`, with `output` tokens."""
        self._look(now)
        tpot = (now - first) / (output - 1) if output > LEAST_OUTPUT else None
        if tpot is not None:
            self._tpots.setdefault(ticket.qos.name, []).append((now, tpot))
        self.admission.ended(ticket, first - ticket.since, tpot)

    def _look(self, now: float) -> None:
        """Evaluate the control windows that have ended by now; called on each event, so there is no timer."""
        while self._window is not None and self._until <= now:
            until, lately = self._until, self._until - LATELY * self._window
            self._until += self._window
            pressures = {}
            for name, one in self._classes.items():
                ttfts, tpots = self._ttfts.get(name, ()), self._tpots.get(name, ())
                ttft, tpot = one.slo
                window, end = [(_seen(ttfts, since, ttft), _seen(tpots, since, tpot), None) for since in (0.0, lately)]
                if not self._late:  # no event since the last third began
                    self._refusals.last_third()
                    self._late = True
                pressures[name] = pressure(one.slo, window, end, *self._refusals.of(name))
            self._ttfts, self._tpots, self._late = {}, {}, False
            self._refusals.next_window()
            if changes := self._control.ended(pressures):
                self.changes += [(until, one) for one in changes]
                self.admission.obey(self._control, now)
                self._at(now, self.drain, now)
        if self._window is not None and not self._late and now >= self._until - LATELY * self._window:
            self._refusals.last_third()
            self._late = True


def _seen(answers: Sequence[tuple[float, float]], since: float, limit: float | None) -> Seen | None:
    ordered = sorted([seconds for when, seconds in answers if when >= since])
    if not ordered:
        return None
    p99, p999 = [ordered[int(share * (len(ordered) - 1))] for share in (0.99, 0.999)]
    late = sum(seconds > limit for seconds in ordered) if limit is not None else 0
    return Seen(len(ordered), p99, p999, ordered[-2] if len(ordered) > 1 else 0.0, late)
