"""Tenants' requests that tell an engine to hand a prompt's cache over are refused: the engine would tell its address,
read blocks of any tenant past their salts, and connect to whatever host the request names.

The two legs of a request, and pulls from a peer, are the gateway's own: they are written after this was looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from replicas.engines.handover import FIELDS, HEADERS, IN_IDS, NESTED

from ..errors import ApiError
from ..http.messages import Request
from ..prompt.api.named import Told, is_form, reader
from ..prompt.api.openai import parse

_ID = "request_id"
_LOOKED_AT = frozenset((*FIELDS, *NESTED, _ID))
_read = reader(sorted(_LOOKED_AT.union(*NESTED.values())))
_HEADERS = frozenset(HEADERS)
_IN_IDS = re.compile("|".join(IN_IDS).encode())
# What a body that cannot be read here has, if another reader may find one of the fields in it: its name, or an ASCII
# letter as an escape.
_NAMES = tuple(one.encode() for one in FIELDS)
_ESCAPED = (b"\\u004", b"\\u005", b"\\u006", b"\\u007")
# Engines decode a form's fields by its charset.
_OTHER_CHARSET = re.compile(r"charset=(?!\"?(?:utf-?8|us-ascii)\"?\s*(?:;|\Z))", re.IGNORECASE)


def refusal_of_head(request: Request, id: bytes) -> ApiError | None:
    """Why a request is refused for its id, or for another header."""
    if _IN_IDS.search(id) is not None:
        return _refusal("x-request-id", "the header ")
    if not request.has_any(_HEADERS):
        return None
    name = next(name for name in HEADERS if request.header(name) is not None)
    return _refusal(name.decode(), "the header ")


def refusal_of_object(request: Mapping[str, Any]) -> ApiError | None:
    """Why a request is refused whose JSON object was read."""
    return None if _LOOKED_AT.isdisjoint(request) else _refusal_of_object(request, NESTED)


def _refusal_of_object(given: Mapping[str, Any], nested: Mapping[str, Mapping], outer: str = "") -> ApiError | None:
    for name in FIELDS:
        if given.get(name) is not None:
            return _refusal(outer + name)
    for name, inner in nested.items():
        value = given.get(name)
        if type(value) is dict and (error := _refusal_of_object(value, inner, f"{outer}{name}.")) is not None:
            return error
    id = given.get(_ID)
    return _refusal(_ID) if type(id) is str and not outer and any(one in id for one in IN_IDS) else None


def read_unprepared(content_type: str, body: bytes) -> tuple[str | None, ApiError | None]:
    """The model that a body names which is passed on as it is, and why the request is refused; by one reading. What
    that does not take for JSON is read as Python does. Of what cannot be read at all, or of a form that is not written
    as clients write them, what is wrong is for the engine to say, unless it may hide a field."""
    told = _read(content_type, body)
    if not is_form(content_type):
        return told.model, _refusal_of(told, body, NESTED)
    if _OTHER_CHARSET.search(content_type) is not None:
        error: ApiError | None = _not_readable()
    elif told.members is None:
        error = _refusal_of_unread(body)
    else:
        error = _refusal_of(told, body, NESTED)
    if error is None and not body.startswith(
        b"--"
    ):  # perhaps JSON, to an engine that does not look at the content type
        error = _refusal_of(_read("", body), body, NESTED)
    return told.model, error


def _refusal_of(told: Told, body: bytes, nested: Mapping[str, Mapping], outer: str = "") -> ApiError | None:
    members = told.members
    if members is None:
        try:
            request, _ = parse(body)
        except ApiError:
            return _refusal_of_unread(body.replace(b"\0", b""))  # which UTF-16 and UTF-32 have between ASCII characters
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
    id = b"" if outer else bytes(members.get(_ID, b""))
    return _refusal(_ID) if _IN_IDS.search(id) is not None or any(one in id for one in _ESCAPED) else None


def _refusal_of_unread(body: bytes) -> ApiError | None:
    for name in _NAMES:
        if name in body:
            return _refusal(name.decode())
    return _not_readable() if any(one in body for one in _ESCAPED) else None


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
