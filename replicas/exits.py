"""An engine process's log tail, and from it and the exit code a reason that one can act on.

Pure but for `oom_kills`, which reads kernel counters.
"""

import re
import signal
from collections import deque
from itertools import count
from pathlib import Path

KEPT_LINES, LONGEST_LINE, LONGEST_SHOWN = 100, 500, 300  # kept of each process that writes the log

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# `(EngineCore pid=12) ERROR 11-20 12:58:51 [core.py:1234] `, as vLLM begins its lines
_WRITER = re.compile(r"\((\w+)(?: pid=\d+)?\) ?")
_STAMP = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_ACCESS = re.compile(r'"[A-Z]+ \S+ HTTP/\d\.\d" \d+')

# What a line of the log means, and what to do. The first rule that matches a line, latest line first.
_REMEDIES = (
    (r"address already in use", "a port is taken: see who has it with `ss -ltnp`"),
    (r"KV cache is needed, which is larger than the available|max seq len .* is larger than|No available memory for the cache blocks",
     "the KV cache is too small for the model's length: lower max_model_len (or `auto`), or give the cache more memory"),
    (r"(CUDA|HIP) out of memory|OutOfMemoryError|less than (desired (GPU|CPU) memory utilization|requested memory)|DefaultCPUAllocator: can't allocate",
     "too little free memory: stop what else uses it, or lower gpu_memory_utilization, kv_cache_memory_bytes or"
     " max_model_len in the profile"),
    (r"No module named '?[\w.]+", "a Python package is missing: install it into the environment the engine runs in"),
    (r"unrecognized arguments?:|the following arguments are required|invalid choice:|error: argument ",
     "the engine does not know a flag or its value: check the profile's fields and extra_args against its version"),
    (r"Cannot find any model weights|no weights|No such file or directory|does not appear to have a file|Repository Not Found"
     r"|not a valid model|is not a (local folder|directory)|model directory|Can't load (the )?config|Incorrect path_or_model_id"
     r"|not the path to a directory|No `?config\.json`?|Invalid repository ID|Repo id must be",
     "a file is missing: check --model and the paths in the profile"),
    (r"No space left on device", "the disk is full: free some space (`df -h`)"),
    (r"Permission denied", "permission denied: check the owner and mode of what it names"),
    (r"MemoryError|Cannot allocate memory", "the machine is out of memory: run fewer replicas or smaller caches"),
)  # fmt: skip
_LESS_MEMORY = "give it more, or run fewer replicas or smaller caches (kv_cache_memory_bytes, cpu_offload_gb)"
# Lines that only say that another process failed.
_ECHO = re.compile(r"[Ss]ee (root cause|stack trace)|EngineDeadError|initialization failed|Failed core proc|leaked \w+ objects|warnings\.warn\(")
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b|.*\berror: ")  # at the line's begin: no `raise RuntimeError(` of a traceback
_DIED = re.compile(r"EngineDeadError|died unexpectedly")
_DIED_SILENTLY = "one of its processes was killed or crashed (`dmesg`)"


class Tail:
    """The last lines of a log, fed as bytes. A carriage return ends a line too: progress bars.

    vLLM is several processes that write one log. The last lines of each are kept: when the engine's core fails, the
    API server tells so at length, once for each request it had. An access log's lines are not kept."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[tuple[int, str]]] = {}
        self._numbers = count()
        self._rest = b""
        self.last = ""

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
        text = _CONTROL.sub("", line.decode(errors="replace")).strip()[:LONGEST_LINE]
        if not text or _ACCESS.search(text):
            return
        writer = _writer(text)
        if writer not in self._lines and len(self._lines) >= 64:  # no vLLM has so many
            writer = ""
        self._lines.setdefault(writer, deque(maxlen=KEPT_LINES)).append((next(self._numbers), text))
        self.last = text

    @property
    def lines(self) -> list[str]:
        return [text for _, text in sorted(line for kept in self._lines.values() for line in kept)]


def said(line: str) -> str:
    """A line as a person needs it: without who wrote it when and where in the code, and not too long."""
    found = _WRITER.match(line)
    text = line[found.end() :] if found else line
    text = _STAMP.sub("", text, 1) if _STAMP.match(text) else text
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has killed for memory: in our own control group where that is told (v2, then v1),
    else on the whole machine since boot; None where nothing is told."""
    for path in (*_group_counters(root), root / "proc/vmstat"):
        try:
            words = path.read_text().split()
        except OSError:
            continue
        if "oom_kill" in words:
            return int(words[words.index("oom_kill") + 1])
    return None


def _group_counters(root: Path) -> list[Path]:
    try:
        rows = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    groups = {controllers: path.lstrip("/") for _, controllers, path in rows}
    mounts, found = root / "sys/fs/cgroup", []
    if "" in groups:  # in a container the path may be the host's, and our group the root of the mount
        found += [mounts / groups[""] / "memory.events", mounts / "memory.events"]
    if "memory" in groups:
        found += [mounts / "memory" / groups["memory"] / "memory.oom_control", mounts / "memory/memory.oom_control"]
    return found


def explain(code: int, seconds: float, lines: list[str], oom: bool | None) -> str:
    """Why a process ended that nobody asked to. `code` is negative for a signal, `oom` whether the kernel
    killed for memory while it ran (None: it does not tell)."""
    after = f"after {seconds:.0f} s" if seconds >= 10 else f"after {seconds:.1f} s"
    if code < 0:
        return f"killed by {_signal_name(-code)} {after}: {_signal_meaning(-code, oom)}"
    text = f"exited with code {code} {after}"
    telling, remedy = _telling(lines)
    if oom:
        remedy = f"the kernel killed one of its processes for memory: {_LESS_MEMORY}"
    elif remedy is _DIED_SILENTLY and oom is None:
        remedy += ", for memory probably"
    elif code == 0 and not remedy and not _ERROR.match(said(telling)):
        remedy = "as if asked to stop, and not by this gateway"
    if remedy:
        text += f": {remedy}"
    return f'{text}; log: "{said(telling)}"' if telling else f"{text}, and left no log"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _signal_meaning(number: int, oom: bool | None) -> str:
    if number == signal.SIGKILL and oom:
        return f"the kernel killed it for memory (`dmesg | grep -i oom`): {_LESS_MEMORY}"
    if number == signal.SIGKILL and oom is None:
        return "for memory probably (`dmesg | grep -i oom`, the container's events), else by someone"
    if number == signal.SIGKILL:
        return "by someone, or by a guard of memory such as systemd-oomd; the kernel counted no kill for memory"
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE):
        return "it crashed in native code: see its log"
    return "another process asked it to stop"


def _telling(lines: list[str]) -> tuple[str, str]:
    """The line that says most, and the remedy for it. Where the engine's core is dead, only the others' lines count:
    what the API server logged before is about requests, and after it an echo."""
    died = [line for line in lines if _DIED.search(line)]
    causes = [line for line in lines if not _ECHO.search(line) and not (died and _writer(line) in ("", "APIServer"))]
    for line in reversed(causes):
        for pattern, remedy in _REMEDIES:
            if re.search(pattern, line, re.IGNORECASE):
                return line, remedy
    for line in reversed(causes):
        if _ERROR.match(said(line)):
            return line, ""
    if died:
        return died[0], _DIED_SILENTLY
    return (causes[-1] if causes else lines[-1] if lines else ""), ""


def _writer(line: str) -> str:
    found = _WRITER.match(line)
    return found[1] if found else ""
