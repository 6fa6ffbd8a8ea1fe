"""Writing members (a name and a value) into the JSON object of a client's body without parsing it.

Members are appended at the end of the object. If an object has two members of one name, JSON parsers take the last,
however the first name is escaped. Appended members therefore replace the client's own. A body of many MiB costs one
copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from .errors import ApiError, bad
from .http.messages import Request
from .prompt.prompt import NO_PREFILL

_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"  # the byte order mark of UTF-8, which Python's JSON parser skips

_FORMS = frozenset(("/v1/audio/transcriptions", "/v1/audio/translations"))  # their bodies are forms, not JSON
_WITHOUT_OBJECT = NO_PREFILL | _FORMS


def takes_members(request: Request) -> bool:
    """Return whether members can be added to this request: a POST of a JSON body with a prompt that engines prefill."""
    return request.method == "POST" and bool(request.body) and request.path not in _WITHOUT_OBJECT


def in_utf8(body: bytes) -> bool:
    """Return whether Python's JSON parser, which vLLM uses, reads the body as UTF-8.

    Members can be added in no other encoding.
    """
    return json.detect_encoding(body).startswith("utf-8")


def no_object(why: str) -> ApiError:
    """Return the 400 error for a body to which members cannot be added; `why`: what the members are needed for."""
    return bad(f"the body must be a JSON object in UTF-8: {why}")


def with_members(body: bytes, members: Mapping[bytes, bytes]) -> bytes | None:
    """Return the JSON object in `body` with these members appended, or None if the body cannot be a JSON object.

    `members`: values as JSON text, by name. A body of invalid JSON stays invalid, even one that ends inside a string:
    the quote before the first appended name ends that string, and the name then stands where JSON allows none.
    """
    end = len(body) if body.endswith(b"}") else len(body.rstrip(_SPACE))
    begins = body.startswith(b"{") or body.removeprefix(_MARK).lstrip(_SPACE).startswith(b"{")
    if not begins or body[end - 1 : end] != b"}":
        return None
    end -= 1
    if body[end - 1] in _SPACE:
        end = len(body[:end].rstrip(_SPACE))
    comma = b"" if body[end - 1 : end] == b"{" else b","
    # A large body is copied only once, since copying 1 MB takes as long as a whole request of usual size.
    return b"".join((memoryview(body)[:end], comma, b",".join([b'"%b":%b' % one for one in members.items()]), b"}"))
