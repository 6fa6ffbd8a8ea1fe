"""Ring: short news from one process to its siblings, through memory and without waiting.

One process writes, any number read, each at its own pace. A record is a word of kind, slot and length, a time, and words.
Who is too far behind has missed what was overwritten, and goes on with the newest: news are worth little when they are old.
The writer tells of a record when it is whole; a reader that may have been overtaken while it copied takes none of it.
"""

from array import array
from collections.abc import Sequence

SIZE = 1 << 17  # words, 1 MiB: what a busy gateway predicts in a second or so
BYTES = 8 * (SIZE + 1)
HEADER = 2
MOST = SIZE // 8  # words of one record: a prompt of 262,144 tokens in blocks of 16
NEAR = SIZE - HEADER - MOST  # behind by no more, what is read is not what is being written

Record = tuple[int, int, float, array]  # kind, slot, seconds, words


class Ring:
    """The writing end. `memory` holds BYTES and may have been another process's before, which is gone."""

    def __init__(self, memory: memoryview):
        self._words = memory.cast("B").cast("Q")
        self._at = self._words[SIZE]

    def write(self, kind: int, slot: int, seconds: float, words: array) -> None:
        length = len(words)
        if length > MOST:
            words, length = words[:MOST], MOST
        memory, start = self._words, self._at % SIZE
        end = start + HEADER + length
        if end <= SIZE:
            memory[start], memory[start + 1] = kind | slot << 8 | length << 32, int(seconds * 1000)
            memory[start + HEADER : end] = words
        else:
            record = array("Q", (kind | slot << 8 | length << 32, int(seconds * 1000))) + words
            memory[start:SIZE] = record[: SIZE - start]
            memory[: end - SIZE] = record[SIZE - start :]
        self._at += HEADER + length
        memory[SIZE] = self._at


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
        if head - at > NEAR:
            return ()
        words = self._copy(at % SIZE, head - at)
        if self._words[SIZE] - at > NEAR:
            return ()
        records, start = [], 0
        while start < len(words):
            kind = words[start]
            end = start + HEADER + (kind >> 32)
            records.append((kind & 0xFF, kind >> 8 & 0xFFFFFF, words[start + 1] / 1000, words[start + HEADER : end]))
            start = end
        return records

    def _copy(self, start: int, length: int) -> array:
        words = array("Q")
        words.frombytes(self._bytes[8 * start : 8 * min(start + length, SIZE)])
        if len(words) < length:
            words.frombytes(self._bytes[: 8 * (length - len(words))])
        return words
