"""Events that an engine hands out over HTTP when it is asked: in the place of a subscription.

Each answer is a batch, and is numbered here: whether events are missing is for whoever decodes them to see. What an
answer held nobody gets again, so there may be one reader only.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp

SECONDS = 0.1  # between an answer with events and the next question ...
IDLE_SECONDS, BROKEN_SECONDS = 0.25, 1.0  # ... one without, and none at all
ANSWER_SECONDS = 5.0  # an engine may wait for events before it says that there are none
EMPTY = b"[]"
MANY_SKIPS, SKIPS_SECONDS = 3, 300.0  # a busy engine's buffer overflows now and then
MOST_WAITING = 64  # answers that nobody has taken yet; then no more are asked for


class PolledInbox:
    """As `Inbox`: `linked` while the engine answers, `refused` once it has not, and `why` then."""

    def __init__(self, url: str, session: Callable[[], aiohttp.ClientSession]) -> None:
        """`session` makes one that reaches the engine as everything else does that asks it."""
        self.linked = self.refused = False
        self.why = "it has not answered yet"
        self._url, self._session = url, session
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
        while True:  # with a new session after each failure: the engine may have another address by then
            async with self._session() as session:
                while (pause := await self._asked(session)) is not None:
                    await asyncio.sleep(pause)
            await asyncio.sleep(BROKEN_SECONDS)

    async def _asked(self, session: aiohttp.ClientSession) -> float | None:
        """Seconds until the next question; None: it failed."""
        if len(self._messages) >= MOST_WAITING:
            return IDLE_SECONDS
        why, payload = "", b""
        try:
            async with session.post(
                self._url, timeout=aiohttp.ClientTimeout(ANSWER_SECONDS), allow_redirects=False
            ) as response:
                payload = await response.read()
                if response.status != 200:
                    why = f"it answers with status {response.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            why = _in_words(error)
        if self.linked == bool(why) or why:
            self.linked, self.refused, self.why = not why, bool(why), why
            self._changed.set()
        if why:
            return None
        if payload.strip() == EMPTY:
            return IDLE_SECONDS
        self._messages.append([b"", self._number.to_bytes(8, "big"), payload])
        self._number += 1
        self._changed.set()
        return SECONDS


class Skips:
    """When events were missing: so many so soon after one another are another reader's, or too many for the engine."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=MANY_SKIPS)

    def note(self, now: float) -> None:
        self._at.append(now)

    def problem(self, now: float) -> str:
        if len(self._at) < MANY_SKIPS or now - self._at[0] > SKIPS_SECONDS:
            return ""
        return (
            f"KV events were missing {MANY_SKIPS} times within {SKIPS_SECONDS:g} s, and its map was emptied each time: "
            "something else fetches them too, or its buffer is too small. Give all gateways one Redis (redis_url) and "
            "leave event_intake at `leased`, let no script fetch them, or raise the engine's event_buffer_max_size"
        )


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER_SECONDS:g} s"
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return "nothing listens there"
    return str(error) or type(error).__name__


@contextmanager
def polled(url: str, session: Callable[[], aiohttp.ClientSession]) -> Iterator[PolledInbox]:
    inbox = PolledInbox(url, session)
    try:
        yield inbox
    finally:
        inbox.close()
