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
from math import inf
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


def _reap(engine: int) -> int | None:
    """Collect all children that ended, adopted orphans too; return the engine's exit code if it ended, else None."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == engine:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _sweep(group: int) -> None:
    """Kill the engine's remaining processes, in rounds: children of a killed process become this process's children.

    If the kernel does not list a process's children, only the process group is killed.
    """
    deadline, left = monotonic() + 5, [-group]
    while left and monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sleep(0.01)
        _reap(group)
        left = []
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{os.getpid()}/children") as file:
            left = [int(pid) for pid in file.read().split()]


def _keep(engine: int, control: socket.socket, wakeups: int, grace: float) -> int:
    """Wait for the engine's end, and stop it when the gateway or a signal asks for that; return its exit code.

    `wakeups`: the descriptor from `_wakeups`. `grace`: seconds between SIGTERM and SIGKILL, unless the gateway's order
    to stop gives another number.
    """
    kill_at = inf
    watched: list[int] = [control.fileno(), wakeups]
    while (code := _reap(engine)) is None:
        timeout = None if kill_at == inf else max(0.0, kill_at - monotonic())
        ready, _, _ = select.select(watched, [], [], timeout)
        asked = inf  # seconds that the engine may still take
        if control.fileno() in ready:
            data = b""
            with contextlib.suppress(ConnectionError):
                data = control.recv(4096)
            orders = [line.partition(" ") for line in data.decode(errors="replace").splitlines()]
            asked = next((float(seconds) for word, _, seconds in orders if word == "stop"), inf)
            if not data:  # the gateway is gone
                watched.remove(control.fileno())
                asked = grace
        if wakeups in ready and signal.SIGTERM in os.read(wakeups, 4096):
            asked = grace
        with contextlib.suppress(ProcessLookupError):
            if asked < inf:
                os.kill(engine, signal.SIGTERM)
                kill_at = min(kill_at, monotonic() + asked)
            if monotonic() >= kill_at:
                kill_at = monotonic() + 1
                os.killpg(engine, signal.SIGKILL)
    return code


def main(arguments: list[str]) -> int:
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):  # the gateway is gone; the next read shows it
            control.sendall(line.encode() + b"\n")

    grace, command = float(arguments[1]), arguments[2:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeups = _wakeups()
    try:
        engine = _start(command)
    except OSError as error:
        tell(f"error {error.strerror}: {error.filename or command[0]}")
        return 1
    tell(f"pid {engine}")
    code = _keep(engine, control, wakeups, grace)
    _sweep(engine)
    tell(f"exit {code}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
