"""Which model a request names that is passed on without being prepared: JSON, or a form with files in it.

Nothing is built but the name. Of JSON the rest is skipped, of a form only what stands before each part's content is
read.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_BOUNDARY = re.compile(
    r"""multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))""", re.IGNORECASE | re.DOTALL
)
_NAME = re.compile(
    rb"""^content-disposition:\s*form-data\s*;(?:[^\r\n]*;)?\s*name=(?:"model"|model)\s*(?:;|\r?$)""",
    re.IGNORECASE | re.MULTILINE,
)
_MOST_PARTS = 2048  # engines refuse forms of more than 1,000 fields and 1,000 files
_HEADER_BYTES = 4096  # of one part
_LONGEST = 1024  # of a name; a longer one is nobody's


class _Body(msgspec.Struct):
    model: Any = None


_DECODER = msgspec.json.Decoder(_Body)


def named_model(content_type: str, body: bytes) -> str | None:
    """The model that a body names, or None. What is wrong with a body is for the engine to say."""
    if (match := _BOUNDARY.match(content_type)) is not None:
        return _in_form(b"--" + (match[1] or match[2]).encode("latin-1", "replace"), body)
    try:
        model = _DECODER.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return model if type(model) is str and model else None


def _in_form(delimiter: bytes, body: bytes) -> str | None:
    """Of several fields of that name the last one counts, as it does to engines: what a key may use is judged by it."""
    found = None
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    for _ in range(_MOST_PARTS):
        if at < 2 and not body.startswith(delimiter):
            return found
        begin = at + len(delimiter)
        header_end = body.find(b"\r\n\r\n", begin, begin + _HEADER_BYTES)
        if header_end < 0:
            return found
        if _NAME.search(body[begin:header_end]):
            end = body.find(b"\r\n" + delimiter, header_end + 2, header_end + _LONGEST)
            value = body[header_end + 4 : end] if end >= 0 else b""
            found = value.decode("utf-8", "replace").strip() or None
        at = body.find(b"\r\n" + delimiter, header_end + 2) + 2
        if at < 2:
            return found
    return None
