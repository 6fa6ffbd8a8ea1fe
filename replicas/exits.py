"""An engine process's log tail, and from it and the exit code a reason that one can act on.

Pure but for `oom_kills`, which reads one kernel counter.
"""

import re
import signal
from collections import deque

KEPT_LINES, LONGEST_LINE = 50, 500

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# What a line of the log means, and what to do. The first rule that matches a line, latest line first.
_REMEDIES = (
    (r"address already in use", "a port is taken: see who has it with `ss -ltnp`"),
    (r"(CUDA|HIP) out of memory|OutOfMemoryError|No available memory for the cache blocks",
     "the device has too little free memory: stop what else uses it, or lower the model length or memory share in the profile"),
    (r"No module named '?[\w.]+", "a Python package is missing: install it into the environment the gateway runs in"),
    (r"unrecognized arguments?:|the following arguments are required|invalid choice:",
     "the engine does not know a flag: check the profile's fields and extra_args against its version"),
    (r"No such file or directory|does not appear to have a file|Repository Not Found|not a valid model"
     r"|is not a (local folder|directory)|model directory",
     "a file is missing: check --model and the paths in the profile"),
    (r"No space left on device", "the disk is full: free some space (`df -h`)"),
    (r"Permission denied", "permission denied: check the owner and mode of what it names"),
    (r"MemoryError|Cannot allocate memory", "the machine is out of memory: run fewer replicas or smaller caches"),
)


class Tail:
    """The last lines of a log, fed as bytes. A carriage return ends a line too: progress bars."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *whole, self._rest = re.split(rb"[\r\n]+", self._rest + data)
        self._rest = self._rest[-4 * LONGEST_LINE :]
        for line in whole:
            self._add(line)

    def close(self) -> None:
        """The process ended: what came last may lack a line end."""
        self._add(self._rest)
        self._rest = b""

    def _add(self, line: bytes) -> None:
        text = _CONTROL.sub("", line.decode(errors="replace")).strip()
        if text:
            self._lines.append(text[:LONGEST_LINE])

    @property
    def lines(self) -> list[str]:
        return list(self._lines)

    @property
    def last(self) -> str:
        return self._lines[-1] if self._lines else ""


def oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot; 0 where it does not say."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def explain(code: int, seconds: float, lines: list[str], oom: bool) -> str:
    """Why a process ended that nobody asked to. `code` is negative for a signal, `oom` whether the kernel
    killed for memory while it ran."""
    after = f"after {seconds:.0f} s" if seconds >= 10 else f"after {seconds:.1f} s"
    if code < 0:
        return f"killed by {_signal_name(-code)} {after}: {_signal_meaning(-code, oom)}"
    telling, remedy = _telling(lines)
    text = f"exited with code {code} {after}"
    if remedy:
        text += f": {remedy}"
    return f'{text}; log: "{telling}"' if telling else f"{text}, and left no log"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _signal_meaning(number: int, oom: bool) -> str:
    if number == signal.SIGKILL and oom:
        return "the kernel killed it for memory (see `dmesg | grep -i oom`): give it more, or run fewer replicas"
    if number == signal.SIGKILL:
        return "someone killed it, or a memory limit did (`dmesg | grep -i oom`, the container's events)"
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE):
        return "it crashed in native code: see its log"
    return "another process asked it to stop"


def _telling(lines: list[str]) -> tuple[str, str]:
    """The line that says most, and the remedy for it."""
    for line in reversed(lines):
        for pattern, remedy in _REMEDIES:
            if re.search(pattern, line, re.IGNORECASE):
                return line, remedy
    for line in reversed(lines):
        if re.search(r"\b\w*(Error|Exception)\b|\berror:", line):
            return line, ""
    return (lines[-1] if lines else ""), ""
