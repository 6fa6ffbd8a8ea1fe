"""Events that an engine hands out over HTTP when it is asked: in the place of a subscription.

Each answer is a batch, and is numbered here: whether events are missing is for whoever decodes them to see. What an
answer held nobody gets again, so there may be one reader only.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import aiohttp

SECONDS = 0.1  # between an answer with events and the next question ...
IDLE_SECONDS, BROKEN_SECONDS = 0.25, 1.0  # ... one without, and none at all
ANSWER_SECONDS = 5.0  # an engine may wait for events before it says that there are none
EMPTY = b"[]"
MOST_WAITING = 64  # answers that nobody has taken yet; then no more are asked for


class PolledInbox:
    """As `Inbox`: `linked` while the engine answers, `refused` once it has not."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.linked = self.refused = False
        self._url, self._headers = url, headers
        self._changed = asyncio.Event()
        self._messages: list[list[bytes]] = []
        self._number = 0
        self._asking = asyncio.get_running_loop().create_task(self._ask())

    def close(self) -> None:
        self._asking.cancel()

    def look(self) -> None:
        """Nothing to do: `linked` and `refused` are up to date."""

    def take(self) -> list[list[bytes]]:
        taken, self._messages = self._messages, []
        return taken

    async def changed(self, seconds: float) -> None:
        """Return when messages may have come or `wake` was called, at the latest in time."""
        alarm = asyncio.get_running_loop().call_later(seconds, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            alarm.cancel()
        self._changed.clear()

    def wake(self) -> None:
        self._changed.set()

    async def _ask(self) -> None:
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(ANSWER_SECONDS), headers=self._headers
        ) as session:
            while True:
                pause = IDLE_SECONDS
                if len(self._messages) < MOST_WAITING:
                    pause = await self._asked(session)
                await asyncio.sleep(pause)

    async def _asked(self, session: aiohttp.ClientSession) -> float:
        """Seconds until the next question."""
        try:
            async with session.post(self._url) as response:
                payload = await response.read()
                well = response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            well, payload = False, b""
        if self.linked != well or not well:
            self.linked, self.refused = well, not well
            self._changed.set()
        if not well:
            return BROKEN_SECONDS
        if payload.strip() == EMPTY:
            return IDLE_SECONDS
        self._messages.append([b"", self._number.to_bytes(8, "big"), payload])
        self._number += 1
        self._changed.set()
        return SECONDS


@contextmanager
def polled(url: str, headers: Mapping[str, str] | None = None) -> Iterator[PolledInbox]:
    inbox = PolledInbox(url, headers)
    try:
        yield inbox
    finally:
        inbox.close()
