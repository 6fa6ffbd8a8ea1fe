"""HTTP's chunked framing (RFC 9112, 7.1), for answers that the gateway reads itself or relays to HTTP/1.0 clients.

All other answers are relayed with the framing that they have.
"""

from __future__ import annotations

import re

from .upstream import PROTOCOL, Head, Sink, Upstream, UpstreamError

# The line with a chunk's size. It may begin with any number of zeros, but a size of more than eight other digits is
# invalid, and must not match in part.
CHUNK = re.compile(rb"(?=[0-9A-Fa-f])0*+([0-9A-Fa-f]{0,8})(?![0-9A-Fa-f])[^\r\n]*\r\n")
# The end of an event in a stream, from engines that end lines with LF and from those that end them with CRLF.
EVENT_ENDS = b"\n\n", b"\r\n\r\n"
# The most bytes that the end of an event and the end of its chunk take together.
END_BYTES = 6
LONGEST_LINES = 65_536  # bytes of a chunk's size line, and of the trailers after the last chunk


class Chunks:
    """A decoder of chunked framing, for a body that comes in several reads.

    A chunk's data is returned as it comes, except for the last byte, which is kept until the chunk's line end has come.

    `left`: how many bytes of the present chunk have not been returned yet.
    `rest`: bytes that were read but not decoded yet: the end of a chunk, or an incomplete size line.
    `ended`: whether the last chunk, of size 0, has begun.
    """

    __slots__ = ("rest", "left", "ended")

    def __init__(self) -> None:
        self.rest = b""
        self.left = 0
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """Decode one read, and return the data of the body in it; raises ValueError if the framing is invalid."""
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


def framed(data: bytes, head: Head) -> bytes:
    """Return data in the framing of an answer: as a chunk if the answer's `head` announces chunks, else unchanged.

    Without data there is no chunk, since a chunk of size 0 would end the body.
    """
    return b"%x\r\n%b\r\n" % (len(data), data) if data and head.is_chunked else data


def end_of_body(head: Head) -> bytes:
    """Return the bytes that end the body of the answer with this head; b"" if its framing has none."""
    return b"0\r\n\r\n" if head.is_chunked else b""


def unframed(data: bytes, head: Head) -> bytes:
    """Return a complete body without its chunked framing.

    A body without this framing is returned unchanged, and so is one whose framing is invalid or has no end. `head`: the
    head of the answer.
    """
    if not head.is_chunked:
        return data
    chunks = Chunks()
    try:
        body = chunks.feed(data)
    except ValueError:
        return data
    return body if chunks.ended else data


def ends_with_event(end: bytes, head: Head) -> bool:
    """Return whether another event may be appended to a stream, after the bytes that were sent to the client so far.

    It may if the bytes end with a complete event and, with chunked framing, with a complete chunk. It may not if the
    head states the body's length.

    `end`: the last bytes that were sent, at least END_BYTES (6) of them.
    `head`: the head of the answer.
    """
    if head.is_chunked:
        return end.endswith(b"\r\n") and end.endswith(EVENT_ENDS, 0, len(end) - 2)
    return head.until_close and end.endswith(EVENT_ENDS)


class ChunkDecodingSink:
    """A receiver of an answer that passes it on to another receiver (sink) without its chunked framing.

    Used for HTTP/1.0 clients, which do not know this framing. Their requests are nevertheless sent to replicas as
    HTTP/1.1, since in HTTP/1.0 the end of a stream and the death of its engine look alike.
    """

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
        """Return the data of the body in a read; if the framing is invalid, report that to the sink and return None."""
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
