"""Sleeps that are accurate to a tenth of a millisecond.

Event loops' timers count whole milliseconds, and a step of an engine may take two: with uvloop's timer a profile's
1.9 ms between tokens came out as 1, 2 or 3 ms. A Linux timerfd has a finer resolution, and the loop watches it like any
file. On other systems the loop's timer is used.
"""

import asyncio
import ctypes
import os
import struct
import sys
import time

_MONOTONIC, _FLAGS, _ABSOLUTE = 1, os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0), 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Alarm:
    """A timer for one sleeping task at a time; `wake` ends the sleep early if the sleeper allows it."""

    def __init__(self):
        self._fd = _libc.timerfd_create(_MONOTONIC, _FLAGS) if _libc else -1
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # where there is no timerfd
        self._ring: asyncio.Future | None = None
        self._disturbed = False
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._rang)

    def wake(self) -> None:
        """End the present sleep if `until` was called with `disturbed`; else do nothing."""
        if self._disturbed and not self._ring.done():
            self._ring.set_result(None)

    async def until(self, when: float | None, disturbed: bool = False) -> None:
        """Sleep until `when`, in seconds of time.monotonic(); None: without end.

        `disturbed`: a call of `wake` may end the sleep early.
        """
        if when is not None and when <= time.monotonic():
            await asyncio.sleep(0)  # let other tasks run
            return
        self._ring, self._disturbed = self._loop.create_future(), disturbed
        if when is not None:
            self._set(when)
        try:
            await self._ring
        finally:
            self._disturbed = False
            if when is not None and time.monotonic() < when:
                self._set(0.0)  # otherwise it would end a later sleep

    def _set(self, when: float) -> None:
        """Set the timer to end the sleep at `when`, by time.monotonic(); 0 turns it off."""
        if self._fd >= 0:
            seconds = int(when)
            once = struct.pack("qqqq", 0, 0, seconds, int((when - seconds) * 1e9))
            _libc.timerfd_settime(self._fd, _ABSOLUTE, once, None)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(when - time.monotonic(), self._rang) if when else None

    def _rang(self) -> None:
        if self._fd >= 0:
            try:
                os.read(self._fd, 8)
            except BlockingIOError:
                return
        if self._ring is not None and not self._ring.done():
            self._ring.set_result(None)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
