"""Logging to standard error, one line per event, that never blocks the caller.

    2026-11-20T09:12:03.412Z warning replicas replica failed replica=127.0.0.1:9001 reason="exit code 1"

The caller formats a line, which takes 5 us, and a thread writes it. A pipe that nobody reads or a slow disk must not
stop the event loop, because probes would then fail and the process would be killed. If the reader is too slow, lines
are dropped, and their number is logged afterwards. Fields are `key=value`. Values with spaces, quotes or control
characters are written as JSON strings, so an event is one line whatever a client sends.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import sys
import threading
import time
from typing import Any, TextIO

PENDING_LINES, PENDING_CHARS = 10_000, 8_000_000  # most lines and characters that wait for a slow reader: usually 2 MB
LONGEST_LINE = 16_384  # characters; clients choose request ids and paths, in request heads of up to 64 kB
_PLAIN = re.compile(r"[^\s\"'=\\]+")
_access = logging.getLogger("hitherto.access")


def value(of: Any) -> str:
    """Return a field's value as text for a log line: as it is if it is plain, else as a JSON string."""
    if isinstance(of, float):
        return f"{of:.6g}"
    text = str(of)
    return text if text.isprintable() and _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=True)


class LineFormatter(logging.Formatter):
    """The format of log lines: time, severity, logger, message and fields; a traceback becomes one field.

    `common`: fields that are added at the end of every line.
    """

    def __init__(self, **common: Any) -> None:
        super().__init__()
        self._common = "".join(f" {key}={value(item)}" for key, item in common.items())

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage()
        if not message.isprintable():
            message = json.dumps(message)
        line = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {record.name} {message}"
        fields = getattr(record, "fields", {})
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        return (
            line + "".join(f" {key}={value(item)}" for key, item in fields.items() if item is not None) + self._common
        )


class Outbox(logging.Handler):
    """A logging handler that passes lines to a thread, which writes them to `stream`.

    A line is dropped if PENDING_LINES lines or PENDING_CHARS characters already wait for the thread.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0
        # Characters passed on so far, counted by the loggers under a lock, and written so far, counted by the thread
        self._put = self._written = 0
        self._stream = stream
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= PENDING_LINES or self._put - self._written >= PENDING_CHARS:
            self.dropped += 1
            return
        try:
            line = self.format(record)
            if len(line) > LONGEST_LINE:
                line = f"{line[:LONGEST_LINE]}... ({len(line) - LONGEST_LINE} characters more)"
            self._put += len(line)
            self._lines.put(line)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Write the lines that still wait, but give up after 2 s if the reader is stuck."""
        self._lines.put(None)
        self._thread.join(timeout=2)
        super().close()

    def _write(self) -> None:
        told = 0
        while (line := self._lines.get()) is not None:
            self._written += len(line)
            try:
                self._stream.write(line + "\n")
                if self.dropped > told and self._lines.qsize() < PENDING_LINES // 2:
                    lost, told = self.dropped - told, self.dropped
                    self._stream.write(f"{lost} log lines dropped here: whoever reads standard error is too slow\n")
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # standard error is closed; the gateway goes on without it
                continue


def setup(level: str = "info", stream: TextIO | None = None, **common: Any) -> Outbox:
    """Send the output of every logger of this process through one Outbox, and return the Outbox.

    Call its `close` when the process ends. `level`: the least severity that is logged. `stream`: where lines are
    written; None: standard error. `common`: fields that every line gets.
    """
    outbox = Outbox(stream or sys.stderr)
    outbox.setFormatter(LineFormatter(**common))
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    root.addHandler(outbox)
    root.setLevel(level.upper())
    # At level info, these libraries log every connection and request.
    for noisy in ("aiohttp.access", "asyncio", "httpx", "httpcore", "huggingface_hub", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return outbox


def event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Log a message with fields, as in `event(log, logging.INFO, "replica ready", replica=id)`."""
    if logger.isEnabledFor(level):
        logger.log(level, message, extra={"fields": fields}, stacklevel=2)


def access(method: str, path: str, status: int, seconds: float, **fields: Any) -> None:
    """Write one request's line to the access log. Fields that are None are left out.

    Call this only if the access log is on. `seconds`: the time from the request's begin to its end.
    """
    event(_access, logging.INFO, f"{method} {path} {status}", seconds=seconds, **fields)
