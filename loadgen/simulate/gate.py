"""Admission in virtual time: requests are sent, queued or refused as in the real gateway, but without sockets.

If the admission rules set a control window (in seconds), overload control runs too: after each window, QoS classes that
missed their limits take capacity from lower classes (`policies.control`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from policies import Admission, Control, Placement, QueuedRequest, admit
from policies.control import LATELY, Change, Refusals, Seen, slo_ratio
from policies.decisions import QUEUED, REFUSED, AdmissionDecision
from policies.outputs import LEAST_OUTPUT

from .gateway import Gateway, Legs

# Functions of the fleet that end the wait of a request, which is a `fleet.Live`. `Send` sends it to where it was placed
# (None: no replica can take it); `Refuse` ends it with the reason that the decision gives.
Send = Callable[[Any, Placement | Legs | None], None]
Refuse = Callable[[Any, AdmissionDecision], None]


class Gate:
    """The admission of one simulated gateway: it decides whether a request is sent, queued or refused.

    `send`: called with a request and its placement; `refuse`: called with a request and the decision; `at`: schedules a
    call at a virtual time.
    """

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
        self.changes: list[tuple[float, Change]] = []  # all that overload control has changed, with their times
        self._ttfts: dict[str, list[tuple[float, float]]] = {}  # in this window, by class: (when, TTFT in seconds)
        self._tpots: dict[str, list[tuple[float, float]]] = {}  # likewise (when, TPOT in seconds)

    def ask(self, request: Any, now: float) -> QueuedRequest:
        """Send, queue or refuse a request (a `fleet.Live`), and return the admission's object for it."""
        self._look(now)
        turn = request.turn
        qos = self._classes.get(turn.qos) or self.admission.classes.last
        queued = QueuedRequest(qos, qos.slo, now, turn.tenant, payload=request)
        self._judge(queued, now)
        if queued.waits:
            self._at(queued.deadline, self.drain, queued.deadline)
        return queued

    def drain(self, now: float) -> None:
        """Send the requests at the heads of the queues as far as there is capacity.

        Before that, requests that gave way to others or waited past their deadline are refused. A request past its
        deadline is judged again instead if no replica is ready, or if its class has an admission step after `wait` that
        may still send it.
        """
        self._look(now)
        admission = self.admission
        for queued, verdict in admission.turned_out(now):
            if verdict.decision == QUEUED:
                self._judge(queued, now)
            else:
                self._refuse(queued.payload, verdict)
        for queued in admission.heads(now):
            self._judge(queued, now)

    def _judge(self, queued: QueuedRequest, now: float) -> None:
        """Decide whether a request is sent now, stays queued or is refused, and send or refuse it."""
        request, gateway = queued.payload, self._gateway
        evaluation = gateway.evaluate(request.turn, request.session, now)
        if evaluation is None:
            self.admission.leave(queued, now)
            self._send(request, None)
            return
        pairings = gateway.pairings(request.turn)
        verdict, evaluation = admit(
            gateway.router, self.admission, queued, evaluation, now, may_cap=True, pairings=pairings
        )
        if verdict.cap:
            request.cap(verdict.cap)
        if verdict.decision == REFUSED:
            self._refuse(request, verdict)
        elif not queued.waits:
            self._send(request, gateway.commit(evaluation, request.turn, now))

    def first(self, queued: QueuedRequest, now: float) -> None:
        """Record that an admitted request has got its first token now, for the TTFT of its class."""
        self._look(now)
        self._ttfts.setdefault(queued.qos.name, []).append((now, now - queued.since))
        self.admission.first_token(queued, now - queued.since)

    def complete(self, queued: QueuedRequest, first: float, now: float, output: int) -> None:
        """Record that an admitted request has ended now.

        `first`: when its first token came; `output`: tokens of the reply.
        """
        self._look(now)
        tpot = (now - first) / (output - 1) if output > LEAST_OUTPUT else None
        if tpot is not None:
            self._tpots.setdefault(queued.qos.name, []).append((now, tpot))
        self.admission.ended(queued, first - queued.since, tpot)

    def _look(self, now: float) -> None:
        """Run overload control for the control windows that have ended by now.

        Every event of this gateway's requests calls this first, so there is no timer.
        """
        while self._window is not None and self._until <= now:
            until, lately = self._until, self._until - LATELY * self._window
            self._until += self._window
            pressures = {}
            for name, one in self._classes.items():
                ttfts, tpots = self._ttfts.get(name, ()), self._tpots.get(name, ())
                ttft, tpot = one.slo
                window, end = [(_seen(ttfts, since, ttft), _seen(tpots, since, tpot), None) for since in (0.0, lately)]
                if not self._late:  # no event came in the last third of the window
                    self._refusals.last_third()
                    self._late = True
                pressures[name] = slo_ratio(one.slo, window, end, *self._refusals.of(name))
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
    """Return the number of answers from time `since` on, their high percentiles and how many exceed `limit` seconds.

    `answers`: (when, seconds). Returns None if there are none.
    """
    ordered = sorted([seconds for when, seconds in answers if when >= since])
    if not ordered:
        return None
    p99, p999 = [ordered[int(share * (len(ordered) - 1))] for share in (0.99, 0.999)]
    late = sum(seconds > limit for seconds in ordered) if limit is not None else 0
    return Seen(len(ordered), p99, p999, ordered[-2] if len(ordered) > 1 else 0.0, late)
