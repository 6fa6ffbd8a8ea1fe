"""The journal of recent events: replicas' changes of state, replicas added and removed, repairs and failures.

Replicas' changes of state are reported to the journal. Everything else is found once a second, by comparing state and
counters with the last look at them. Each change is thus recorded once, and requests do no work for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from replicas.lifecycle import State

MOST_ENTRIES, MOST_CHARS = 300, 400
AGAIN_SECONDS = 60.0  # an event that comes again within this time is counted on its entry, not recorded again

GOOD, WARN, BAD, PLAIN = "good", "warn", "bad", "plain"
LEVELS = {State.READY: GOOD, State.DEGRADED: WARN, State.LEAVING: WARN, State.DRAINING: WARN, State.FAILED: BAD}
FAILURES = (State.FAILED, State.DEGRADED)


@dataclass(slots=True)
class Entry:
    """An entry of the journal: an event that happened once or several times.

    `at`, `since`: when it happened last and first, in seconds of the wall clock. `times`: how often it happened.
    """

    number: int
    at: float
    since: float
    kind: str
    replica: str
    level: str
    text: str
    times: int = 1


@dataclass(slots=True)
class Failure:
    """The last failure of a replica. `at`: when it happened, in seconds of the wall clock.

    `why`: the failure in words. `why_down`: the reason why the replica is down, or "" if only a request failed.
    Requests that fail soon after it went down are added to that reason in `why`.
    """

    at: float
    why: str
    why_down: str = ""


class Journal:
    """The last MOST_ENTRIES (300) events, and the last failure of each replica."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=MOST_ENTRIES)
        self.failures: dict[str, Failure] = {}
        self._number = 0

    def note(self, now: float, kind: str, text: str, replica: str = "", level: str = PLAIN, times: int = 1) -> bool:
        """Record an event, and return whether that made a new entry.

        If the same event was recorded within the last AGAIN_SECONDS, it is counted on its old entry instead. `now`: the
        wall clock, in seconds. `times`: how often the event happened.
        """
        text = text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 1] + "…"
        for known in reversed(self.entries):
            if now - known.at > AGAIN_SECONDS:
                break
            if (known.kind, known.replica, known.text) == (kind, replica, text):
                known.at, known.times = now, known.times + times
                self.entries.remove(known)
                self.entries.append(known)
                return False
        self._number += 1
        self.entries.append(Entry(self._number, now, now, kind, replica, level, text, times))
        return True

    def failed(self, now: float, replica: str, why: str, of_request: bool = False) -> None:
        """Record a failure of a replica or, with `of_request`, of a request that was sent to it."""
        why = why.partition("; asked again")[0]  # true only until the replica is back
        known = self.failures.get(replica)
        if not of_request:
            self.failures[replica] = Failure(now, why[:MOST_CHARS], why[:MOST_CHARS])
        elif known is not None and known.why_down and now - known.at < AGAIN_SECONDS:
            self.failures[replica] = Failure(now, f"{known.why_down}; then {why}"[:MOST_CHARS], known.why_down)
        else:
            self.failures[replica] = Failure(now, why[:MOST_CHARS])

    def forget(self, replica: str) -> None:
        self.failures.pop(replica, None)

    def to_list(self, most: int) -> list[dict[str, Any]]:
        """Return the last `most` entries, the newest first."""
        return [asdict(entry) for entry in [*self.entries][: -most - 1 : -1]]
