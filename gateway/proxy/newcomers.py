"""Models that no replica is known to serve: before a client is told so, the engines are asked.

What an engine serves is looked at every 10 s, and an adapter can be loaded at any time. A 404 is final to clients, so
none is given for what was loaded before the request came. Who asks for names that do not exist shall not keep the
engines busy with it: all that come meanwhile share the next question, and questions keep their distance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("hitherto.proxy")

PAUSE_SECONDS = 1.0  # between two questions


class Newcomers:
    """`ask`: asks all engines what they serve, and returns when that is known."""

    def __init__(self, ask: Callable[[], Awaitable[None]]):
        self._ask = ask
        self._next: asyncio.Future[None] | None = None  # what those wait for who came since the last question
        self._asking: asyncio.Task[None] | None = None

    async def asked(self) -> None:
        """Returns when engines were asked that had heard of no question before this call."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._asking is None:
            self._asking = asyncio.create_task(self._go_on())
        await asyncio.shield(self._next)

    async def _go_on(self) -> None:
        while self._next is not None:
            told, self._next = self._next, None
            try:
                await self._ask()
            except Exception:  # they wait for an answer, and 404 is one
                log.exception("asking the engines for a model failed")
            told.set_result(None)
            await asyncio.sleep(PAUSE_SECONDS)
        self._asking = None
