"""Ring: short news from one process to its siblings, through memory and without waiting.

One process writes, any number read, each at its own pace. A record is a word of kind, slot and length, a time, and words.
Who is too far behind has missed what was overwritten, and goes on with the newest: news are worth little when they are old.
The writer tells of a record when it is whole; a reader that may have been overtaken while it copied takes none of it.
"""

from array import array
from collections.abc import Sequence
from struct import Struct

SIZE = 1 << 17  # words, 1 MiB: what a busy gateway predicts in a second or so
BYTES = 8 * (SIZE + 1)
_HEADER = Struct("QIId")
HEADER = _HEADER.size // 8
MOST = SIZE // 8  # words of one record: a prompt of 262,144 tokens in blocks of 16
NEAR = SIZE - HEADER - MOST  # behind by no more, what is read is not what is being written

Record = tuple[int, int, float, array]  # kind, slot, seconds, words


class Ring:
    """The writing end. `memory` holds BYTES and may have been another process's before, which is gone."""

    def __init__(self, memory: memoryview):
        self._bytes = memory.cast("B")
        self._words = self._bytes.cast("Q")
        self._at = self._words[SIZE]

    def write(self, kind: int, slot: int, seconds: float, words: array) -> None:
        length = len(words)
        if length > MOST:
            words, length = words[:MOST], MOST
        memory, at = self._words, self._at
        start = at % SIZE
        body = start + HEADER
        end = body + length
        if end <= SIZE:
            _HEADER.pack_into(self._bytes, 8 * start, kind, slot, length, seconds)
            memory[body:end] = words
        else:
            record = array("Q", _HEADER.pack(kind, slot, length, seconds)) + words
            memory[start:SIZE] = record[: SIZE - start]
            memory[: end - SIZE] = record[SIZE - start :]
        memory[SIZE] = self._at = at + HEADER + length


class Reader:
    """One reading end; it hears what is written from now on."""

    def __init__(self, memory: memoryview):
        self._bytes = memory.cast("B")
        self._words = self._bytes.cast("Q")
        self._at = self._words[SIZE]

    def read(self) -> Sequence[Record]:
        """What is new."""
        at, head = self._at, self._words[SIZE]
        if at == head:
            return ()
        self._at = head
        start, length = at % SIZE, head - at
        end, words = start + length, array("Q")
        words.frombytes(self._bytes[8 * start : 8 * (end if end < SIZE else SIZE)])
        if end > SIZE:
            words.frombytes(self._bytes[: 8 * (end - SIZE)])
        if self._words[SIZE] - at > NEAR:
            return ()
        records, start = [], 0
        while start < length:
            kind, slot, size, seconds = _HEADER.unpack_from(words, 8 * start)
            start += HEADER + size
            records.append((kind, slot, seconds, words[start - size : start]))
        return records
