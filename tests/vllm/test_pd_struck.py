"""Engines of two prefillers and two decoders that are killed and stopped at five moments of requests in two legs.

At each moment four requests, two whole and two streams, are in two pairs of engines. The prefiller of one pair and the
decoder of the other are struck at once, so that each request loses one of its engines, and each part of the fleet keeps
one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from ..gateway.running import Running, counted
from ..gateway.test_continue import as_a_whole, events
from .engines import Engine
from .fleet import nothing_left, ready, roles
from .pd import PATIENCE, alone, asked, legs_now, page_of, prompts, said, told, until

pytestmark = [pytest.mark.pd, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]
BEFORE = "before the request"
COMPUTED = "while the prompt is computed"
HANDED_OVER = "when it is handed over"
FETCHED = "while the cache is fetched"
WRITTEN = "while the answer is written"
MOMENTS = (BEFORE, COMPUTED, HANDED_OVER, FETCHED, WRITTEN)
# In which requests are sent until they are at the moment: they may be past it, and pairs whose transfer failed in the
# rounds before are left out for up to 320 s, so that no two pairs without a common engine may be there.
REACHED_SECONDS = 600.0
MOMENT_SECONDS = 60.0  # in which requests that were sent come to the moment, if they do: they may be placed anew before


@dataclass
class Asked:
    """A request, and what came of it so far."""

    path: str
    body: dict
    truth: str
    legs: dict = field(default_factory=dict)  # where it was sent to at first
    writes: str = ""  # the replica whose answer it is
    text: str = ""
    begun: bool = False
    task: asyncio.Task | None = None

    @property
    def stream(self) -> bool:
        return self.body["stream"]

    async def ask(self, fleet: Running) -> None:
        async with fleet.client.stream("POST", self.path, json=self.body, timeout=PATIENCE) as answer:
            self.writes = answer.headers.get("x-hitherto-replica", "")
            async for text in answer.aiter_text():
                self.text += text
                self.begun = True
            assert answer.status_code == 200, self.text

    def is_whole(self) -> bool:
        return told(self.text, self.stream) == self.truth

    def is_broken_off(self) -> bool:
        """Whether it is the beginning of the answer, and says that there is no more."""
        *answer, last = [one for one in events(self.text) if one != "[DONE]"]
        begun = as_a_whole(answer)[0]
        return "error" in last and self.truth.startswith(begun) and begun != ""


class Round:
    """One moment, and one way of striking."""

    def __init__(self, fleet: Running, single: Engine, moment: str, number: int):
        self.fleet, self.single, self.moment, self.number = fleet, single, moment, number
        self.stopped: set[int] = set()
        self.killed: set[int] = set()
        self.struck: set[str] = set()
        self.done = 0.0  # first legs, before the requests were sent
        self.roles: dict[str, list[dict]] = {}

    def signal(self, replicas: list[dict], number: int) -> None:
        """To all processes of these engines."""
        for one in replicas:
            (self.stopped.add if number == signal.SIGSTOP else self.stopped.discard)(one["pid"])
            if number == signal.SIGKILL:
                self.killed.add(one["pid"])
            os.killpg(one["pid"], number)

    def go_on(self) -> None:
        """Whoever was stopped and was not given up meanwhile."""
        while self.stopped:
            with suppress(ProcessLookupError):
                os.killpg(self.stopped.pop(), signal.SIGCONT)

    async def run(self) -> list[Asked]:
        tried_until = time.monotonic() + REACHED_SECONDS
        for attempt in itertools.takewhile(lambda _: time.monotonic() < tried_until, itertools.count()):
            requests = await self.made(attempt)
            self.struck.clear()
            try:
                reached = await self.sent(requests) and await self.at_moment(requests)
                if reached:
                    self.strike(requests)
                else:
                    self.go_on()  # else those that wait for a stopped engine would be given up
                await asyncio.gather(*(one.task for one in requests))
                if reached:
                    return requests
            finally:
                self.go_on()
                for one in requests:
                    if one.task is not None:
                        one.task.cancel()
        raise AssertionError(f"{self.moment}: in {REACHED_SECONDS:g} s no requests were at it in two pairs")

    async def made(self, attempt: int) -> list[Asked]:
        """Two whole ones and two streams, with what they are to be answered."""
        least, most = (6000, 7000) if self.moment == COMPUTED else (120, 700)
        length = 600 if self.moment == WRITTEN else 24
        seed = f"{self.moment} {self.number} {attempt}"
        requests = []
        for at, text in enumerate(prompts(4, seed, least, most)):
            path, body = asked(("chat", "completions")[at // 2], text, at > 1, length)
            body["ignore_eos"] = True
            truth = await alone(self.single, path, body)
            requests.append(Asked(path, body, said(truth, body["stream"])))
        return requests

    async def sent(self, requests: list[Asked]) -> bool:
        """Send them, and whether two of them share no engine. Each waits until the one before is placed, so that each
        of two engines gets every other one."""
        self.roles = await roles(self.fleet)
        self.done = await self.legs_done()
        if self.moment == BEFORE:
            first = await self.legs_of(requests[0])
            other = next(one["id"] for one in self.roles["decode"] if one["id"] != first["decode"])
            self.strike_at(first["prefill"], other)
        elif self.moment in (HANDED_OVER, FETCHED):
            self.signal(self.roles["decode"], signal.SIGSTOP)
        for one in requests:
            if self.moment != BEFORE:
                one.legs = await self.legs_of(one)
            before = await self.fleet.counted("hitherto_leg_choices_total")
            one.task = asyncio.create_task(one.ask(self.fleet))
            await until(lambda before=before: self.placed_since(before))
        return self.moment == BEFORE or self.second(requests) is not None

    async def at_moment(self, requests: list[Asked]) -> bool:
        """Whether all come to be at the moment, which those that were sent may be past, or never come to."""
        with suppress(TimeoutError):
            if self.moment == COMPUTED:
                await until(self.computes, MOMENT_SECONDS)
                if await self.legs_done() != self.done:
                    return False
            if self.moment in (HANDED_OVER, FETCHED):
                await until(lambda: self.have_done(self.done + 4), MOMENT_SECONDS)
            if self.moment == FETCHED:
                self.signal(self.roles["prefill"], signal.SIGSTOP)
                self.signal(self.roles["decode"], signal.SIGCONT)
                await until(lambda: self.fetches(requests), MOMENT_SECONDS)
            if self.moment == WRITTEN:
                await until(lambda: self.have_begun(requests[2:]), MOMENT_SECONDS)
            return self.moment == BEFORE or not any(one.task.done() for one in requests)
        return False

    async def legs_of(self, one: Asked) -> dict:
        """Where it would go now. Pairs whose transfer failed, in the round before, are left out for a while."""
        return await until(lambda: legs_now(self.fleet, one.path, one.body))

    async def placed_since(self, before: float) -> bool:
        return await self.fleet.counted("hitherto_leg_choices_total") > before

    async def legs_done(self) -> float:
        return await self.fleet.counted("hitherto_legs_total", leg="prefill", outcome="complete")

    async def have_done(self, count: float) -> bool:
        return await self.legs_done() == count

    async def computes(self) -> bool:
        """Whether each prefiller has a request, or a leg is done: then they are past it."""
        return await self.legs_done() != self.done or await self.at_all("prefill", "num_requests_running")

    async def have_begun(self, streams: list[Asked]) -> bool:
        """Whether each has text; one that ended without any says why."""
        for one in streams:
            if one.task.done() and not one.begun:
                await one.task
        return all(one.begun for one in streams)

    async def fetches(self, requests: list[Asked]) -> bool:
        """Whether each decoder has a request. One that is answered is past it, and no decoder may have one any more."""
        gauges = ("num_requests_waiting", "num_requests_running")
        return any(one.task.done() for one in requests) or await self.at_all("decode", *gauges)

    async def at_all(self, role: str, *gauges: str) -> bool:
        """Whether each engine of the role has a request that one of the gauges counts."""
        pages = [await page_of(one["url"]) for one in self.roles[role]]
        return all(sum(counted(page, f"vllm:{name}") for name in gauges) > 0 for page in pages)

    def strike(self, requests: list[Asked]) -> None:
        """The prefiller of the first request, and the decoder of one that is computed elsewhere; those that were only
        held up until now go on."""
        if self.moment != BEFORE:
            self.strike_at(requests[0].legs["prefill"], self.second(requests))
        held = [one for one in itertools.chain(*self.roles.values()) if one["pid"] in self.stopped]
        self.signal([one for one in held if one["id"] not in self.struck], signal.SIGCONT)

    def second(self, requests: list[Asked]) -> str | None:
        """The decoder of requests that share neither engine with the first one."""
        first = requests[0].legs
        others = (one.legs for one in requests if one.legs["prefill"] != first["prefill"])
        return next((legs["decode"] for legs in others if legs["decode"] != first["decode"]), None)

    def strike_at(self, *ids: str) -> None:
        self.struck = set(ids)
        self.signal([one for one in itertools.chain(*self.roles.values()) if one["id"] in ids], self.number)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_no_request_that_had_not_begun_is_lost_with_an_engine(fleet: Running, single, number, moment):
    await ready(fleet)
    found = Round(fleet, single, moment, number)
    for at, one in enumerate(await found.run()):
        had_begun = moment == WRITTEN and one.stream and one.writes in found.struck
        if had_begun:
            assert one.is_broken_off(), (at, one)
        else:
            assert one.is_whole(), (at, one)
    await ready(fleet, found.killed)
    await nothing_left(fleet)
