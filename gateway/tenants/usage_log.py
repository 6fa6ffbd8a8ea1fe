"""The usage log: one line of JSON for each request, with its cost and its tenant.

A line is made when its request ends, which takes 3 us, and a thread writes it, so that a slow disk delays nothing. The
file is opened again if it was renamed or removed, as logrotate does. Each batch of lines is one write at the file's
end, so that several workers may write to one file. A pipe with several writers keeps together only PIPE_BUF bytes of a
write. Each write to a pipe therefore has whole lines and at most that length.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import orjson

from ..files import open_to_append
from .ending import cost

if TYPE_CHECKING:
    from ..proxy.exchange import Exchange
    from ..proxy.responses.usage import Usage

log = logging.getLogger("hitherto")

MOST_PENDING = 64 * 2**20  # bytes at most that wait for a slow disk: some 250,000 lines
LOG_SECONDS = 10.0  # between two lines of the gateway's own log about lost lines
LONGEST_NAME = 200  # characters of a model's name, a path and a request's id, which come from clients


class UsageLog:
    """The usage log as a callable for the end of each request, which writes a line about the request.

    While the file cannot be written, lines are lost, but requests go on.
    """

    def __init__(self, path: Path, dropped: Callable[[int], None] = lambda lines: None):
        """Open the file, and start the thread that writes to it.

        `dropped`: called in the event loop's thread with the number of lines that could not be written.
        """
        self._path, self._dropped = path, dropped
        self._file: int | None = None
        with suppress(OSError):  # reported with the first line that is lost
            self._file = open_to_append(path, os.O_CREAT)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._put = self._written = 0  # bytes passed to the thread, and taken by it; each is changed by one side only
        self._lost = 0  # lines that could not be written
        self._told = 0
        self._torn = False  # the file ends within a line that could not be cut off
        self._logged_at, self._logged = float("-inf"), 0
        self._thread = threading.Thread(target=self._write, name="usage log", daemon=True)
        self._thread.start()

    def __call__(self, exchange: Exchange, outcome: str, usage: Usage | None) -> None:
        self.tell_lost()
        if self._put - self._written > MOST_PENDING:
            self._dropped(1)
            return
        line = _line(exchange, outcome, usage)
        self._put += len(line)
        self._lines.put(line)

    def tell_lost(self) -> None:
        """Report the number of lines lost since the last call to `dropped`; call it in the event loop's thread.

        The end of each request reports lost lines too. Call this before the counter of dropped lines is read, and when
        the gateway stops.
        """
        if (lost := self._lost) != self._told:
            self._dropped(lost - self._told)
            self._told = lost

    def close(self) -> None:
        """Write what is pending, but wait at most 5 s for the disk."""
        self._lines.put(None)
        self._thread.join(timeout=5)

    def _write(self) -> None:
        ended = False
        while not ended:
            batch = [self._lines.get()]
            while not self._lines.empty():
                batch.append(self._lines.get())
            ended = None in batch
            data = b"".join([line for line in batch if line is not None])
            self._written += len(data)
            if not data:  # it is closed
                continue
            written = 0
            try:
                file = self._follow()
                if self._torn:  # end the broken line first, or the next one would be unreadable too
                    os.write(file, b"\n")
                    self._torn = False
                is_pipe = stat.S_ISFIFO(os.fstat(file).st_mode)
                while written < len(data):
                    end = _end_of_piece(data, written) if is_pipe else len(data)
                    written += os.write(file, memoryview(data)[written:end])
            except OSError as error:
                if broken := written - (data.rfind(b"\n", 0, written) + 1):  # the next line may be another process's
                    self._torn = True
                    with suppress(OSError):  # it is a pipe, or append-only
                        end = os.lseek(file, 0, os.SEEK_CUR)
                        if os.fstat(file).st_size == end:
                            os.ftruncate(file, end - broken)
                            self._torn = False
                self._lose(data.count(b"\n", written), error)
        if self._file is not None:
            os.close(self._file)

    def _lose(self, lines: int, error: OSError) -> None:
        """Count lost lines, and log their number at most every 10 seconds, since a full disk stays full for long."""
        self._lost += lines
        if monotonic() - self._logged_at > LOG_SECONDS:
            lines, self._logged = self._lost - self._logged, self._lost
            self._logged_at = monotonic()
            log.error("usage log: %d lines were not written to %s: %s", lines, self._path, error.strerror)

    def _follow(self) -> int:
        """Return the descriptor of the file at the log's path.

        The file is opened again if it was renamed, replaced or removed since.
        """
        if self._file is not None:
            with suppress(OSError):  # the file was removed, or its file server lost the open one
                if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                    return self._file
        opened = open_to_append(self._path, os.O_CREAT)
        if self._file is not None:
            os.close(self._file)
        self._file, self._torn = opened, False
        return opened


def _end_of_piece(data: bytes, begin: int) -> int:
    """Return the position in `data` at which a write to a pipe has to end if it starts at `begin`.

    It is after the last whole line within PIPE_BUF bytes, because a pipe keeps only that many bytes of a write
    together. On Linux PIPE_BUF is 4,096, and all lines are shorter, because names from clients are cut (LONGEST_NAME).
    On systems with a smaller PIPE_BUF, a longer line is a write of its own, which the kernel may mix with the writes of
    others.
    """
    return data.rfind(b"\n", begin, begin + select.PIPE_BUF) + 1 or data.index(b"\n", begin) + 1


def _line(exchange: Exchange, outcome: str, usage: Usage | None) -> bytes:
    prompt, tenant = exchange.prompt, exchange.tenant
    model = prompt.model if prompt is not None else exchange.model
    found = cost(exchange, usage)
    return orjson.dumps(
        {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": exchange.id.decode("latin-1")[:LONGEST_NAME],
            "key": tenant.name if tenant is not None else None,
            "model": model[:LONGEST_NAME] if model else None,
            "path": exchange.request.path[:LONGEST_NAME],
            "input_tokens": found.input,
            "cached_tokens": found.cached,
            "output_tokens": found.output,
            "counted_by": "engine" if usage is not None and usage.prompt is not None else "gateway",
            "status": exchange.result,
            "outcome": outcome,
            "seconds": round(monotonic() - exchange.begun, 6),
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )
