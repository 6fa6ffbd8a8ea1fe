"""A load spread over several processes, for when one core is not enough to send it.

Of n processes each gets every n-th conversation with its start time and sends its share as `drive.run` does. All begin
at one moment of the machine's monotonic clock, which processes share, so that their records can be merged. Messages
between parent and child are pickles preceded by their length: the child gets its share, the moment to begin and perhaps
a stop; it sends its records a few times a second.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
import sys
from dataclasses import dataclass, replace
from time import perf_counter

import uvloop

from loadgen.drive.client import Client
from loadgen.drive.records import Load, Record
from loadgen.drive.run import Asking, Run
from loadgen.options import Failed
from loadgen.workload.conversations import Workload

_LENGTH = struct.Struct("!Q")
_REPORT_SECONDS = 0.25
_HEAD_START_SECONDS = 0.2  # for the message to reach every process before the first request is due


class ProcessFailed(Failed):
    """A process of the generator ended unexpectedly, and its unsent records are lost."""


@dataclass(slots=True)
class Share:
    """One process's share of the load, and how it sends it."""

    load: Workload
    base_url: str
    headers: dict[str, str]
    timeout: float
    asking: Asking
    max_concurrency: int | None = None
    users: int | None = None

    def split(self, number: int) -> list[Share]:
        """Split into at most `number` shares; the concurrency bounds are split too and limit the number of shares."""
        most = min(filter(None, (number, max(1, len(self.load.conversations)), self.max_concurrency, self.users)))
        return [
            replace(
                self,
                load=self.load.share(index, most),
                max_concurrency=_part(self.max_concurrency, index, most),
                users=_part(self.users, index, most),
            )
            for index in range(most)
        ]

    def run(self) -> Run:
        client = Client(self.base_url, self.headers, self.timeout)
        return Run(self.load.conversations, self.load.starts, client, self.asking, self.max_concurrency, self.users)


def _part(whole: int | None, index: int, of: int) -> int | None:
    return whole and whole // of + (index < whole % of)


@dataclass(slots=True)
class _News:
    """A progress message of a child: new records, requests in flight, and in the last one its totals in `end`."""

    done: list[Record]
    inflight: int
    end: tuple[float, float, float, int] | None = None  # end time, CPU seconds, busiest second, connections


class Processes(Load):
    """A load like `Run`, sent by several processes."""

    def __init__(self, whole: Share, number: int):
        super().__init__(whole.load.conversations, whole.load.starts, whole.max_concurrency, whole.users)
        self.shares = whole.split(number)
        self.processes = len(self.shares)
        self._inflight = [0] * len(self.shares)
        self._children: list[asyncio.subprocess.Process] = []

    @property
    def inflight(self) -> range:
        """A range whose length is the number of requests in flight."""
        return range(sum(self._inflight))

    async def go(self) -> list[Record]:
        """Send the load to its end and return the records. Raises ProcessFailed."""
        try:
            for share in self.shares:
                self._children.append(
                    await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-m",
                        "loadgen.drive.processes",
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        start_new_session=True,
                    )
                )  # a session of its own: Ctrl-C reaches only the parent, which tells children to stop
                _tell(self._children[-1], share)
            for child in self._children:
                await _hear(child)  # wait until it has its share and is ready
            self.began = perf_counter() + _HEAD_START_SECONDS
            for child in self._children:
                _tell(child, self.began)
            if self.interrupted:
                self.stop()
            await asyncio.gather(*(self._collect(index) for index in range(len(self._children))))
        finally:
            for child in self._children:
                if child.returncode is None:
                    child.kill()  # it has sent all its records, or they are no longer wanted
                    await child.wait()
        return self.done

    def stop(self) -> None:
        self.interrupted = True
        for child in self._children if self.began else ():
            _tell(child, "stop")

    async def _collect(self, index: int) -> None:
        while True:
            news: _News = await _hear(self._children[index])
            self.done += news.done
            self._inflight[index] = news.inflight
            if news.end:
                ended, cpu, busiest, connections = news.end
                self.ended, self.cpu_seconds = max(self.ended, ended), max(self.cpu_seconds, cpu)
                self.busiest_second = max(self.busiest_second, busiest)
                self.connections += connections
                return


def _framed(message: object) -> bytes:
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


def _tell(child: asyncio.subprocess.Process, message: object) -> None:
    child.stdin.write(_framed(message))


async def _hear(child: asyncio.subprocess.Process) -> object:
    try:
        (length,) = _LENGTH.unpack(await child.stdout.readexactly(_LENGTH.size))
        return pickle.loads(await child.stdout.readexactly(length))
    except asyncio.IncompleteReadError:
        raise ProcessFailed(f"a process of the generator ended with exit code {await child.wait()}") from None


# The functions below run in the child.
def _read() -> object:
    (length,) = _LENGTH.unpack(_exactly(_LENGTH.size))
    return pickle.loads(_exactly(length))


def _exactly(size: int) -> bytes:
    """Read exactly `size` bytes from standard input: the event loop waits for what follows."""
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            raise SystemExit(1)  # the parent is gone
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(message: object) -> None:
    sys.stdout.buffer.write(_framed(message))
    sys.stdout.buffer.flush()


async def _work(run: Run, at: float) -> None:
    sent = 0

    def news(end: tuple[float, float, float, int] | None = None) -> _News:
        nonlocal sent
        new, sent = run.done[sent:], len(run.done)
        for record in new:
            record.pieces.clear()  # the parent does not need the text of replies
        return _News(new, len(run.inflight), end)

    async def report() -> None:
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            _write(news())

    def stop() -> None:
        loop.remove_reader(0)
        run.stop()

    loop = asyncio.get_running_loop()
    loop.add_reader(0, stop)  # readable once the parent sends a stop or is gone
    reporting = asyncio.create_task(report())
    await run.go(at)
    reporting.cancel()
    _write(news((run.ended, run.cpu_seconds, run.busiest_second, run.connections)))


def main() -> None:
    run = _read().run()
    _write("ready")
    uvloop.run(_work(run, _read()))


if __name__ == "__main__":
    from loadgen.drive.processes import main as work  # so that pickled classes are not of __main__

    work()
