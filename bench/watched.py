"""The gateway with its event loop watched: `python -m bench.watched FILE serve ...`.

A timer of 1 ms runs in the gateway's own loop. How late it comes is how long anything else would have waited: for
callbacks to end (`work`: what the loop's thread computed between two ticks), or for a thread to give up the
interpreter. On a machine that others use, part of that is the kernel's: what this thread waited for a core (schedstat)
is taken off, so that `own` is the gateway's doing, and what the hypervisor takes away. SIGUSR1 writes what was seen
since the last one to FILE; SIGUSR2 makes the allocator give back what it keeps of freed memory.
The timer takes 1 % of a core.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path
from time import perf_counter_ns, thread_time_ns

from gateway import app, cli

TICK = 1_000_000  # ns


class Watch:
    def __init__(self, file: Path):
        self.file = file
        self.queue = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self.loop = asyncio.get_running_loop()
        self.begin()
        self.tick()

    def begin(self) -> None:
        # ns: all of it, what of it was not waiting for a core, work since the last tick
        self.late: list[tuple[int, int, int]] = []
        self.at, self.queued, self.worked = perf_counter_ns(), self.waited(), thread_time_ns()

    def waited(self) -> int:
        """ns this thread was ready to run and had no core."""
        return int(os.pread(self.queue, 64, 0).split()[1])

    def tick(self) -> None:
        now, queued, worked = perf_counter_ns(), self.waited(), thread_time_ns()
        late = now - self.at - TICK
        self.late.append((late, late - (queued - self.queued), worked - self.worked))
        self.at, self.queued, self.worked = now, queued, worked
        self.loop.call_later(TICK / 1e9, self.tick)

    def tell(self) -> None:
        found = {}
        for name, column in zip(("all", "own", "work"), zip(*self.late, strict=True), strict=True):
            ms = sorted(max(one, 0) / 1e6 for one in column)
            found[name] = {"p99": ms[int(0.99 * len(ms))], "p999": ms[int(0.999 * len(ms))], "max": ms[-1],
                           "above_5": sum(one > 5 for one in ms), "ticks": len(ms)}  # fmt: skip
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.rename(self.file)
        self.begin()


class Watched(app.Gateway):
    async def start(self) -> None:
        await super().start()
        watch = Watch(Path(sys.argv[0]))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, watch.tell)
        loop.add_signal_handler(signal.SIGUSR2, lambda: ctypes.CDLL(None).malloc_trim(0))


if __name__ == "__main__":
    sys.argv = sys.argv[1:]  # [0] is FILE
    app.Gateway = Watched
    sys.exit(cli.main())
