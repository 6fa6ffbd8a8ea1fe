"""Processes that have imported their modules before they are asked for.

Hundreds of gateways and engines are started here, and two thirds of what starting one takes, 0.6 of 0.9 s of CPU, is
importing the same modules. So one process imports them, once for each process of pytest, and forks for each that is
asked for; from then on that is a process like any other. What it shares with its siblings is the seed of Python's
hashes: whatever has to show that two processes agree is started by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types

# What `python -m` of each begins with, and what it imports only once it serves.
MAINS = {
    "gateway": "gateway.cli",
    "replicas.simulated": "replicas.simulated.cli",
    "tests.gateway.ending": "tests.gateway.ending",
    "tests.gateway.sglang_engine": "tests.gateway.sglang_engine",
}
LATER = ("gateway.app", "replicas.simulated.server")
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


class Nursery:
    """The process that forks, as seen from here."""

    def __init__(self) -> None:
        self._environ = _surroundings()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", "import sys, tests.prestarted as p; sys.exit(p.nurse(int(sys.argv[1])))"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def is_as_here(self) -> bool:
        """Whether its children would have the environment of this process, and start in its folder."""
        return self._environ == _surroundings()

    def start(self, words: list[str], *descriptors: int) -> None:
        socket.send_fds(self._socket, [json.dumps(words).encode()], descriptors)


def _surroundings() -> tuple[str, dict[str, str]]:
    return os.getcwd(), {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


nurseries: list[Nursery] = []


def can_start() -> bool:
    """Whether a process that is asked for now is as one that is started by itself. Benchmarks, which use what tests do,
    start theirs so."""
    if "PYTEST_CURRENT_TEST" not in os.environ:
        return False
    if not nurseries:
        if os.getcwd() != ROOT:  # it would find no `tests` there
            return False
        nurseries.append(Nursery())
    return nurseries[0].is_as_here


class Prestarted:
    """`python -m MODULE ARGS` as a `subprocess.Popen` with a pipe for its standard error."""

    def __init__(self, module: str, *args: str) -> None:
        assert can_start()
        self._talk, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, errors = os.pipe()
        self.stderr = os.fdopen(ours)
        nurseries[0].start([module, *args], errors, theirs.fileno())
        os.close(errors)
        theirs.close()
        self.pid = int(self._talk.recv(32))
        self._code: int | None = None
        self._reading = threading.Lock()  # several may wait for it, each in a thread

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._reading:
            if self._code is None and select.select([self._talk], [], [], 0)[0]:
                self._code = int(self._talk.recv(32))
                self._talk.close()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None and not select.select([self._talk], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and that has not been told yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class AsyncPrestarted:
    """The same as an `asyncio.subprocess.Process`."""

    def __init__(self, process: Prestarted, stderr: asyncio.StreamReader) -> None:
        self.stderr, self.pid = stderr, process.pid
        self.send_signal, self.terminate, self.kill = process.send_signal, process.terminate, process.kill
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)


async def start(module: str, *args: str) -> AsyncPrestarted:
    process = await asyncio.to_thread(Prestarted, module, *args)  # the first one waits for the imports
    loop, stderr = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stderr), process.stderr)
    return AsyncPrestarted(process, stderr)


# --- in the process that forks


def nurse(descriptor: int) -> int:
    """Fork for each message; in the process that is made so, be what was asked for, and return its exit code."""
    for name in (*MAINS.values(), *LATER):
        importlib.import_module(name)
    _read_tokenizer()
    gc.collect()
    gc.freeze()  # else each child's first collection copies all of it
    asked = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, *_ = socket.recv_fds(asked, 2**16, 2)
        if not message:  # pytest has ended
            return 0
        if os.fork() == 0:
            asked.close()
            _wait_for_another(*descriptors)
            module, *args = json.loads(message)
            sys.argv = [module, *args]
            return importlib.import_module(MAINS[module]).main(args)
        for one in descriptors:
            os.close(one)


def _read_tokenizer() -> None:
    """Read the demo model's tokenizer here, once: that was 0.35 of the 0.5 s of CPU that an engine took to start. Its
    patterns are compiled in each process, since fastokens starts a thread for that, and a fork has none of those."""
    import fastokens

    from replicas.simulated import model

    model.sim_model_dir = functools.cache(model.sim_model_dir)
    sim = str(model.sim_model_dir() / "tokenizer.json")
    read, unused = fastokens.Tokenizer, [fastokens.Tokenizer.from_file(sim)]

    def from_file(path: str):
        return unused.pop() if path == sim and unused else read.from_file(path)

    fastokens.Tokenizer = types.SimpleNamespace(from_file=from_file, from_json_str=read.from_json_str)


def _wait_for_another(errors: int, talk: int) -> None:
    """Fork again, tell who that is and how it ends, and end; only the one that was made returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (pid := os.fork()) == 0:
        os.dup2(errors, 2)
        os.close(errors)
        os.close(talk)
        return
    os.close(errors)
    os.write(talk, b"%d" % pid)
    os.write(talk, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)
