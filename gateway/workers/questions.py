"""What the admin side asks of workers: a worker knows what loads cost, since that is learned where requests are answered."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..dispatch.decisions import unknown
from ..dispatch.life import Failure
from ..prompt import PromptError

if TYPE_CHECKING:
    from .control import Workers
    from .member import Member

ANSWER_SECONDS = 30.0
COSTS_SECONDS = 5.0
MOST_REPLICAS = 200  # whose own speeds go with a worker's first message, which has 64 KiB


class Questions:
    """Asked in the control process and answered by one worker; decisions as `dispatch.decisions.Decisions`."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self._numbers, self._turns = itertools.count(), itertools.count()
        self._waiting: dict[int, tuple[Member, asyncio.Future[dict[str, Any]]]] = {}

    async def explain(self, path: str, body: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
        return await self._ask(self._any(), "explain", body, path=path, headers=headers)

    async def decide(self, path: str, body: bytes, headers: Mapping[str, str], exclude: Sequence[str], lease: float) -> dict[str, Any]:
        return await self._ask(self._any(), "decide", body, path=path, headers=headers, exclude=exclude, lease=lease)

    async def first_byte(self, id: str) -> dict[str, Any]:
        return await self._ask(self._whose(id), "first_byte", b"", id=id)

    async def done(self, id: str, answer: bytes) -> dict[str, Any]:
        return await self._ask(self._whose(id), "done", answer, id=id)

    async def costs(self) -> dict[str, Any] | None:
        """What some worker has learned, for one that is new. None if there is no other, or it does not answer."""
        with contextlib.suppress(Failure, TimeoutError):
            async with asyncio.timeout(COSTS_SECONDS):
                costs = await self._ask(self._any(), "costs", b"")
                return costs if len(costs["replicas"]) <= MOST_REPLICAS else {**costs, "replicas": {}}
        return None

    def _any(self) -> Member:
        """They take turns."""
        live = self._workers.live
        if not live:
            raise Failure(503, "no worker is ready")
        return live[next(self._turns) % len(live)]

    def _whose(self, id: str) -> Member:
        """The worker that made this decision; what it counted went with it if it ended."""
        member = next((one for one in self._workers.live if id.startswith(mark(one.index))), None)
        if member is None:
            raise unknown(id)
        return member

    async def _ask(self, member: Member, what: str, body: bytes, **arguments: Any) -> dict[str, Any]:
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = member, future
        _send(member, number, what, body, arguments)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await future
        except TimeoutError:
            raise Failure(503, "the worker that was asked gave no answer") from None
        finally:
            self._waiting.pop(number, None)
        if "prompt_error" in answer:
            raise PromptError(*answer["prompt_error"])
        if "failure" in answer:
            raise Failure(*answer["failure"][:2], **answer["failure"][2])
        return answer["told"]

    def answered(self, member: Member, number: int, answer: dict[str, Any]) -> None:
        _, future = self._waiting.get(number, (None, None))
        if future is not None and not future.done():
            future.set_result(answer)
        elif "candidates" in (told := answer.get("told") or {}):  # a decision for somebody who has left: nobody would end it
            _send(member, next(self._numbers), "done", b"", {"id": told["id"]})

    def ended(self, member: Member) -> None:
        """It answers nothing any more."""
        for whose, future in self._waiting.values():
            if whose is member and not future.done():
                future.set_exception(Failure(503, "the worker that was asked has ended; ask again"))


def _send(member: Member, number: int, what: str, body: bytes, arguments: Mapping[str, Any]) -> None:
    member.channel.send({"do": "ask", "number": number, "what": what, "body": body.decode("latin-1"), "arguments": arguments})


def mark(index: int) -> str:
    """How the ids of a worker's decisions begin."""
    return f"{index}-"
