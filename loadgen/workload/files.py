"""Reads files of entries, a line or an item of a JSON array each, and names what is wrong in them.

A bad entry ends the reading or is left out, as asked; either way its place and the reason are told.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import orjson

from loadgen.workload.conversations import FILES, BadWorkload
from replicas.pipes import refuse_pipe

_UNREADABLE = (OSError, EOFError, zlib.error)  # the latter two: a .gz that ends too soon, or is damaged
_EXAMPLES = 5  # reasons shown of what was left out
_CHUNK = 1 << 20


class BadLine(ValueError):
    """One entry that can't be used; the message is the reason."""


@dataclass(slots=True)
class Reader:
    """Reads a file (.gz too). A bad entry raises BadWorkload, or with `skip` is noted and left out."""

    path: Path
    skip: bool = False
    bad: int = 0
    good: int = 0
    examples: list[str] = field(default_factory=list)

    def rows(self, parse: Callable[[bytes, int], object]) -> Iterator:
        """What `parse(line, number)` makes of each line that is not blank; None means nothing."""
        number = 0
        with self._open() as file:
            try:
                for number, line in enumerate(file, 1):
                    if line.strip() and (found := self._parsed(parse, line, f"line {number}", number)) is not None:
                        yield found
            except _UNREADABLE as error:
                self._refuse(f"after line {number}", _reason(error))

    def entries(self, parse: Callable[[object, int], object]) -> Iterator:
        """The same for JSON, one value a line."""
        return self.rows(lambda line, number: parse(_json(line), number))

    def array(self, parse: Callable[[object, int], object]) -> Iterator:
        """The same for one JSON array, read piece by piece."""
        number = 0
        with self._open() as file:
            try:
                for number, item in enumerate(_items(file), 1):
                    if (found := self._parsed(parse, item, f"entry {number}", number)) is not None:
                        yield found
            except (BadLine, *_UNREADABLE) as error:
                self._refuse(f"after entry {number}", _reason(error))

    def first_line(self) -> bytes:
        """For a look at what the file is, before all of it is read."""
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

    def _parsed(self, parse: Callable, given: object, place: str, number: int) -> object:
        try:
            found = parse(given, number)
        except BadLine as why:
            self._refuse(place, why)
            return None
        self.good += 1
        return found

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


def _items(file: IO[bytes]) -> Iterator[object]:
    """The items of a JSON array, without holding all of it. Raises BadLine: what is broken has no next."""
    parse, decoded, text, at = json.JSONDecoder().raw_decode, codecs.getincrementaldecoder("utf-8")("replace"), "", 0
    while True:
        while at < len(text) and text[at] in " \t\r\n[,":
            at += 1
        if text[at : at + 1] == "]":
            return
        try:
            item, at = parse(text, at)
        except json.JSONDecodeError as error:
            more = file.read(_CHUNK)
            if not more:
                raise BadLine(f"not JSON: {error.msg}") from None
            text, at = text[at:] + decoded.decode(more), 0
            continue
        yield item
