"""The refusal of tenants' requests that tell an engine to transfer a prompt's KV cache (a hand-over).

The fields of such a request make an engine report its address, read KV cache blocks of any tenant regardless of salts,
and connect to whatever host the request names. The gateway itself writes these fields into requests after this check:
to pass a prompt's cache from prefill to decode, and to pull it from another replica.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Mapping
from typing import Any

import msgspec

from replicas.engines.handover import FIELDS, HEADERS, IN_IDS, NESTED

from ..errors import ApiError
from ..http.messages import Request
from ..prompt.api.named import NamedMembers, is_form, reader
from ..prompt.api.openai import parse

_ID = "request_id"
_LOOKED_AT = frozenset((*FIELDS, *NESTED, _ID))
_read = reader(sorted(_LOOKED_AT.union(*NESTED.values())))
_HEADERS = frozenset(HEADERS)
_IN_IDS = re.compile("|".join(IN_IDS).encode())
# Matches text in an unreadable body in which an engine's more lenient parser may find one of the fields: the field's
# name, or an escaped ASCII letter, with which the name may be written.
_HIDES_A_FIELD = re.compile("|".join((*FIELDS, r"\\u00[4-7]")).encode())
# A regular expression holds the GIL until it returns, so it searches a piece at a time: 64 KiB take up to 6 ms. Pieces
# overlap by the length of the longest match in UTF-32.
_PIECE = 64 * 1024
_LONGEST_MATCH = 4 * max(map(len, FIELDS))
# What may come before a JSON text's first character: white space, a byte order mark, and the zeros of UTF-16 and
# UTF-32.
_BEFORE_JSON = b" \t\r\n\0\xef\xbb\xbf\xfe\xff"
# Engines decode a form's fields by its charset.
_OTHER_CHARSET = re.compile(r"charset=(?!\"?(?:utf-?8|us-ascii)\"?\s*(?:;|\Z))", re.IGNORECASE)


def refusal_of_head(request: Request, id: bytes) -> ApiError | None:
    """Return the error for a request with a header that steers a transfer of KV cache, or None.

    `id`: the request's id (`x-request-id`), which some engines read such instructions from.
    """
    if _IN_IDS.search(id) is not None:
        return _refusal("x-request-id", "the header ")
    if _HEADERS.isdisjoint(request.named):
        return None
    name = next(name for name in HEADERS if request.header(name) is not None)
    return _refusal(name.decode(), "the header ")


def refusal_of_object(request: Mapping[str, Any]) -> ApiError | None:
    """Return the error for a parsed JSON body with a field that steers a transfer of KV cache, or None."""
    return None if _LOOKED_AT.isdisjoint(request) else _refusal_of_object(request, NESTED)


def _refusal_of_object(given: Mapping[str, Any], nested: Mapping[str, Mapping], outer: str = "") -> ApiError | None:
    for name in FIELDS:
        if given.get(name) is not None:
            return _refusal(outer + name)
    for name, inner in nested.items():
        value = given.get(name)
        if type(value) is dict and (error := _refusal_of_object(value, inner, f"{outer}{name}.")) is not None:
            return error
    return None if outer else _refusal_of_id(given.get(_ID))


def read_unprepared(content_type: str, body: bytes) -> tuple[str | None, ApiError | None]:
    """Return the model that a body names, or None, and the error that refuses the body, or None.

    This is for bodies that are passed on to an engine without being tokenized. If the fast reader does not take a body
    for JSON, Python's parser reads it. A body that neither reads, and a form of an unusual kind, is left for the engine
    to refuse, unless it may hide a field that steers a transfer of KV cache.
    """
    found = _read(content_type, body)
    if not is_form(content_type):
        return found.model, _refusal_of(found, body, NESTED)
    is_other = _OTHER_CHARSET.search(content_type) is not None
    error = _not_readable() if is_other else _refusal_of(found, body, NESTED)
    # An engine that ignores the content type may read this body as JSON.
    if error is None and _may_be_json(body):
        error = _refusal_of(_read("", body), body, NESTED)
    return found.model, error


def _refusal_of(found: NamedMembers, body: bytes, nested: Mapping[str, Mapping], outer: str = "") -> ApiError | None:
    members = found.members
    if members is None:
        if not _may_be_json(body):
            return _refusal_of_unread(body)
        try:
            request, _ = parse(body)
        except ApiError:
            return _refusal_of_unread(body)
        return _refusal_of_object(request, nested, outer)
    if not members:
        return None
    for name in FIELDS:
        if name in members:
            return _refusal(outer + name)
    for name, inner in nested.items():
        if name in members:
            value = bytes(members[name])
            if (error := _refusal_of(_read("", value), value, inner, f"{outer}{name}.")) is not None:
                return error
    return None if outer or _ID not in members else _refusal_of_id(_decoded(members[_ID]))


def _refusal_of_id(id: Any) -> ApiError | None:
    return _refusal(_ID) if type(id) is str and any(one in id for one in IN_IDS) else None


def _decoded(member: bytes | msgspec.Raw) -> str | None:
    """Return the string in a form's field or a JSON member, or None for a JSON member of another type.

    Characters outside ASCII are not preserved.
    """
    text = bytes(member).decode("latin-1")
    if isinstance(member, bytes):
        return text
    return json.loads(text) if text.startswith('"') else None


def _may_be_json(body: bytes) -> bool:
    """Return whether a body begins like a JSON object or list, in any encoding in which Python reads JSON."""
    for at in range(0, len(body), _PIECE):
        if text := body[at : at + _PIECE].lstrip(_BEFORE_JSON):
            return text.startswith((b"{", b"["))
    return False


def _refusal_of_unread(body: bytes) -> ApiError | None:
    # UTF-16 and UTF-32 have zeros between ASCII characters.
    wide = b"\0" in body[:4] or body.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    for at in range(0, len(body), _PIECE):
        piece = body[at : at + _PIECE + _LONGEST_MATCH]
        match = _HIDES_A_FIELD.search(piece.replace(b"\0", b"") if wide else piece)
        if match is not None:
            return _not_readable() if match[0].startswith(b"\\") else _refusal(match[0].decode())
    return None


def _not_readable() -> ApiError:
    return ApiError(400, "the body cannot be read: send UTF-8, and no ASCII letters as escapes")


def _refusal(name: str, what: str = "") -> ApiError:
    return ApiError(
        400,
        f"{what}'{name}' may not come with a request here: gateways tell engines with it where a prompt's KV cache goes, "
        "and this one does so itself. Leave it out",
        param=name,
        code="field_not_allowed",
    )
