"""Errors with which the gateway answers, in the format of the API that the client called.

An error is OpenAI's error object or, on /v1/messages, Anthropic's. In a stream that has begun, it is an event with that
object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

JSON = [(b"content-type", b"application/json")]
MESSAGES = "/v1/messages"  # this path and all below it are Anthropic's API

# status -> (OpenAI type, default code, Anthropic type)
KINDS: dict[int, tuple[str, str, str]] = {
    400: ("invalid_request_error", "bad_request", "invalid_request_error"),
    401: ("invalid_request_error", "invalid_api_key", "authentication_error"),
    403: ("invalid_request_error", "permission_denied", "permission_error"),
    404: ("invalid_request_error", "not_found", "not_found_error"),
    405: ("invalid_request_error", "method_not_allowed", "invalid_request_error"),
    408: ("invalid_request_error", "request_timeout", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type", "invalid_request_error"),
    417: ("invalid_request_error", "expectation_failed", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_exceeded", "rate_limit_error"),
    431: ("invalid_request_error", "headers_too_large", "invalid_request_error"),
    500: ("server_error", "internal_error", "api_error"),
    502: ("server_error", "replica_failed", "api_error"),
    503: ("server_error", "no_replica_ready", "overloaded_error"),
    504: ("server_error", "replica_timeout", "api_error"),
}


class ApiError(Exception):
    """An error with which the gateway itself answers a request.

    `status`: the HTTP status; `message`: the text for the client.
    `type`, `param`, `code`: fields of the error object; if `type` or `code` is None, it follows from the status.
    `headers`: headers to add to those that every error has.
    `again`: False asks the client not to retry (OpenAI's and Anthropic's clients retry a 429 or 5xx by themselves).
    `discreet`: the message for tenants, who must not see replicas' names; None if `message` has none.
    `limit`: the name of the tenant's limit that refuses the request, for the log.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        again: bool = True,
        discreet: str | None = None,
        limit: str | None = None,
    ):
        super().__init__(message)
        self.status, self.message = status, message
        self.discreet = message if discreet is None else discreet
        self.type, self.param, self.code = type, param, code
        self.headers, self.again, self.limit = headers, again, limit

    def object(self, path: str, discreet: bool = False) -> dict[str, Any]:
        """Return the error object in the format of the API at `path`.

        `discreet`: use the message for tenants, which names no replica.
        """
        message = self.discreet if discreet else self.message
        return error_object(path, self.status, message, type=self.type, param=self.param, code=self.code)

    def body(self, path: str, discreet: bool = False) -> bytes:
        return orjson.dumps(self.object(path, discreet))


def bad(message: str, param: str | None = None) -> ApiError:
    """Return a 400 error for a mistake in the request; `param`: the field that has the mistake."""
    return ApiError(400, message, param=param)


def compressed(coding: str) -> ApiError:
    """Return a 415 error for a compressed body (`Content-Encoding: coding`), which nothing here decodes."""
    message = f"the body has Content-Encoding {coding[:100]!r}: send it as it is"
    return ApiError(415, message, headers=[(b"accept-encoding", b"identity")])


def error_object(
    path: str, status: int, message: str, *, type: str | None = None, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the error object in the format of the API at `path`."""
    openai_type, default_code, anthropic_type = KINDS.get(status, KINDS[500 if status >= 500 else 400])
    if path.startswith(MESSAGES):
        return {"type": "error", "error": {"type": anthropic_type, "message": message}}
    return {"error": {"message": message, "type": type or openai_type, "param": param, "code": code or default_code}}


def error_body(path: str, status: int, message: str, code: str | None = None) -> bytes:
    return orjson.dumps(error_object(path, status, message, code=code))


def error_event(path: str, status: int, message: str, number: int = 0, *, code: str | None = None) -> bytes:
    """Return the server-sent event that ends a broken stream of the API at `path`.

    No `[DONE]` follows the event, since the stream is incomplete. `number`: the event's sequence number, which only
    /v1/responses uses. On that path the event has the error twice: in its own fields, as OpenAI's reference says, and
    as the object `error`, because without that object OpenAI's client takes the stream for complete.
    """
    error = error_object(path, status, message, code=code)
    if path.startswith(MESSAGES):
        return b"event: error\ndata: %b\n\n" % orjson.dumps(error)
    if path.startswith("/v1/responses"):
        numbered = {**error["error"], "type": "error", "sequence_number": number, **error}
        return b"event: error\ndata: %b\n\n" % orjson.dumps(numbered)
    return b"data: %b\n\n" % orjson.dumps(error)
