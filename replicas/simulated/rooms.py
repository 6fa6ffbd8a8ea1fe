"""Rooms in which two engines meet while both have a request: the one that fetches its prompt waits at the one that
computes it, as with Mooncake's connector in vLLM.

The wire is this engine's own: the one that fetches asks the other over HTTP, and is answered once the prompt is there.
What is open is bounded by time alone, as there.
"""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from .transfers import TOKEN_SECONDS, NotThere

PATIENCE = 480.0  # s, of Mooncake's connector
Prompts = list[tuple[int, int]]  # of each sequence: its tokens, and how many were found cached


class Rooms:
    """The rooms of an engine that computes prompts, by name; in each of them is what is going to be computed."""

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
        """Compute a prompt and keep it for whoever fetches it in this room. None as the result: it is not kept."""
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
        """What was computed in this room, once it is. Raises NotThere."""
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
        """Wait in the other engine's room for what it computes. Raises NotThere."""
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
