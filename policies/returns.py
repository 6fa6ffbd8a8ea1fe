"""When those who are refused are to ask again: one after the other, at the pace at which requests are taken.

By itself each would be taken as soon as the prediction that refused it is below its limit. A full queue keeps
predictions just above it, so that is at once for all of them: of those that came back after a burst of twice what an
engine can answer, 19 % were taken, and 9 % after four times that. So each refusal books time behind those before it in
its class, as much as its prompt takes at half the pace of the last seconds; the other half is for those that come for
the first time. 77 and 71 % are taken then. No more than _MOST seconds are booked, and with what one waits by itself no
more than _FOLLOWED, since clients do not follow a long `Retry-After` (Anthropic's for Python none above 60 s, OpenAI's
newest none above 120 s), and who does not come back leaves a gap; whoever is refused after that shares the second half
of them with others. No I/O, no clock, no chance.
"""

from __future__ import annotations

from .classes import QosClass

_SHARE = 0.5  # of the pace
_LEAST_PACE = 0.25  # seconds of prefill that are taken in a second, where nobody was taken lately
_LEAST_MOST, _MOST, _FOLLOWED = 10.0, 50.0, 60.0  # seconds


class Returns:
    def __init__(self) -> None:
        self._booked: dict[str, float] = {}  # until when, by class

    def book(self, qos: QosClass, seconds: float, work: float, pace: float, now: float) -> float:
        """Return after how many seconds one is to come back that would be taken after `seconds` by itself. `work`:
        seconds of its prefill; `pace`: of those, how many are admitted in a second."""
        ahead = max(0.0, self._booked.get(qos.name, 0.0) - now)
        most = min(_MOST, max(_LEAST_MOST, _FOLLOWED - seconds))
        if ahead > most:
            ahead = 0.5 * most + ahead % (0.5 * most)
        self._booked[qos.name] = now + ahead + work / (_SHARE * max(_LEAST_PACE, pace))
        return max(0.0, seconds) + ahead
