"""The rest of a stream that is not read as events any more, without the token ids that its client did not ask for."""

from __future__ import annotations

import re

from .chunks import END_OF_BODY, Chunks, framed

_OPENS = re.compile(rb'"(?:prompt_token_ids|token_ids)"\s{0,4}:\s{0,4}\[')
_LONGEST_OPENING = 40  # bytes that it has at most
_IDS = re.compile(rb"[0-9,\s]*")


class Blanking:
    """Puts blanks for ids, wherever reads end: what it gives back of a body is as long as what it was given."""

    __slots__ = ("chunks", "before", "is_inside")

    def __init__(self, chunks: Chunks | None):
        """`chunks`: what has taken HTTP's framing off so far, None of a stream without one."""
        self.chunks = chunks
        self.before = b""  # the end of what passed, in which a list may begin to open
        self.is_inside = False  # a list that is not closed yet

    def start(self, held: bytes) -> bytes:
        """What was held back of the body."""
        if self.chunks is None:
            return self.blanked(held)
        return framed(self.blanked(held)) + (END_OF_BODY if self.chunks.ended else b"")

    def feed(self, data: bytes) -> bytes:
        """A read, as the client gets it. Raises ValueError where HTTP's framing is broken."""
        chunks = self.chunks
        if chunks is None:
            return self.blanked(data)
        had_ended, body = chunks.ended, self.blanked(chunks.feed(data))
        return framed(body) + (END_OF_BODY if chunks.ended and not had_ended else b"")

    def blanked(self, body: bytes) -> bytes:
        told, skipped = self.before + body, len(self.before)
        out, at = [], 0
        while at < len(told):
            if self.is_inside:
                end = found.end() if (found := _IDS.match(told, at)) is not None else at
                out.append(b" " * (end - at))
                self.is_inside, at = end == len(told), end
            elif (found := _OPENS.search(told, at)) is not None:
                out.append(told[at : found.end()])
                self.is_inside, at = True, found.end()
            else:
                out.append(told[at:])
                break
        self.before = b"" if self.is_inside else told[-_LONGEST_OPENING:]
        return b"".join(out)[skipped:]
