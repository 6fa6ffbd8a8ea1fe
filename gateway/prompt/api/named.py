"""Reading the model and other named members from a request body that is forwarded without being parsed as a whole.

Bodies are JSON or multipart forms. Only the wanted members are read: the rest of a JSON body is skipped, and of a form
only the part headers are parsed. The values are returned as raw bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

_FORM = re.compile(r"multipart/form-data\s*(?:;|$)", re.IGNORECASE)
# The only spelling of the content type that is read here, because parsers disagree about others.
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
_MOST_PARTS = 2048  # parts of a form; engines refuse forms of more than 1,000 fields and 1,000 files
_HEADER_BYTES = 4096  # the most bytes of a part's header
_LONGEST = 1024  # the most bytes of a model's name; no model has a longer one


_ABSENT, _NULL = msgspec.Raw(b""), b"null"


class NamedMembers(NamedTuple):
    """The model and the wanted members of a request body.

    `members`: the wanted members that are present and not null, as raw JSON or raw form fields. None for a body that
    cannot be read to its end, or that an engine's parser could read differently.
    """

    model: str | None
    members: Mapping[str, bytes | msgspec.Raw] | None


Reader = Callable[[str, bytes], NamedMembers]


def is_form(content_type: str) -> bool:
    """Return whether a body with this content type is a multipart form."""
    return _FORM.match(content_type) is not None


def reader(names: Collection[str] = ()) -> Reader:
    """Return a function that reads the model and the members `names` from a body, given the body's content type.

    If a body has several members of one name, the last one is returned, even if the names are spelled with different
    JSON escapes. Engines also use the last one.
    """
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
    """Return the model that a request body names, or None if it names none or cannot be read."""
    return _MODEL(content_type, body).model


def _in_form(delimiter: bytes, body: bytes, wanted: Collection[bytes]) -> NamedMembers:
    """Read the model and the wanted fields of a multipart form.

    `delimiter`: the boundary with its leading hyphens. `wanted`: the names of the fields. If several fields have one
    name, the last one is returned. Engines also use the last one, and the permissions of API keys depend on this
    agreement. If the form cannot be read to its end, or an engine could read it differently, both results are None.
    """
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
    """Return the field name in the header of a form's part, or None if the part must not be interpreted.

    That is so for a header of unusual form, which engines may read differently, and for a file that is uploaded under
    one of the names in `wanted`.
    """
    lines = header.split(b"\r\n")
    if not all(map(_PLAIN_HEADER.fullmatch, lines)):
        return None
    dispositions = [line for line in lines if line.lower().startswith(_DISPOSITION)]
    if len(dispositions) != 1 or (match := _FIELD.fullmatch(dispositions[0])) is None:
        return None
    name = match[1] if match[1] is not None else match[2]
    return None if name in wanted and match[3] else name
