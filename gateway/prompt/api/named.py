"""Which model a request names that is passed on without being prepared, and what else is asked for by name: in JSON, or
in a form with files in it.

Nothing is built but the name; what else is asked for stays as it is written. Of JSON the rest is skipped, of a form
only what stands before each part's content is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

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


_ABSENT, _NULL = msgspec.Raw(b""), b"null"


class NamedMembers(NamedTuple):
    """What a body says. `members`: those that were asked for and are there and not null, in JSON, or as a form's field
    has them; None for a body that is not read to its end, or could be read otherwise."""

    model: str | None
    members: Mapping[str, bytes | msgspec.Raw] | None


Reader = Callable[[str, bytes], NamedMembers]


def is_form(content_type: str) -> bool:
    return _FORM.match(content_type) is not None


def reader(names: Collection[str] = ()) -> Reader:
    """A function that reads the model of a body of some content type, and its members of these names. Of several with
    one name the last one counts, however it is spelled, as it does to engines."""
    fields = [("model", Any, None), *[(name, msgspec.Raw, _ABSENT) for name in names]]
    decode = msgspec.json.Decoder(msgspec.defstruct("Members", fields)).decode
    in_form = frozenset((b"model", *[name.encode() for name in names]))

    def read(content_type: str, body: bytes) -> NamedMembers:
        if is_form(content_type):
            match = _PLAIN_FORM.fullmatch(content_type)
            if match is None:
                return _UNREAD
            return _in_form(b"--" + (match[1] or match[2]).encode("latin-1", "replace"), body, in_form)
        try:
            found: Any = decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _UNREAD
        model = found.model if type(found.model) is str and found.model else None
        there = [(name, value) for name in names if (value := getattr(found, name)) is not _ABSENT]
        return NamedMembers(model, {name: value for name, value in there if bytes(value) != _NULL})

    return read


_UNREAD = NamedMembers(None, None)
_MODEL = reader()


def named_model(content_type: str, body: bytes) -> str | None:
    """The model that a body names, or None. What is wrong with a body is for the engine to say."""
    return _MODEL(content_type, body).model


def _in_form(delimiter: bytes, body: bytes, wanted: Collection[bytes]) -> NamedMembers:
    """Of several fields of one name the last one counts, as it does to engines: what a key may use is judged by it. A
    form that is not read to its end, or could be read otherwise, names none."""
    model, members = None, {}
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    for _ in range(_MOST_PARTS):
        begin = at + len(delimiter)
        if at == 1 or body[begin : begin + 2] not in (b"\r\n", b"--"):
            return _UNREAD
        if body[begin : begin + 2] == b"--":
            return NamedMembers(model, members)
        header_end = body.find(b"\r\n\r\n", begin, begin + _HEADER_BYTES)
        name = _field_of(body[begin + 2 : header_end], wanted) if header_end >= 0 else None
        if name is None:
            return _UNREAD
        end = body.find(b"\r\n" + delimiter, header_end + 2)
        if name == b"model":
            value = body[header_end + 4 : end] if 0 <= end < header_end + _LONGEST else b""
            model = value.decode("utf-8", "replace").strip() or None
        elif name in wanted:
            members[name.decode()] = body[header_end + 4 : end]
        at = end + 2
    return _UNREAD


def _field_of(header: bytes, wanted: Collection[bytes]) -> bytes | None:
    """The name of a part's field; None if its header is not written as clients write it, or it is a file that has a
    wanted name."""
    lines = header.split(b"\r\n")
    if not all(map(_PLAIN_HEADER.fullmatch, lines)):
        return None
    dispositions = [line for line in lines if line.lower().startswith(_DISPOSITION)]
    if len(dispositions) != 1 or (match := _FIELD.fullmatch(dispositions[0])) is None:
        return None
    name = match[1] if match[1] is not None else match[2]
    return None if name in wanted and match[3] else name
