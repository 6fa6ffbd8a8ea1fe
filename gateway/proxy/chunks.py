"""HTTP's chunks (RFC 9112, 7.1), of the answers that the gateway reads itself or gives to a client of HTTP/1.0, which
knows none; all others pass as they are."""

from __future__ import annotations

import re

from ..http.upstream import Head, Sink, Upstream, UpstreamError
from .retries import PROTOCOL

# A size may begin with any number of zeros. Cut off behind its eighth digit, it would be another one.
CHUNK = re.compile(rb"(?=[0-9A-Fa-f])0*+([0-9A-Fa-f]{0,8})(?![0-9A-Fa-f])[^\r\n]*\r\n")
END_OF_BODY = b"0\r\n\r\n"
LONGEST_LINES = 65_536  # bytes of a chunk's size with its extensions, and of all that follows the last chunk


class Chunks:
    """Takes the framing off a body that comes in reads. A chunk is handed out as it comes, whatever its size, but for
    its last byte, which waits for the line end behind it. `left`: bytes of a chunk that are not handed out yet; `rest`:
    what has been read of them, or of a line; `ended`: the last chunk is here."""

    __slots__ = ("rest", "left", "ended")

    def __init__(self) -> None:
        self.rest = b""
        self.left = 0
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """Return what a read has of the body. Raises ValueError."""
        raw, at, pieces = self.rest + data if self.rest else data, 0, []
        while not self.ended:
            if self.left:
                is_whole = len(raw) - at >= self.left + 2
                size = self.left if is_whole else min(self.left - 1, len(raw) - at)
                pieces.append(raw[at : at + size])
                self.left, at = self.left - size, at + size
                if not is_whole:
                    break
                at += 2
            elif (found := CHUNK.match(raw, at)) is not None:
                self.left = int(found[1] or b"0", 16)
                self.ended = not self.left
                at = at if self.ended else found.end()
            else:
                break
        self.rest = raw[at:]
        if not self.ended and not self.left and b"\n" in self.rest:
            raise ValueError("a chunk has no size")
        if len(self.rest) > LONGEST_LINES:
            raise ValueError(f"more than {LONGEST_LINES} bytes of framing")
        return b"".join(pieces)


def framed(data: bytes) -> bytes:
    """A chunk of this data; nothing of none."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def unchunked(data: bytes) -> bytes:
    """A complete body that came in chunks. Nothing is left out of one whose framing is not understood."""
    chunks = Chunks()
    try:
        body = chunks.feed(data)
    except ValueError:
        return data
    return body if chunks.ended else data


class ChunkDecodingSink:
    """A sink before another one: takes the framing off what comes in chunks. The replica is asked in HTTP/1.1 for a
    client of HTTP/1.0, too: in HTTP/1.0 the end of a stream and the death of its engine look alike."""

    __slots__ = ("_sink", "_chunks")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._chunks: Chunks | None = None

    def connected(self, upstream: Upstream) -> None:
        self._sink.connected(upstream)

    def head(self, status: int, head: Head, body: bytes) -> None:
        if head.is_chunked:
            self._chunks, head = Chunks(), head.without_chunks()
        if (taken := self._taken(body)) is not None:
            self._sink.head(status, head, taken)

    def data(self, data: bytes) -> None:
        if taken := self._taken(data):
            self._sink.data(taken)

    def _taken(self, data: bytes) -> bytes | None:
        if self._chunks is None:
            return data
        try:
            return self._chunks.feed(data)
        except ValueError as error:
            self._sink.lost(UpstreamError(PROTOCOL, f"broke HTTP's framing: {error}"))
            return None

    def end(self) -> None:
        self._sink.end()

    def closed(self) -> None:
        self._sink.closed()

    def lost(self, error: UpstreamError) -> None:
        self._sink.lost(error)
