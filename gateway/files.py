"""Files that are read again when they change."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import BinaryIO

LOOK_SECONDS = 0.5  # between two looks
MOST_BYTES = 64 * 2**20  # of what is read whole: as many as the admin side takes

# What tells one state of a file from another; None where there is no file.
Signature = tuple[int, int, int, int] | None


class Followed:
    """Some files, as they are now."""

    def __init__(self, paths: Sequence[Path]):
        self._paths = paths
        self._known = signatures(paths)

    async def run(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Call `changed` after each change, until cancelled: once the files have stayed the same for a while, since
        they may be written in several steps, or one after the other."""
        seen = self._known
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = await asyncio.to_thread(signatures, self._paths)
            if now == seen != self._known:
                await changed()  # what fails is called again
                self._known = now
            seen = now


def signatures(paths: Sequence[Path]) -> list[Signature]:
    return [_signature(path) for path in paths]


def unblocked(path: str, flags: int) -> int:
    """An opener that opens at once what else would wait for somebody at its other end."""
    return os.open(path, flags | os.O_NONBLOCK)


def regular(path: str, flags: int) -> int:
    """An opener of regular files, which raises OSError at once for a device, a pipe or a folder."""
    file = unblocked(path, flags)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return file


def read(path: Path) -> bytes:
    """Return what is in a file, or comes through a pipe. A pipe through which nothing comes is not waited for, nor
    taken for an empty file, as the command behind it may have failed: OSError, also for more than MOST_BYTES."""
    with open(path, "rb", buffering=0, opener=unblocked) as file:
        begun = file.read(1)  # None: somebody has the other end, and has not written yet
        if begun == b"" and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EPIPE, "it is a pipe through which nothing comes")
        os.set_blocking(file.fileno(), True)
        return (begun or b"") + read_to_end(file)


def read_to_end(file: io.RawIOBase | BinaryIO) -> bytes:
    """Return the rest of a file. Raises OSError where it has more than MOST_BYTES, as /dev/zero has."""
    found = bytearray()
    while piece := file.read(2**20):
        found += piece
        if len(found) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB")
    return bytes(found)


def open_to_append(path: Path, more_flags: int = 0) -> int:
    """The descriptor of the file at `path`. A pipe that nobody reads is not waited for: OSError."""
    try:
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | more_flags, 0o640)
    except OSError as error:
        if error.errno == errno.ENXIO and path.is_fifo():  # a socket cannot be opened either
            raise OSError(errno.ENXIO, "it is a pipe that nobody reads: start its reader first") from None
        raise
    os.set_blocking(opened, True)
    return opened


def check_appendable(path: Path) -> None:
    """Raises OSError where nothing could be appended to the file at `path`; does not create it. A pipe is not opened:
    its reader would take it to have ended once it is closed."""
    try:
        if not path.is_fifo():
            os.close(open_to_append(path))
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except FileNotFoundError:
        folder = path.resolve().parent
        if not folder.is_dir():
            raise
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path)) from None


def _signature(path: Path) -> Signature:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
