"""Members that the gateway writes into a client's JSON object, without reading it.

They go to the end of the object: of two members with one name JSON readers take the last, however the first is spelled,
so a client's own are replaced. A body of many MiB costs one copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from .errors import ApiError, bad
from .http.messages import Request
from .prompt.prompt import NO_PREFILL

_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which Python passes over

_FORMS = frozenset(("/v1/audio/transcriptions", "/v1/audio/translations"))  # in place of JSON
_WITHOUT_OBJECT = NO_PREFILL | _FORMS


def takes_members(request: Request) -> bool:
    """Whether an engine may compute a prompt as members of a JSON object in this request's body say."""
    return request.method == "POST" and bool(request.body) and request.path not in _WITHOUT_OBJECT


def in_utf8(body: bytes) -> bool:
    """Whether Python, and so vLLM, reads it as UTF-8; members cannot be written into the other encodings of JSON."""
    return json.detect_encoding(body).startswith("utf-8")


def no_object(why: str) -> ApiError:
    """The refusal of a body that takes no members; `why` says what for they are needed."""
    return bad(f"the body must be a JSON object in UTF-8: {why}")


def with_members(body: bytes, members: Mapping[bytes, bytes]) -> bytes | None:
    """The body of a JSON object with these members, by name their values in JSON; None for what cannot be an object.
    What is no JSON does not become any: what is added ends a string that is open, where no name may stand."""
    end = len(body) if body.endswith(b"}") else len(body.rstrip(_SPACE))
    begins = body.startswith(b"{") or body.removeprefix(_MARK).lstrip(_SPACE).startswith(b"{")
    if not begins or body[end - 1 : end] != b"}":
        return None
    end -= 1
    if body[end - 1] in _SPACE:
        end = len(body[:end].rstrip(_SPACE))
    comma = b"" if body[end - 1 : end] == b"{" else b","
    # Of a large body one copy is made: 1 MB takes as long as a request of usual size.
    return b"".join((memoryview(body)[:end], comma, b",".join([b'"%b":%b' % one for one in members.items()]), b"}"))
