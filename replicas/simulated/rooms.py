"""Rooms in which two engines meet while both have a request: the one that fetches its prompt waits at the one that
computes it, as with Mooncake's connector in vLLM and in SGLang.

The wire is this engine's own: the one that fetches asks the other over HTTP, and is answered once the prompt is there.
A connection that is closed before tells the other side that nobody waits any more. What is open is bounded by time
alone, as there.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from .transfers import TOKEN_SECONDS, NotThere

PATIENCE = 300.0  # s, of SGLang; Mooncake's connector waits for 480
Prompts = list[tuple[int, int]]  # of each sequence: its tokens, and how many were found cached


class Room:
    def __init__(self) -> None:
        self.come, self.left = asyncio.Event(), asyncio.Event()  # of the one that fetches
        self.taken = asyncio.Event()
        self.computed: asyncio.Future[Prompts] = asyncio.get_running_loop().create_future()


class Rooms:
    """Those of an engine that computes prompts, by name."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._open: dict[str, Room] = {}

    @property
    def open(self) -> int:
        return len(self._open)

    def _enter(self, name: str) -> Room:
        room = self._open.get(name)
        if room is None:
            room = self._open[name] = Room()
        return room

    def _close(self, name: str) -> None:
        if (room := self._open.pop(name, None)) is not None and not room.computed.done():
            room.computed.cancel()

    async def compute(self, name: str, waits: bool, computing: Callable[[], Awaitable[Prompts | None]]) -> None:
        """Compute a prompt for whoever fetches it in this room. `waits`: not before somebody does, and until it has it;
        else it is kept for that one. None as the result: it is not kept. Raises NotThere if nobody comes or stays."""
        room, kept = self._enter(name), False
        tasks = [asyncio.ensure_future(room.left.wait())] if waits else []
        try:
            if waits:
                await self._within(room.come.wait())
            task = asyncio.ensure_future(computing())
            tasks.append(task)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise NotThere
            prompts = task.result()
            if prompts is None or room.computed.cancelled():
                return
            room.computed.set_result(prompts)
            if waits:
                await self._within(room.taken.wait())
            else:
                kept = True
                asyncio.get_running_loop().call_later(self.patience, self._close, name)
        finally:
            for one in tasks:
                one.cancel()
            if not kept:
                self._close(name)

    async def hand_over(self, name: str) -> Prompts:
        """What was computed in this room, once it is. Raises NotThere."""
        room = self._enter(name)
        room.come.set()
        try:
            prompts = await self._within(asyncio.shield(room.computed))
            await asyncio.sleep(sum(tokens for tokens, _ in prompts) * TOKEN_SECONDS)
            room.taken.set()
            return prompts
        except asyncio.CancelledError as cancelled:
            if room.computed.cancelled():
                raise NotThere from cancelled
            raise
        finally:
            room.left.set()
            self._close(name)

    async def _within(self, awaited: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(awaited, self.patience)
        except TimeoutError:
            raise NotThere from None

    async def fetch(self, address: str, name: str) -> Prompts:
        """Wait in the other engine's room for what it computes. Raises NotThere."""
        timeout = aiohttp.ClientTimeout(self.patience)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"http://{address}/rooms/{name}") as answer,
            ):
                if answer.status != 200:
                    raise NotThere
                return [(tokens, cached) for tokens, cached in await answer.json()]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise NotThere from error
