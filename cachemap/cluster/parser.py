"""The parser of Redis's replies, which refuses impossible lengths before memory is allocated for them.

An impossible length raises InvalidResponse, as bytes that are not Redis's protocol do. The gateway then works on as it
does without Redis.
"""

from __future__ import annotations

import re
from typing import Any

from redis._parsers import _AsyncHiredisParser
from redis.exceptions import ConnectionError, InvalidResponse

# The most elements that may have been announced (by the length of an array) and not have arrived. The longest arrays
# have the 16,384 ranges of a Cluster's slots, or one stream or load for each replica.
MOST_AHEAD = 1 << 17
# A read that announces SPARE more elements than its bytes can hold is given to hiredis piece by piece and counted.
SPARE = 1 << 10
SHORTEST = 3  # bytes of the shortest element
# The beginning of an array, map, set, push message or attribute with ten elements or more, or of a string of 100 MB or
# more: gateways write 1 MiB. hiredis refuses longer numbers, other spellings and other types.
_ANNOUNCED = re.compile(rb"(?:[*%~>|]|[$=](?=[0-9]{9}))([1-9][0-9]{1,18})\r\n")
# The same search in two that begin with a fixed byte, which are 50 times as fast. First `_ALIKE` replaces each type's
# byte with one of two: * for types with elements, $ for strings.
_elements = re.compile(rb"\*([1-9][0-9]{1,18})\r\n").findall
_long = re.compile(rb"\$[1-9][0-9]{8,18}\r\n").search
_ALIKE = bytes.maketrans(b"%~>|=", b"****$")
_BEGUN = re.compile(rb"[*%~>|$=][0-9]*\r?\Z")
_LONGEST = 24  # the most bytes of an element's beginning: its type and its length


class Parser(_AsyncHiredisParser):
    """redis-py's hiredis parser, with a check that refuses impossible lengths before hiredis allocates memory for them.

    hiredis allocates all elements of an array when it reads the array's length, and visits all of them when it frees
    the array: 4 s for a billion. The check limits how many elements may be announced and not have arrived. Each element
    that arrives has at least 3 bytes, so these are at most the announced elements less a third of the bytes since. Data
    that announces more elements than its bytes can hold is given to hiredis piece by piece. Bytes that look like an
    announced length are one if hiredis has used up all bytes before them; otherwise they are a part of a string.
    """

    _reader: Any
    _stream: Any

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._data, self._at = b"", 0  # the bytes that were read last, and how many of them hiredis has
        self._closely = False  # the rest of `_data` is given to hiredis piece by piece
        self._ahead = 0  # elements announced and not arrived, in the reads that were given to hiredis piece by piece

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
        """Feed hiredis the data before the next announced length, or that length itself if the data begins with it.

        Returns whether anything was fed. Raises InvalidResponse if more elements are announced than can come.
        """
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
        """Feed hiredis all remaining data, except for an incomplete element at the end.

        The incomplete element could be half of an announced length. Returns whether anything was fed.
        """
        begun = _BEGUN.search(self._data, max(self._at, len(self._data) - _LONGEST))
        end = begun.start() if begun else len(self._data)
        fed = end > self._at
        if fed:
            self._reader.feed(self._data, self._at, end - self._at)
        self._at = end
        return fed

    async def handle_push_response(self, response: Any, **options: Any) -> None:
        """Raise InvalidResponse for a push message: gateways request none, and RESP2, which they speak, has none."""
        raise InvalidResponse("a push message, which nobody asked for")
