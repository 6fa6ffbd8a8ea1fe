"""Files that are read again when they change."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

LOOK_SECONDS = 0.5  # between two looks

# What tells one state of a file from another; None where there is no file.
Signature = tuple[int, int, int, int] | None


class Copies(NamedTuple):
    """Copies of some files, by the files' own paths, and the files' signatures at that time."""

    paths: dict[Path, Path]
    signatures: list[Signature]


class Followed:
    """Some files, as they are now; `copies`: as they were when these were made."""

    def __init__(self, paths: Sequence[Path], copies: Copies | None = None):
        self._paths = paths
        self._known = signatures(paths) if copies is None else copies.signatures

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


def check_appendable(path: Path) -> None:
    """Raises OSError where nothing could be appended to the file at `path`; does not create it."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
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
