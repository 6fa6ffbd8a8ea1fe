"""The last log lines of an engine process, and the reason for its exit, with a remedy."""

import re
import signal
from collections import deque
from dataclasses import dataclass
from itertools import count

# Lines that are kept of each process of an engine; the characters of a line that are kept, and that are shown.
KEPT_LINES, LONGEST_LINE, LONGEST_SHOWN = 100, 500, 300

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ACCESS = re.compile(r'"[A-Z]+ \S+ HTTP/\d\.\d" \d+')
_NOTHING = re.compile(r"(?!)")  # matches no line

# Patterns of log lines of any engine, each with its remedy.
COMMON_REMEDIES = (
    (r"address already in use", "a port is taken: see who has it with `ss -ltnp`"),
    (r"No module named '?[\w.]+", "a Python package is missing: install it into the environment the engine runs in"),
    (r"unrecognized arguments?:|the following arguments are required|invalid choice:|error: argument ",
     "the engine does not know a flag or its value: check the profile's fields and extra_args against its version"),
    (r"No such file or directory", "a file is missing: check --model and the paths in the profile"),
    (r"No space left on device", "the disk is full: free some space (`df -h`)"),
    (r"Permission denied", "permission denied: check the owner and mode of what it names"),
    (r"MemoryError|Cannot allocate memory", "the machine is out of memory: run fewer replicas or smaller caches"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogGrammar:
    """The log format of one kind of engine: how its lines begin, and which of them explain an exit.

    The defaults are for an engine of one process that writes plain lines.
    """

    # matches at the start of a line; its first group is the name of the engine's process that wrote the line
    writer: re.Pattern[str] = _NOTHING
    stamp: re.Pattern[str] = _NOTHING  # matches after the writer: time, and place in the code
    # (pattern, remedy): the latest line that matches any pattern counts, with the first pattern that it matches
    remedies: tuple[tuple[str, str], ...] = COMMON_REMEDIES
    names_above: re.Pattern[str] = _NOTHING  # lines about a field whose name is in the line above
    echo: re.Pattern[str] = _NOTHING  # lines that only report that another process failed
    died: re.Pattern[str] = _NOTHING  # lines that report that the computing process is gone
    bystanders: tuple[str, ...] = ()  # writers whose lines say nothing about a dead computing process


PLAIN = LogGrammar()
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "for memory probably (`dmesg | grep -i oom`, the container's events), else by someone; give it more, or "
    "run fewer replicas or smaller caches (kv_cache_memory_bytes, cpu_offload_gb)",
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE),
        "it crashed in native code: see its log",
    ),
}
# at the start of a line, which excludes `raise RuntimeError(` in a traceback
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b|.*\berror: ")
_DIED_SILENTLY = "one of its processes was killed, for memory probably, or crashed (`dmesg`)"


class Tail:
    """The last lines of an engine's log. `feed` takes the log as bytes; a carriage return ends a line too.

    An engine may be several processes that write to one log. The last lines of each process are kept: when the
    computing process fails, the process that serves HTTP logs a long error for each of its requests, which would
    displace the cause. Lines of an access log are not kept.
    """

    def __init__(self, grammar: LogGrammar = PLAIN) -> None:
        self.grammar = grammar
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
        """Keep the last line even if it has no line end; call this when the process has ended."""
        self._add(self._rest)
        self._rest = b""

    def _add(self, line: bytes) -> None:
        text = _CONTROL.sub("", line.decode(errors="replace")).strip()[:LONGEST_LINE]
        if not text or _ACCESS.search(text):
            return
        writer = _writer(text, self.grammar)
        if writer not in self._lines and len(self._lines) >= 64:  # more than any engine has
            writer = ""
        self._lines.setdefault(writer, deque(maxlen=KEPT_LINES)).append((next(self._numbers), text))
        self.last = text

    @property
    def lines(self) -> list[str]:
        return [text for _, text in sorted(line for kept in self._lines.values() for line in kept)]


def said(line: str, grammar: LogGrammar = PLAIN) -> str:
    """Return the message in a log line, at most LONGEST_SHOWN characters of it.

    The name of the process that wrote the line, the time and the place in the code are removed.
    """
    for prefix in (grammar.writer, grammar.stamp):
        if found := prefix.match(line):
            line = line[found.end() :]
    return line if len(line) <= LONGEST_SHOWN else line[: LONGEST_SHOWN - 3] + "..."


def explain(code: int, seconds: float, lines: list[str], grammar: LogGrammar = PLAIN) -> str:
    """Return why an engine process ended although nobody asked it to stop, and what to do.

    `code`: its exit code, negative for a signal. `seconds`: how long it ran. `lines`: its last log lines.
    """
    after = f"after {seconds:.0f} s" if seconds >= 10 else f"after {seconds:.1f} s"
    if code < 0:
        name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        return f"killed by {name} {after}: {_SIGNALS.get(-code, 'another process asked it to stop')}"
    text = f"exited with code {code} {after}"
    telling, remedy = _telling(lines, grammar)
    if code == 0 and not remedy and not _ERROR.match(said(telling, grammar)):
        remedy = "as if asked to stop, and not by this gateway"
    if remedy:
        text += f": {remedy}"
    return f'{text}; log: "{said(telling, grammar)}"' if telling else f"{text}, and left no log"


def _telling(lines: list[str], grammar: LogGrammar) -> tuple[str, str]:
    """Return the log line that best explains the exit, and its remedy ("" if none is known).

    If the process that computes died, lines of the processes in `grammar.bystanders` are ignored: they are about
    requests, or only repeat that it died.
    """
    died = [line for line in lines if grammar.died.search(line)]
    silent = grammar.bystanders if died else ()
    causes = [one for one in lines if not grammar.echo.search(one) and _writer(one, grammar) not in silent]
    for number, line in reversed([*enumerate(causes)]):
        for pattern, remedy in grammar.remedies:
            if re.search(pattern, line, re.IGNORECASE):
                above = f"{said(causes[number - 1], grammar)}: " if number and grammar.names_above.search(line) else ""
                return above + said(line, grammar).strip(), remedy
    for line in reversed(causes):
        if _ERROR.match(said(line, grammar)):
            return line, ""
    if died:
        return died[0], _DIED_SILENTLY
    return (causes[-1] if causes else lines[-1] if lines else ""), ""


def _writer(line: str, grammar: LogGrammar) -> str:
    found = grammar.writer.match(line)
    return found[1] if found else ""
