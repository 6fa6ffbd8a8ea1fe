"""Writing members (a name and a value) into the JSON object of a client's body without parsing it.

Members are appended at the end of the object: of two members with one name JSON parsers take the last, however the
first name is escaped, so appended members replace the client's own. A body of many MiB costs one copy.
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
    """Return whether this request has a JSON body whose prompt engines prefill."""
    return request.method == "POST" and bool(request.body) and request.path not in _WITHOUT_OBJECT


def in_utf8(body: bytes) -> bool:
    """Return whether Python, and so vLLM, reads the body as UTF-8: members cannot be added in other encodings."""
    return json.detect_encoding(body).startswith("utf-8")


def no_object(why: str) -> ApiError:
    """Return the 400 error for a body to which members cannot be added; `why`: what they are needed for."""
    return bad(f"the body must be a JSON object in UTF-8: {why}")


def with_members(body: bytes, members: Mapping[bytes, bytes]) -> bytes | None:
    """Return the JSON object in `body` with these members appended, or None if it cannot be an object.

    `members`: values in JSON by name. Invalid JSON stays invalid: within an open string, the quote of the first name
    ends the string, and the name then stands where JSON allows none.
    """
    end = len(body) if body.endswith(b"}") else len(body.rstrip(_SPACE))
    begins = body.startswith(b"{") or body.removeprefix(_MARK).lstrip(_SPACE).startswith(b"{")
    if not begins or body[end - 1 : end] != b"}":
        return None
    end -= 1
    if body[end - 1] in _SPACE:
        end = len(body[:end].rstrip(_SPACE))
    comma = b"" if body[end - 1 : end] == b"{" else b","
    # A large body is copied once: 1 MB takes as long as a request of usual size.
    return b"".join((memoryview(body)[:end], comma, b",".join([b'"%b":%b' % one for one in members.items()]), b"}"))
