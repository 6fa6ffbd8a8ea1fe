"""The refresh of the engines' model lists before a client gets 404 for a model that no replica is known to serve.

Model lists are read every 10 s, but a LoRA adapter can be loaded at any time. A 404 is final to clients, so a request
for an adapter that was just loaded must not get one. Requests for names that do not exist must not keep the engines
busy. So all requests that come during a refresh wait together for the next one, and one refresh begins at least a
second after the end of another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("hitherto.proxy")

PAUSE_SECONDS = 1.0  # between two refreshes


class ModelRefresh:
    """A refresh of the engines' model lists that all waiting requests share.

    `ask`: reads the model lists of all engines.
    """

    def __init__(self, ask: Callable[[], Awaitable[None]]):
        self._ask = ask
        self._next: asyncio.Future[None] | None = None  # the next refresh, for which requests wait
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Wait for a refresh of the model lists that begins after this call."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._asking is None:
            self._asking = asyncio.create_task(self._go_on())
        await asyncio.shield(self._next)

    async def _go_on(self) -> None:
        """Refresh the model lists until no request waits for that, with `PAUSE_SECONDS` (1 s) between two refreshes."""
        while self._next is not None:
            told, self._next = self._next, None
            try:
                await self._ask()
            except Exception:  # the waiting requests go on, and may get 404
                log.exception("asking the engines for a model failed")
            told.set_result(None)
            await asyncio.sleep(PAUSE_SECONDS)
        self._asking = None
