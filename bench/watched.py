"""The gateway with its event loop watched: `python -m bench.watched FILE serve ...`.

A timer of 1 ms runs in the gateway's own loop. How late it comes is how long anything else would have waited: for a
callback to end, or for a thread to give up the interpreter. On a machine that others use, part of that is the kernel's:
what this thread waited for a core (schedstat) is taken off, so that `own` is the gateway's doing. SIGUSR1 writes what was
seen since the last one to FILE. The timer takes 1 % of a core.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from time import perf_counter_ns

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
        self.late: list[tuple[int, int]] = []  # ns: all of it, and what of it was not waiting for a core
        self.at, self.queued = perf_counter_ns(), self.waited()

    def waited(self) -> int:
        """ns this thread was ready to run and had no core."""
        return int(os.pread(self.queue, 64, 0).split()[1])

    def tick(self) -> None:
        now, queued = perf_counter_ns(), self.waited()
        late = now - self.at - TICK
        self.late.append((late, late - (queued - self.queued)))
        self.at, self.queued = now, queued
        self.loop.call_later(TICK / 1e9, self.tick)

    def tell(self) -> None:
        found = {}
        for name, column in zip(("all", "own"), zip(*self.late, strict=True), strict=True):
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
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, watch.tell)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]  # [0] is FILE
    app.Gateway = Watched
    sys.exit(cli.main())
