"""A load spread over several processes, for when one core is not enough to send it.

Of n processes each gets every n-th conversation with its start time and sends this share as `drive.run` does. All begin
at one moment of the machine's monotonic clock, which processes share, so that their records can be merged. A child
process gets its share and the moment to begin as pickles on standard input; the end of standard input tells it to stop.
A few times a second it writes its new records to standard output, as pickles preceded by their length.
"""

from __future__ import annotations

import asyncio
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
    """The part of a load that one process sends, and how it is sent."""

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
    """A progress message of a child process."""

    done: list[Record]  # since the last message
    inflight: int  # number of requests in flight
    # in the last message: when it ended, CPU seconds, share of a core used in the busiest second, connections opened
    end: tuple[float, float, float, int] | None = None


class Processes(Load):
    """A load that several processes send; it is used like `Run`."""

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
        command, pipe = (sys.executable, "-m", "loadgen.drive.processes"), asyncio.subprocess.PIPE
        try:
            for share in self.shares:
                # A session of its own: Ctrl-C reaches only the parent, which tells children to stop.
                child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
                self._children.append(child)
                child.stdin.write(pickle.dumps(share))
            for child in self._children:
                await _hear(child)  # wait until it has its share and is ready
            self.began = perf_counter() + _HEAD_START_SECONDS
            for child in self._children:
                child.stdin.write(pickle.dumps(self.began))
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
            child.stdin.close()

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


async def _hear(child: asyncio.subprocess.Process) -> object:
    try:
        (length,) = _LENGTH.unpack(await child.stdout.readexactly(_LENGTH.size))
        return pickle.loads(await child.stdout.readexactly(length))
    except asyncio.IncompleteReadError:
        raise ProcessFailed(f"a process of the generator ended with exit code {await child.wait()}") from None


# The functions below run in the child.
def _write(message: object) -> None:
    data = pickle.dumps(message)
    sys.stdout.buffer.write(_LENGTH.pack(len(data)) + data)
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
    loop.add_reader(0, stop)  # readable at its end: the parent wants a stop, or is gone
    reporting = asyncio.create_task(report())
    await run.go(at)
    reporting.cancel()
    _write(news((run.ended, run.cpu_seconds, run.busiest_second, run.connections)))


def main() -> None:
    run = pickle.load(sys.stdin.buffer).run()
    _write("ready")
    uvloop.run(_work(run, pickle.load(sys.stdin.buffer)))


if __name__ == "__main__":
    from loadgen.drive.processes import main as work  # so that pickled classes are not of __main__

    work()
