"""Rooms in which two engines meet, as with Mooncake's connector in vLLM.

Both have a request at the same time: the decoding engine waits at the one that computes its prompt. The protocol is
this engine's own: the decoding engine posts to the other over HTTP, which answers once the prompt is computed. Open
rooms are limited by time alone, as in Mooncake.
"""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from .transfers import TOKEN_SECONDS, NotThere

PATIENCE = 480.0  # s, from Mooncake's connector
Prompts = list[tuple[int, int]]  # for each sequence: its tokens, and how many were found cached


class Rooms:
    """The rooms of an engine that computes prompts, by name, each with the prompts to be computed."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[Prompts]] = {}

    @property
    def open(self) -> int:
        return len(self._open)

    def _enter(self, name: str) -> asyncio.Future[Prompts]:
        if name not in self._open:
            self._open[name] = asyncio.get_running_loop().create_future()
        return self._open[name]

    def _close(self, name: str) -> None:
        if (computed := self._open.pop(name, None)) is not None:
            computed.cancel()

    async def compute(self, name: str, computing: Callable[[], Awaitable[Prompts | None]]) -> None:
        """Compute a prompt and keep it for the engine that fetches it in this room; None means that it is not kept."""
        computed, kept = self._enter(name), False
        try:
            prompts = await computing()
            if kept := prompts is not None and not computed.cancelled():
                computed.set_result(prompts)
                asyncio.get_running_loop().call_later(PATIENCE, self._close, name)
        finally:
            if not kept:
                self._close(name)

    async def hand_over(self, name: str) -> Prompts:
        """Return what was computed in this room, once it is. Raises NotThere."""
        computed = self._enter(name)
        try:
            prompts = await asyncio.wait_for(asyncio.shield(computed), PATIENCE)
            await asyncio.sleep(sum(tokens for tokens, _ in prompts) * TOKEN_SECONDS)
            return prompts
        except TimeoutError:
            raise NotThere from None
        except asyncio.CancelledError as cancelled:
            if computed.cancelled():
                raise NotThere from cancelled
            raise
        finally:
            self._close(name)

    async def fetch(self, address: str, name: str) -> Prompts:
        """Wait in the other engine's room for the prompts that it computes. Raises NotThere."""
        timeout = aiohttp.ClientTimeout(PATIENCE)
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
