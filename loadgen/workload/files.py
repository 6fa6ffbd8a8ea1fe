"""Read files of entries, one per line or all in one JSON array, and report the place of each bad entry.

A bad entry ends the reading or is skipped; in both cases its place and the reason are reported.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import orjson

from loadgen.workload.conversations import FILES, BadWorkload
from replicas.pipes import refuse_pipe

_UNREADABLE = (OSError, EOFError, zlib.error)  # the last two come from a truncated or damaged .gz
_EXAMPLES = 5  # skipped entries shown with their reasons
_CHUNK = 1 << 20


class BadLine(ValueError):
    """An entry that cannot be used; the message is the reason."""


@dataclass(slots=True)
class Reader:
    """A reader of one file of entries, which may be compressed (.gz).

    For a bad entry it raises BadWorkload or, with `skip`, leaves the entry out and counts it.
    """

    path: Path
    skip: bool = False  # leave bad entries out and count them
    bad: int = 0  # entries left out so far
    good: int = 0  # entries read so far
    examples: list[str] = field(default_factory=list)  # place and reason of the first few bad entries

    def rows(self, parse: Callable[[bytes, int], object]) -> Iterator:
        """Yield `parse(line, number)` for each line that is not blank, except results that are None.

        `parse` raises BadLine for a bad line; `number` is the line's, from 1.
        """
        return self._parsed("line", lambda file: map(bytes.strip, file), parse)

    def entries(self, parse: Callable[[object, int], object]) -> Iterator:
        """Yield `parse(value, number)` for each line of a file that has one JSON value per line.

        Results that are None are left out. `number` is the line's, from 1; `parse` raises BadLine for a bad value.
        """
        return self.rows(lambda line, number: parse(_json(line), number))

    def array(self, parse: Callable[[object, int], object]) -> Iterator:
        """Yield `parse(item, number)` for each item of the one JSON array in the file.

        Results that are None are left out. `number` is the item's, from 1; `parse` raises BadLine for a bad item.
        """
        return self._parsed("entry", _items, parse)

    def first_line(self) -> bytes:
        """Return the first line that is not blank, by which the format is recognized. Raises BadWorkload."""
        try:
            refuse_pipe(self.path)
            with self._open() as file:
                return next((line for line in iter(lambda: file.readline(_CHUNK), b"") if line.strip()), b"").strip()
        except _UNREADABLE as error:
            raise BadWorkload(f"{self.path}: {_reason(error)}; name {FILES}") from None

    def notes(self) -> list[str]:
        if not self.bad:
            return []
        return [f"{self.path}: {self.bad:,} of {self.bad + self.good:,} entries left out, for example:", *self.examples]

    def _open(self) -> IO[bytes]:
        try:
            return gzip.open(self.path) if self.path.suffix == ".gz" else open(self.path, "rb")
        except OSError as error:
            raise BadWorkload(f"{self.path}: {error.strerror}; name {FILES}") from None

    def _parsed(self, kind: str, split: Callable[[IO[bytes]], Iterable], parse: Callable) -> Iterator:
        """Divide the file into entries, and yield what `parse` returns for each, except None; report bad entries.

        `split`: yields the entries of an open file; `parse`: called with an entry and its number, from 1, and raises
        BadLine for a bad one; `kind`: what error messages call an entry.
        """
        number = 0
        with self._open() as file:
            try:
                for number, given in enumerate(split(file), 1):
                    try:
                        found = None if given == b"" else parse(given, number)
                    except BadLine as why:
                        self._refuse(f"{kind} {number}", why)
                        continue
                    self.good += given != b""
                    if found is not None:
                        yield found
            except (BadLine, *_UNREADABLE) as error:
                self._refuse(f"after {kind} {number}", _reason(error))

    def _refuse(self, place: str, why: object) -> None:
        if not self.skip:
            raise BadWorkload(f"{self.path}, {place}: {why}") from None
        self.bad += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{place}: {why}")


def _json(line: bytes) -> object:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadLine(f"not JSON: {error}") from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _items(file: IO[bytes]) -> list[object]:
    found = _json(file.read())
    return found if isinstance(found, list) else [found]
