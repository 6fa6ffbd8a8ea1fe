"""The priority of a request's service class, sent to its engine so that requests wait there in the classes' order.

Engines accept a priority in the body, or in a header where an API's body has no member for it. The engine's dialect
says which of the two they accept at which path.

Engines serve lower numbers first. So the highest class is sent as 0, which they also assume for requests without a
priority, and a lower class as the difference between the highest class's priority and its own. An engine that does not
schedule by priority ignores the number. A client's own priority is replaced, since it would override the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import ApiError
from ...http.messages import Request
from ...members import in_utf8, no_object, takes_members, with_members
from ...prompt.prompt import unread
from ..exchange import Attempt, Exchange
from ..outgoing import Outgoing

if TYPE_CHECKING:
    from policies import QosClass

    from ...prompt import Prompt

FIELD = b"priority"
# How that name may be spelt in JSON: plainly, or with an escaped lower-case letter, which no usual client writes. These
# are the beginnings of such escapes.
NAMED, ESCAPED = b'"priority"', (b"\\u006", b"\\u007")
LONGEST_READ = 2**18  # the longest body that is parsed for its priority, which takes half a millisecond


class _Body(msgspec.Struct):
    priority: Any = None


decode = msgspec.json.Decoder(_Body).decode


def has_priority(body: bytes) -> bool:
    """Return whether a request's body, a JSON object, may have a `priority` that its client wrote.

    A body that is too long to parse, or is not valid JSON, counts as having one if that name occurs in it.
    """
    if NAMED not in body and not any(letters in body for letters in ESCAPED):
        return False
    if len(body) > LONGEST_READ:
        return True
    try:
        return decode(body).priority is not None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True


def encoding_refusal(request: Request) -> ApiError | None:
    """Return the error for a request whose JSON body is not in UTF-8, so that no priority can be written into it.

    Returns None for any other request. If such a request were forwarded as it is, it might have a priority that its
    client wrote.
    """
    if not takes_members(request) or in_utf8(request.body):
        return None
    return no_object("requests have classes here, and that is where the priority of its class goes")


class Priorities:
    """The writer of service classes' priorities into requests.

    `class_of(exchange, prompt)`: returns a request's class, one of `classes`.
    """

    def __init__(self, class_of: Callable[[Exchange, Prompt], QosClass], classes: Sequence[QosClass]):
        self._class_of, self._highest = class_of, max(one.priority for one in classes)

    def before_send(self, exchange: Exchange, attempt: Attempt, outgoing: Outgoing) -> None:
        """Write the priority of a request's class into its body or its head.

        Where the engine accepts no priority, neither is changed, except that a priority in the body that the client
        wrote is replaced.
        """
        prompt, replica = attempt.prompt, attempt.backend.replica
        if prompt is not None and replica.takes_priority:
            dialect = replica.dialect
            if prompt.path in dialect.priority_paths:
                self._write_into_body(exchange, prompt, outgoing)
                return
            if prompt.path in dialect.priority_header_paths and dialect.priority_header is not None:
                outgoing.lines += b"%b: %d\r\n" % (dialect.priority_header, self._priority_of(exchange, prompt))
                return
        if takes_members(exchange.request) and has_priority(outgoing.body):
            prompt = exchange.prompt or unread(exchange.request.path, exchange.model)
            self._write_into_body(exchange, prompt, outgoing)

    def _write_into_body(self, exchange: Exchange, prompt: Prompt, outgoing: Outgoing) -> None:
        priority = b"%d" % self._priority_of(exchange, prompt)
        outgoing.body = with_members(outgoing.body, {FIELD: priority}) or outgoing.body

    def _priority_of(self, exchange: Exchange, prompt: Prompt) -> int:
        return self._highest - self._class_of(exchange, prompt).priority


def differ(classes: Sequence[QosClass]) -> bool:
    """Return whether the classes differ in priority; otherwise no priority need be sent."""
    return len({one.priority for one in classes}) > 1
