"""HTTP's chunks (RFC 9112, 7.1), of the answers that the gateway reads itself; all others pass as they are."""

from __future__ import annotations

import re

CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[^\r\n]*\r\n")


class Chunks:
    """Takes the framing off a body that comes in reads. `rest`: what is not a whole chunk yet."""

    __slots__ = ("rest", "ended")

    def __init__(self) -> None:
        self.rest = b""
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """What the chunks have that are whole now. Raises ValueError."""
        if self.ended:  # the last line end may come in a read of its own
            return b""
        raw, at, pieces = self.rest + data, 0, []
        while (found := CHUNK.match(raw, at)) is not None:
            size, start = int(found[1], 16), found.end()
            if not size:
                self.ended, at = True, len(raw)
                break
            if start + size + 2 > len(raw):
                break
            pieces.append(raw[start : start + size])
            at = start + size + 2
        self.rest = raw[at:]
        if self.rest and found is None and b"\n" in self.rest:
            raise ValueError("a chunk has no size")
        return b"".join(pieces)


def unchunked(data: bytes) -> bytes:
    """A complete body that came in chunks. Nothing is left out of one whose framing is not understood."""
    chunks = Chunks()
    try:
        body = chunks.feed(data)
    except ValueError:
        return data
    return body if chunks.ended else data
