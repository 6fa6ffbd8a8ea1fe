"""Injected faults: POST /faults makes the engine fail in the ways real ones do, to test what is in front of it."""

import asyncio
import os
import random
import time

from .publisher import Publisher
from .runner import Runner
from .tokens import RequestError

KINDS = {
    "die": "true: the process exits at once, as if killed",
    "hang": "seconds for which nothing is answered and no step is done",
    "slow": "every step takes so many times as long, until set back to 1",
    "error_503": "the next n requests are answered 503, as by an engine whose queue is full",
    "error_500": "the next n requests are answered 500",
    "error_stream": "the next n streams are answered 200 with an error event and no token",
    "error_mid_stream": "the next n streams have an error event after their second token",
    "error_share": "this share of requests (0 to 1) fails at once: streams as with error_stream, others with 500",
    "refuse": "the next n requests are cut off without an answer",
    "die_mid_stream": "the next n streams are cut off after their second token",
    "drop_events": "the next n event batches are not sent; they can be replayed",
    "reorder_events": "the next n event batches are each sent after the one that follows",
    "mute_events": "true: no events at all any more, and no gap that would show it; false: again",
}


class Faults:
    """The faults that are still to happen. Each fault that happens lowers its count by one."""

    def __init__(self, runner: Runner, publisher: Publisher | None):
        self._runner, self._publisher = runner, publisher
        self.counts = dict.fromkeys(
            ("error_503", "error_500", "error_stream", "error_mid_stream", "refuse", "die_mid_stream"), 0
        )
        self.error_share = 0.0
        self._dice = random.Random(0)

    def order(self, body: dict) -> dict:
        """Set the faults named in `body`; others stay. Raises RequestError, and sets none, if one is invalid."""
        for name, value in body.items():
            if name not in KINDS:
                raise RequestError(f"unknown fault {name!r}; known are {', '.join(KINDS)}")
            if not self._fits(name, value):
                raise RequestError(f"{name}: {KINDS[name]}; not {value!r}")
            if name in ("drop_events", "reorder_events", "mute_events") and self._publisher is None:
                raise RequestError(f"{name}: this engine publishes no events")
        for name, value in body.items():
            self._set(name, value)
        return self.state()

    @staticmethod
    def _fits(name: str, value) -> bool:
        if name in ("die", "mute_events"):
            return isinstance(value, bool)
        if isinstance(value, bool) or not isinstance(
            value, int | float if name in ("hang", "slow", "error_share") else int
        ):
            return False
        if name == "error_share":
            return 0 <= value <= 1
        return value > 0 if name == "slow" else value >= 0

    def _set(self, name: str, value) -> None:
        if name == "die" and value:
            os._exit(137)
        elif name == "hang":
            self._runner.hang_until = time.monotonic() + value
        elif name == "slow":
            self._runner.slow = float(value)
        elif name == "error_share":
            self.error_share = float(value)
        elif name == "drop_events":
            self._publisher.drop = value
        elif name == "reorder_events":
            self._publisher.swap = value
        elif name == "mute_events":
            self._publisher.mute = value
        elif name in self.counts:
            self.counts[name] = value

    def state(self) -> dict:
        publisher = self._publisher
        return {
            "hang": max(0.0, self._runner.hang_until - time.monotonic()),
            "slow": self._runner.slow,
            "error_share": self.error_share,
            **self.counts,
            "drop_events": publisher.drop if publisher else 0,
            "reorder_events": publisher.swap if publisher else 0,
            "mute_events": publisher.mute if publisher else False,
            "cached_blocks": self._runner.engine.cached_blocks,
            "event_batches": publisher.sequence if publisher else 0,  # published so far, including those with a fault
        }

    def happens(self, name: str) -> bool:
        """Return whether a fault of this kind is due now, and count it down."""
        due = self.counts[name] > 0
        self.counts[name] -= due
        return due

    def strikes(self) -> bool:
        """Return whether this request belongs to the share that fails."""
        return self.error_share > 0 and self._dice.random() < self.error_share

    async def hang(self) -> None:
        while (left := self._runner.hang_until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.05))
