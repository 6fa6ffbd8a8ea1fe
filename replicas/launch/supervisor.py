"""The supervisor of one engine process: it starts, restarts (with backoff) and stops the process.

The engine runs as a child of a small process, the keeper (`keeper.py`), which ends it if the gateway dies. The
supervisor knows processes, not HTTP: the watcher (`replicas.watch`) finds out whether the engine works, and may call
`restart`. The supervisor reports through two callbacks, `on_start(pid)` and `on_exit(reason)`.
"""

import asyncio
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from replicas.deadline import set_within
from replicas.launch.command import Command
from replicas.launch.exits import PLAIN, LogGrammar, Tail, explain

log = logging.getLogger("replicas")

KEEPER = Path(__file__).with_name("keeper.py")
ORPHAN_GRACE = 5.0  # seconds that an engine has after its gateway died; no client waits for its answers


class Backoff:
    """The seconds to wait before the next start: 0.5, 1, 2 ... 30, and again 0.5 after a stable run.

    After runs in which the engine never worked, the wait keeps doubling up to 300 s (IN_VAIN), since a vLLM that cannot
    start uses a core for half a minute or more before it fails.
    """

    FIRST, LONGEST, IN_VAIN, STABLE = 0.5, 30.0, 300.0, 60.0

    def __init__(self) -> None:
        self._next = self.FIRST

    def after(self, worked: float) -> float:
        """Return the seconds to wait, without jitter, before the next start.

        `worked`: for how many seconds the engine had worked when its run ended; 0: it never did.
        """
        wait = self.FIRST if worked >= self.STABLE else min(self._next, self.LONGEST if worked else self.IN_VAIN)
        self._next = wait * 2
        return wait


class Supervisor:
    """The supervisor of one engine process, which starts the process again when it has ended."""

    def __init__(
        self,
        command: Command,
        *,
        on_start: Callable[[int], None],
        on_exit: Callable[[str], None],
        obstacle: Callable[[], str] = lambda: "",
        grammar: LogGrammar = PLAIN,
    ):
        """Prepare to run `command`; `start` begins.

        `on_start(pid)`, `on_exit(reason)`: called when the process has started and ended.
        `obstacle()`: called before each start; returns what prevents it, or "".
        `grammar`: the format of the engine's log.
        """
        self.command = command
        self.tail = Tail(grammar)
        self.pid: int | None = None
        self._on_start, self._on_exit, self._obstacle = on_start, on_exit, obstacle
        self._stopping = asyncio.Event()
        self._is_last_run = False
        self._keeper: asyncio.subprocess.Process | None = None
        self._control: asyncio.StreamWriter | None = None
        self._why = ""  # why this gateway ended the process; "": it did not
        self._worked_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run the process from now on, unless it runs already."""
        if self._task is not None and not self._task.done() and not self._stopping.is_set():
            return
        self._stopping.clear()
        self._is_last_run = False
        self._task = asyncio.create_task(self._run(), name=f"supervise {self.command.argv[:3]}")

    def no_restart(self) -> None:
        """Leave the process running, but do not restart it after its exit."""
        self._is_last_run = True

    def works(self) -> None:
        """Note that the engine answers and lists its model, so its start counts as successful."""
        if self._worked_at is None:
            self._worked_at = monotonic()

    async def stop(self, grace: float) -> None:
        """Stop the engine: SIGTERM, then SIGKILL after `grace` seconds; return when it and its children are gone."""
        self._stopping.set()
        self._ask_to_stop(grace)
        if self._task:
            await asyncio.wait([self._task], timeout=grace + 8)  # the keeper's sweep takes at most 5 s
            if not self._task.done():  # the keeper itself hangs
                self._kill()
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def restart(self, why: str) -> None:
        """Kill the process, which hangs or is useless, and start it again after the backoff; `why`: for `on_exit`."""
        if self.pid is not None and not self._why:
            self._why = why
            self._ask_to_stop(0.0)

    def _ask_to_stop(self, grace: float) -> None:
        if self._control and not self._control.is_closing():
            self._control.write(f"stop {grace:g}\n".encode())

    def _kill(self) -> None:
        """Kill the keeper and the engine's process group directly, without a message to the keeper."""
        with suppress(ProcessLookupError):
            if self._keeper is not None:
                self._keeper.kill()
        with suppress(ProcessLookupError):
            if self.pid is not None:
                os.killpg(self.pid, signal.SIGKILL)

    async def _run(self) -> None:
        backoff, in_vain = Backoff(), 0
        while not self._stopping.is_set():
            self._why, self._worked_at = "", None
            try:
                reason = self._obstacle() or await self._run_once()
            except OSError as error:  # out of descriptors, processes or memory
                reason = f"cannot start a process: {error.strerror}; check the gateway's limits (`ulimit -a`)"
            if self._stopping.is_set():
                return
            in_vain = in_vain + 1 if self._worked_at is None else 0
            worked = monotonic() - self._worked_at if self._worked_at else 0.0
            wait = backoff.after(worked) * random.uniform(0.9, 1.1)
            if self._is_last_run:
                return self._on_exit(reason)
            again = f" ({in_vain} starts in a row failed)" if in_vain > 1 else ""
            self._on_exit(f"{reason}; next start in {wait:.1f} s{again}")
            await set_within(wait, self._stopping)

    async def _run_once(self) -> str:
        """Start the engine, and wait for its end; return why it ended."""
        self.tail = tail = Tail(self.tail.grammar)
        ours, theirs = socket.socketpair()
        try:
            keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(KEEPER), str(theirs.fileno()), f"{ORPHAN_GRACE:g}"),
                *self.command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self.command.env},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the gateway handles Ctrl-C in its terminal itself
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._keeper = keeper

        async def read_log() -> None:
            while keeper.stdout is not None and (data := await keeper.stdout.read(65536)):
                tail.feed(data)

        reader, self._control = await asyncio.open_connection(sock=ours)
        logs, began = asyncio.create_task(read_log()), monotonic()
        try:
            wrong, code = await self._listen(reader)
            await asyncio.wait([logs], timeout=2)  # the last lines matter most
        finally:
            self._control.close()  # if we are being cancelled: end of file makes the keeper stop the engine
            await keeper.wait()
            self._control = self._keeper = self.pid = None
            logs.cancel()
        tail.close()
        return self._why or wrong or explain(code, monotonic() - began, tail.lines, tail.grammar)

    async def _listen(self, reader: asyncio.StreamReader) -> tuple[str, int]:
        """Read the keeper's messages until the engine ends; return ("", exit code), or (error message, 0)."""
        if self._stopping.is_set():
            self._ask_to_stop(0.0)
        while line := await reader.readline():
            word, _, rest = line.decode(errors="replace").strip().partition(" ")
            if word == "pid":
                self.pid = int(rest)
                self._on_start(self.pid)
            elif word == "exit":
                return "", int(rest)
            elif word == "error":
                where = "is it installed? A profile's `executable` may name its path"
                return f"cannot start {self.command.argv[0]}: {rest}; {where}", 0
        self._kill()
        return "its keeper process was killed, and the engine with it", 0
