"""The small process between the gateway and one engine, so that no engine outlives its gateway.

`keeper.py FD GRACE COMMAND...`: starts COMMAND, the engine, in a process group of its own, and talks over the socket
FD. The gateway holds the other end: when the gateway dies, in whatever way, the kernel closes that end, and the keeper
stops the engine (SIGTERM, GRACE seconds, SIGKILL). When the keeper itself is killed, the kernel kills the engine
(parent-death signal). The engine's own children are reached through the process group, or, if they left the group, as
children of the keeper, which orphans below it become (subreaper).

Lines to the gateway: `pid N`, then `exit CODE` (negative: killed by that signal), or `error TEXT` if COMMAND could not
be started. From the gateway: `stop SECONDS`.

The file is run by its path with -I -S, imports only the standard library, and starts in 35 ms.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from time import monotonic, sleep

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start(command: list[str]) -> int:
    """Start the engine; return its process id, which is also its process group."""
    keeper = os.getpid()

    def before_exec() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # the keeper died before the line above
            os._exit(1)

    return subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=before_exec).pid


def _wakeups() -> int:
    """Return a descriptor that becomes readable on SIGCHLD and SIGTERM."""
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the engine would inherit
    return readable


def _signal(pid: int, number: int, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number) if group else os.kill(pid, number)


def _reap(engine: int) -> int | None:
    """Collect all children that ended, adopted orphans too; return the engine's exit code if it ended, else None."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == engine:
            code = os.waitstatus_to_exitcode(status)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # the kernel does not list them; the group was killed already
        return []


def _sweep(group: int) -> None:
    """Kill the engine's remaining processes, in rounds: children of a killed process become this process's children."""
    _signal(group, signal.SIGKILL, group=True)
    deadline = monotonic() + 5
    while (left := _children()) and monotonic() < deadline:
        for pid in left:
            _signal(pid, signal.SIGKILL, group=False)
        sleep(0.01)
        _reap(group)


def _stop_asked(data: bytes, default: float) -> float | None:
    """Return the seconds of grace if the gateway's `data` asks for a stop, else None.

    End of file (no data) asks for a stop too, with the `default` grace.
    """
    if not data:
        return default
    for line in data.decode(errors="replace").splitlines():
        word, _, seconds = line.partition(" ")
        if word == "stop":
            return float(seconds)
    return None


def _keep(engine: int, control: socket.socket, wakeups: int, grace: float) -> int:
    """Wait for the engine's end, and stop it when the gateway or a signal asks for that; return its exit code.

    `wakeups`: the descriptor from `_wakeups`. `grace`: seconds between SIGTERM and SIGKILL unless the gateway says.
    """
    kill_at: float | None = None
    watched = [control, wakeups]
    while (code := _reap(engine)) is None:
        timeout = None if kill_at is None else max(0.0, kill_at - monotonic())
        ready, _, _ = select.select(watched, [], [], timeout)
        asked = None
        if control in ready:
            data = _receive(control)
            asked = _stop_asked(data, grace)
            if not data:
                watched.remove(control)
        if wakeups in ready and signal.SIGTERM in os.read(wakeups, 4096):
            asked = grace
        if asked is not None:
            _signal(engine, signal.SIGTERM, group=False)
            until = monotonic() + asked
            kill_at = until if kill_at is None else min(kill_at, until)
        if kill_at is not None and monotonic() >= kill_at:
            _signal(engine, signal.SIGKILL, group=True)
            kill_at = monotonic() + 1
    return code


def _receive(control: socket.socket) -> bytes:
    try:
        return control.recv(4096)
    except ConnectionError:
        return b""


def _tell(control: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # the gateway is gone; the next read shows it
        control.sendall(line.encode() + b"\n")


def main(arguments: list[str]) -> int:
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    grace, command = float(arguments[1]), arguments[2:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeups = _wakeups()
    try:
        engine = _start(command)
    except OSError as error:
        _tell(control, f"error {error.strerror}: {error.filename or command[0]}")
        return 1
    _tell(control, f"pid {engine}")
    code = _keep(engine, control, wakeups, grace)
    _sweep(engine)
    _tell(control, f"exit {code}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
