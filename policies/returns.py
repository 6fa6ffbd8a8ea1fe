"""When refused requests should be retried: one after the other, at the pace at which requests are admitted.

If the clients were told only when the prediction that refused their request falls below its limit, all would come back
at once, since a full queue keeps predictions just above the limit: of requests that retried after a burst of twice what
an engine can answer, 19 % were admitted, and 9 % after four times that. So each refusal books time after the earlier
refusals of its class: what its prompt takes at half of the recent pace; the other half is for new requests. With that,
77 and 71 % are admitted. At most _MOST seconds are booked, and at most _FOLLOWED together with the request's own wait,
since clients ignore a long `Retry-After` (Anthropic's for Python above 60 s, OpenAI's newest above 120 s), and a client
that does not return leaves a gap. Refusals beyond that share the second half of the booked time with others. No I/O, no
clock, no randomness.
"""

from __future__ import annotations

from .classes import QosClass

_SHARE = 0.5  # share of the pace that is booked
_LEAST_PACE = 0.25  # prefill seconds admitted per second, assumed if nothing was admitted lately
_LEAST_MOST, _MOST, _FOLLOWED = 10.0, 50.0, 60.0  # seconds: least and most bound on booked time; on the whole wait


class Returns:
    """The retry times booked for each class."""

    def __init__(self) -> None:
        self._booked: dict[str, float] = {}  # until when, by class

    def book(self, qos: QosClass, seconds: float, work: float, pace: float, now: float) -> float:
        """Book a retry, and return after how many seconds it should come.

        `seconds`: after how many it would be admitted if no other request retried; `work`: seconds of its prefill;
        `pace`: prefill seconds that are admitted per second.
        """
        ahead = max(0.0, self._booked.get(qos.name, 0.0) - now)
        most = min(_MOST, max(_LEAST_MOST, _FOLLOWED - seconds))
        if ahead > most:
            ahead = 0.5 * most + ahead % (0.5 * most)
        self._booked[qos.name] = now + ahead + work / (_SHARE * max(_LEAST_PACE, pace))
        return max(0.0, seconds) + ahead
