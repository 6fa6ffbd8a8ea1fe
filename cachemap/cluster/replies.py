"""What no Redis replies: a length that cannot be, or something of another kind than the command returns.

Both raise InvalidResponse, as bytes that are not Redis' protocol do, and a gateway goes on as without Redis.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from redis._parsers import _AsyncHiredisParser
from redis.exceptions import ConnectionError, InvalidResponse

# What reading a reply of another kind can raise.
NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error)

# The beginning of an array, map, set, push message or attribute with 100,000 elements or more, where the most in one
# array are the 16,384 ranges of a Cluster's slots; or of a string of 100 MB or more: gateways write 1 MiB. `_ALIKE`
# makes all types one of two, as searches that begin with one byte are 50 times as fast. Such bytes within a string
# would be refused as well, but hashes and tags of blocks cannot be made to have them.
_IMPOSSIBLE = (re.compile(rb"\*[1-9][0-9]{5,18}\r\n"), re.compile(rb"\$[1-9][0-9]{8,18}\r\n"))
_ALIKE = bytes.maketrans(b"%~>|=", b"****$")
_LONGEST = 24  # bytes of the beginning of an element


def strange(command: str, error: BaseException | None = None) -> InvalidResponse:
    """Return the error for a well-formed reply that Redis does not give to this command."""
    why = f": {type(error).__name__}: {error}" if error is not None else ""
    return InvalidResponse(f"the reply to {command} is of another kind{why}")


class Parser(_AsyncHiredisParser):
    """redis-py's hiredis parser, which refuses lengths that cannot be before hiredis allocates them.

    hiredis allocates all elements of an array when it reads its length, and walks them when it drops the array: 4 s for
    a billion.
    """

    _reader: Any
    _stream: Any
    _begun = b""  # the end of the last read, in which an element may have begun

    async def read_from_socket(self) -> bool:
        data = await self._stream.read(self._read_size)
        if not data:
            raise ConnectionError("Connection closed by server.")
        joined = self._begun + data
        alike = joined.translate(_ALIKE)
        for impossible in _IMPOSSIBLE:
            if found := impossible.search(alike):
                announced = joined[found.start() : found.end()].strip().decode()
                raise InvalidResponse(f"a length that cannot be: {announced}")
        self._begun = joined[-_LONGEST:]
        self._reader.feed(data)
        return True

    async def handle_push_response(self, response: Any, **options: Any) -> None:
        """Refuse a push message: no gateway asks for any, and RESP2, which gateways speak, has none."""
        raise InvalidResponse("a push message, which nobody asked for")
