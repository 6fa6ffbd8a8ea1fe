"""Ring: short news from one process to its siblings, through memory and without waiting.

One process writes, any number read, each at its own pace. A record is its own position, a word of kind, slot and
length, a time, and words. Who is too far behind has missed what was overwritten, and goes on with the newest: news are
worth little when they are old. The writer tells of a record when it is whole; a reader that was overtaken while it
copied one sees that by the writer's position and takes none of it.
"""

from array import array
from collections.abc import Iterator

SIZE = 1 << 17  # words, 1 MiB: what a busy gateway predicts in a second or so
BYTES = 8 * (SIZE + 1)
HEADER = 3
MOST = SIZE // 8  # words of one record: a prompt of 262,144 tokens in blocks of 16

Record = tuple[int, int, float, array]  # kind, slot, seconds, words


class Ring:
    """The writing end. `memory` holds BYTES and may have been another process's before, which is gone."""

    def __init__(self, memory: memoryview):
        self._words = memory.cast("B").cast("Q")
        self._at = self._words[SIZE]

    def write(self, kind: int, slot: int, seconds: float, words: list[int]) -> None:
        length = len(words)
        if length > MOST:
            words, length = words[:MOST], MOST
        at = self._at
        start, end = (at + HEADER) % SIZE, (at + HEADER + length) % SIZE
        if HEADER <= start <= end:
            memory = self._words
            memory[start - 3], memory[start - 2], memory[start - 1] = at, kind | slot << 8 | length << 32, int(seconds * 1000)
            memory[start:end] = array("Q", words)
        else:
            self._write_over_the_end(at, array("Q", (at, kind | slot << 8 | length << 32, int(seconds * 1000), *words)))
        self._at = self._words[SIZE] = at + HEADER + length

    def _write_over_the_end(self, at: int, record: array) -> None:
        fits = min(len(record), SIZE - at % SIZE)
        with memoryview(record) as whole:
            self._words[at % SIZE : at % SIZE + fits] = whole[:fits]
            self._words[: len(record) - fits] = whole[fits:]


class Reader:
    """One reading end; it hears what is written from now on."""

    def __init__(self, memory: memoryview):
        self._bytes = memory.cast("B")
        self._words = self._bytes.cast("Q")
        self._at = self._words[SIZE]

    def read(self) -> Iterator[Record]:
        """What is new."""
        head = self._words[SIZE]
        while self._at < head:
            at, kind, milliseconds = self._copy(self._at, HEADER)
            length = kind >> 32
            if at != self._at or length > MOST or at + HEADER + length > head or self._words[SIZE] - at > SIZE:
                self._at = self._words[SIZE]
                return
            words = self._copy(at + HEADER, length)
            if self._words[SIZE] + HEADER + MOST - at > SIZE:  # it may have been overwritten meanwhile
                self._at = self._words[SIZE]
                return
            self._at = at + HEADER + length
            yield kind & 0xFF, kind >> 8 & 0xFFFFFF, milliseconds / 1000, words

    def _copy(self, at: int, length: int) -> array:
        start, words = 8 * (at % SIZE), array("Q")
        words.frombytes(self._bytes[start : min(start + 8 * length, 8 * SIZE)])
        if len(words) < length:
            words.frombytes(self._bytes[: 8 * (length - len(words))])
        return words
