"""The parser of Redis's replies, which refuses lengths that cannot be.

They raise InvalidResponse, as bytes that are not Redis's protocol do, and a gateway goes on as without Redis.
"""

from __future__ import annotations

import re
from typing import Any

from redis._parsers import _AsyncHiredisParser
from redis.exceptions import ConnectionError, InvalidResponse

# Elements that may be announced and not be there yet. The most in one array are the 16,384 ranges of a Cluster's slots
# and one stream or load for each replica.
MOST_AHEAD = 1 << 17
SPARE = 1 << 10  # elements that one read may announce beyond what its bytes can hold, before they are looked at closely
SHORTEST = 3  # bytes of an element
# The beginning of an array, map, set, push message or attribute with ten elements or more, or of a string of 100 MB or
# more: gateways write 1 MiB. hiredis refuses longer numbers, other spellings and other types.
_ANNOUNCED = re.compile(rb"(?:[*%~>|]|[$=](?=[0-9]{9}))([1-9][0-9]{1,18})\r\n")
# The same in two searches that begin with one byte, 50 times as fast, where `_ALIKE` has made all types one of two.
_elements = re.compile(rb"\*([1-9][0-9]{1,18})\r\n").findall
_long = re.compile(rb"\$[1-9][0-9]{8,18}\r\n").search
_ALIKE = bytes.maketrans(b"%~>|=", b"****$")
_BEGUN = re.compile(rb"[*%~>|$=][0-9]*\r?\Z")
_LONGEST = 24  # bytes of the beginning of an element


class Parser(_AsyncHiredisParser):
    """redis-py's hiredis parser, which refuses lengths that cannot be before hiredis allocates them.

    hiredis allocates all elements of an array when it reads its length, and walks them when it drops the array: 4 s for
    a billion. An element that arrives has at least 3 bytes, so the elements announced and not there yet are at most
    those announced less a third of the bytes. Where a read announces more than its bytes can hold, it is given to
    hiredis piece by piece. If hiredis has used up all bytes before an announcement, it is one, else a part of a string.
    """

    _reader: Any
    _stream: Any

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._data, self._at = b"", 0  # what was read, and how much of it hiredis has
        self._closely = False
        self._ahead = 0  # elements announced and not there yet, as far as reads were looked at closely

    async def can_read(self) -> bool:
        return self._at < len(self._data) or await super().can_read()

    async def read_from_socket(self) -> bool:
        if self._closely and self._feed_to_next():
            return True
        data = await self._stream.read(self._read_size)
        if not data:
            raise ConnectionError("Connection closed by server.")
        if self._ahead:
            self._ahead = max(0, self._ahead - len(data) // SHORTEST)
        if self._at < len(self._data):
            data = self._data[self._at :] + data
        self._data = data
        alike = data.translate(_ALIKE)
        lengths = _elements(alike)
        if (lengths and sum(map(int, lengths)) > len(data) // SHORTEST + SPARE) or _long(alike):
            self._at, self._closely = 0, True
            self._feed_to_next()
        elif data[-1] == 10:  # the end of a line
            self._reader.feed(data)
            self._at = len(data)
        else:
            self._at = 0
            self._feed_rest()
        return True

    def _feed_to_next(self) -> bool:
        """Feed hiredis up to the next announcement, or over it. Return whether anything was fed."""
        found = _ANNOUNCED.search(self._data, self._at)
        if found is None:
            self._closely = False
            return self._feed_rest()
        end = found.start()
        if end == self._at:
            if not self._reader.has_data():
                self._ahead += int(found[1])
                if self._ahead > MOST_AHEAD:
                    raise InvalidResponse(f"a length that cannot be: {found[0].strip().decode()}")
            end = found.end()
        self._reader.feed(self._data, self._at, end - self._at)
        self._at = end
        return True

    def _feed_rest(self) -> bool:
        """Feed hiredis all but the beginning of a last element, which may be an announcement.

        Return whether anything was fed.
        """
        begun = _BEGUN.search(self._data, max(self._at, len(self._data) - _LONGEST))
        end = begun.start() if begun else len(self._data)
        fed = end > self._at
        if fed:
            self._reader.feed(self._data, self._at, end - self._at)
        self._at = end
        return fed

    async def handle_push_response(self, response: Any, **options: Any) -> None:
        """Refuse a push message: no gateway asks for any, and RESP2, which gateways speak, has none."""
        raise InvalidResponse("a push message, which nobody asked for")
