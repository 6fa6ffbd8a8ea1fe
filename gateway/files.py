"""Functions that read files, append to files and watch files for changes.

Opening a pipe never waits for the process at its other end.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import BinaryIO

LOOK_SECONDS = 0.5  # between two checks of watched files
MOST_BYTES = 64 * 2**20  # the largest file in bytes that is read whole; the admin API's limit of a body is the same

# Errors that may pass within a second: no free descriptors or memory, or a network mount that does not answer.
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE)
# Modification time in ns, size in bytes, inode and device of a file; None where there is none.
Signature = tuple[int, int, int, int] | None


class Followed:
    """A set of files that is watched for changes."""

    def __init__(self, paths: Sequence[Path]):
        self._paths = paths
        self._known = signatures(paths)

    async def run(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Call `changed` after each change of the files, until cancelled.

        The files are checked every LOOK_SECONDS, and `changed` is called at the first check at which they are the same
        as at the one before. A file may be written in several steps, and several files one after the other.
        """
        seen = self._known
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = await asyncio.to_thread(signatures, self._paths)
            if now == seen != self._known:
                await changed()  # if it raises, the next `run` calls it again
                self._known = now
            seen = now


def signatures(paths: Sequence[Path]) -> list[Signature]:
    return [_signature(path) for path in paths]


def unblocked(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe; meant as the `opener` of `open`.

    Returns the file descriptor. A file that the flags create is readable and writable by its owner alone.
    """
    return os.open(path, flags | os.O_NONBLOCK, 0o600)


def regular(path: str, flags: int) -> int:
    """Open a regular file and return its descriptor; meant as the `opener` of `open`.

    Raises OSError at once for a device, a pipe or a folder.
    """
    file = unblocked(path, flags)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return file


def read(path: Path) -> bytes:
    """Return the contents of a file or a pipe. Raises OSError, also if there are more bytes than the limit MOST_BYTES.

    A pipe is read until its writer closes it; without a writer, the read ends at once. A pipe through which nothing
    comes raises OSError and does not count as an empty file, since the command that should write to it may have failed.
    """
    with open(path, "rb", buffering=0, opener=unblocked) as file:
        os.set_blocking(file.fileno(), True)
        found = read_to_end(file)
        if not found and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EPIPE, "it is a pipe through which nothing comes")
        return found


def read_to_end(file: io.RawIOBase | BinaryIO) -> bytes:
    """Return the rest of an open file. Raises OSError if that is more than the limit MOST_BYTES, as with /dev/zero."""
    found = bytearray()
    while piece := file.read(2**20):
        found += piece
        if len(found) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB")
    return bytes(found)


def open_to_append(path: Path, more_flags: int = 0) -> int:
    """Open a file for appending and return its descriptor.

    `more_flags`: flags of `os.open` to add. Raises OSError; for a pipe that nobody reads it does so at once.
    """
    try:
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | more_flags, 0o640)
    except OSError as error:
        if error.errno == errno.ENXIO and path.is_fifo():  # a socket cannot be opened either
            raise OSError(errno.ENXIO, "it is a pipe that nobody reads: start its reader first") from None
        raise
    os.set_blocking(opened, True)
    return opened


def check_appendable(path: Path) -> None:
    """Check that the file at `path` could be appended to, without creating it. Raises OSError if it could not.

    A pipe is not opened, because closing it again would tell its reader that the input has ended.
    """
    if path.exists() and not path.is_fifo():
        return os.close(open_to_append(path))
    place = path if path.exists() else path.resolve().parent
    if place is not path and not place.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not os.access(place, os.W_OK | (os.X_OK if place.is_dir() else 0)):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _signature(path: Path) -> Signature:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
