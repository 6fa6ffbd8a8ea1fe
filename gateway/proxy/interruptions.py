"""A line of the log for each stream that broke off and was gone on with, as long as those are few."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import NamedTuple

log = logging.getLogger("hitherto.proxy")

LOG_SECONDS = 10.0  # in which so many streams get a line each; all others of a replica's share one
MOST_LINES = 10
LONGEST_ID = 200  # characters; it is the client's


class Interruption(NamedTuple):
    """`replica`: the one that broke off. `received`: what the client has, in words."""

    stream: str
    replica: str
    why: str
    received: str

    def __str__(self) -> str:
        return (
            f"stream {self.stream[:LONGEST_ID]} of replica {self.replica} broke off behind {self.received}: {self.why}"
        )


class Interruptions:
    """An engine that dies has hundreds of streams."""

    def __init__(self) -> None:
        self._lines = 0
        self._others: Counter[str] = Counter()  # streams without a line of their own, by the replica that broke off
        self._timer: asyncio.TimerHandle | None = None

    def over(self, what: Interruption, how: str) -> None:
        """`how` it went on."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOG_SECONDS, self._time_passed)
        if self._lines < MOST_LINES:
            self._lines += 1
            log.info("%s; %s", what, how)
        else:
            self._others[what.replica] += 1

    def _time_passed(self) -> None:
        for replica, count in self._others.items():
            log.info("%d more streams of replica %s broke off and were gone on with in these %g s",
                     count, replica, LOG_SECONDS)  # fmt: skip
        self._timer, self._lines = None, 0
        self._others.clear()
