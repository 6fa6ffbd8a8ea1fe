"""Background work that must not end unnoticed: loops that are restarted after a failure, and a record of failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any

log = logging.getLogger("hitherto.background")

PAUSE_SECONDS = 1.0  # before a loop that failed is started again
RECENT_SECONDS = 300.0  # how long a failure is shown to operators
LOG_SECONDS = 10.0  # between two logged tracebacks of one kind of work; failures in between are only counted


@dataclass(slots=True)
class Failures:
    """The failures of one kind of work, such as one background loop."""

    count: int = 0
    last: str = ""  # description of the last failure
    at: float = 0.0  # time of the last failure, monotonic
    logged_at: float = float("-inf")  # time when a failure was last logged, monotonic


class FaultRecord:
    """A record of failures, for work that continues after a failure.

    `failures` has an entry for every kind of work, failed or not, so that each kind's counter exists from the start.
    """

    def __init__(self) -> None:
        self.failures: dict[str, Failures] = {}

    def count(self, kind: str, last: str) -> Failures:
        """Count a failure of this kind of work, described by `last`, and return the failures of that kind."""
        failures = self.failures.setdefault(kind, Failures())
        failures.count += 1
        failures.last, failures.at = last, monotonic()
        return failures

    @property
    def counts(self) -> dict[str, int]:
        """The number of failures by kind of work, for /metrics."""
        return {kind: one.count for kind, one in self.failures.items()}

    def recent(self) -> dict[str, dict[str, Any]]:
        """Return the kinds of work that failed in the last RECENT_SECONDS, for /status and `hitherto doctor`."""
        now = monotonic()
        return {
            kind: {"failures": one.count, "last": one.last, "seconds_ago": round(now - one.at, 1)}
            for kind, one in self.failures.items()
            if one.count and now - one.at < RECENT_SECONDS
        }


class Background(FaultRecord):
    """The background tasks of one gateway, each restarted when it fails."""

    def spawn(
        self, kind: str, work: Callable[[], Coroutine[Any, Any, None]], *, on_failure: Callable[[], None] = lambda: None
    ) -> asyncio.Task[None]:
        """Start a task that runs `work`, and runs it again whenever it ends or fails, until the task is cancelled.

        `kind`: the name under which failures are counted. `on_failure`: called after each failure, before the restart.
        Returns the task.
        """

        async def keep_running() -> None:
            while not task.cancelling():
                try:
                    await work()
                except Exception as error:
                    self.failed(kind, error)
                    try:
                        on_failure()
                    except Exception as another:
                        self.failed(kind, another)
                await asyncio.sleep(PAUSE_SECONDS)

        self.failures.setdefault(kind, Failures())
        task = asyncio.create_task(keep_running(), name=kind)
        return task

    def failed(self, kind: str, error: BaseException, subject: str = "") -> None:
        """Count and log a failure of background work.

        `kind`: the kind of work, under which the failure is counted. `subject`: the thing that the work was for, such
        as a replica's id, where one kind of work serves several.
        """
        failures = self.count(kind, f"{subject}: {_describe(error)}" if subject else _describe(error))
        if failures.at - failures.logged_at > LOG_SECONDS:
            failures.logged_at = failures.at
            log.error(
                "%s failed and is started again (failure %d): %s", kind, failures.count, failures.last, exc_info=error
            )


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
