"""Which model a request names that is passed on without being prepared: JSON, or a form with files in it.

Nothing is built but the name. Of JSON the rest is skipped, of a form only what stands before each part's content is
read.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_FORM = re.compile(r"multipart/form-data\s*(?:;|$)", re.IGNORECASE)
# Of what is written otherwise one parser may make something else than another one, so nothing is made of it here.
_PLAIN_FORM = re.compile(
    r"""multipart/form-data\s*;\s*(?:charset=[\w-]+\s*;\s*)?boundary=(?:"([^"\\]{1,70})"|([^\s;",\\]{1,70}))\s*(?:;\s*charset=[\w-]+\s*)?""",
    re.IGNORECASE,
)
_PLAIN_HEADER = re.compile(rb"[A-Za-z0-9-]+:[^\r\n]*")
_DISPOSITION = b"content-disposition:"
_FIELD = re.compile(
    rb"""content-disposition:[ \t]*form-data;[ \t]*name=(?:"([^"\\]*)"|([\w-]+))"""
    rb"""((?:;[ \t]*filename=(?:"[^"\\]*"|[\w.-]+))?(?:;[ \t]*filename\*=[^\s;"\\]+)?)[ \t]*""",
    re.IGNORECASE,
)
_MOST_PARTS = 2048  # engines refuse forms of more than 1,000 fields and 1,000 files
_HEADER_BYTES = 4096  # of one part
_LONGEST = 1024  # of a name; a longer one is nobody's


class _Body(msgspec.Struct):
    model: Any = None


_DECODER = msgspec.json.Decoder(_Body)


def named_model(content_type: str, body: bytes) -> str | None:
    """The model that a body names, or None. What is wrong with a body is for the engine to say."""
    if _FORM.match(content_type) is not None:
        match = _PLAIN_FORM.fullmatch(content_type)
        return _in_form(b"--" + (match[1] or match[2]).encode("latin-1", "replace"), body) if match else None
    try:
        model = _DECODER.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return model if type(model) is str and model else None


def _in_form(delimiter: bytes, body: bytes) -> str | None:
    """Of several fields of that name the last one counts, as it does to engines: what a key may use is judged by it. A
    form that is not read to its end, or could be read otherwise, names none."""
    found = None
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    for _ in range(_MOST_PARTS):
        begin = at + len(delimiter)
        if at == 1 or body[begin : begin + 2] not in (b"\r\n", b"--"):
            return None
        if body[begin : begin + 2] == b"--":
            return found
        header_end = body.find(b"\r\n\r\n", begin, begin + _HEADER_BYTES)
        name = _field_of(body[begin + 2 : header_end]) if header_end >= 0 else None
        if name is None:
            return None
        if name == b"model":
            end = body.find(b"\r\n" + delimiter, header_end + 2, header_end + _LONGEST)
            value = body[header_end + 4 : end] if end >= 0 else b""
            found = value.decode("utf-8", "replace").strip() or None
        at = body.find(b"\r\n" + delimiter, header_end + 2) + 2
    return None


def _field_of(header: bytes) -> bytes | None:
    """The name of a part's field; None if its header is not written as clients write it, or it is a file that has the
    model's name."""
    lines = header.split(b"\r\n")
    if not all(map(_PLAIN_HEADER.fullmatch, lines)):
        return None
    told = [line for line in lines if line.lower().startswith(_DISPOSITION)]
    if len(told) != 1 or (match := _FIELD.fullmatch(told[0])) is None:
        return None
    name = match[1] if match[1] is not None else match[2]
    return None if name == b"model" and match[3] else name
