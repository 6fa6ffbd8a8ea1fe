"""The priority of a request's class, sent to its engine: requests that wait there go in the order of the classes too.

Engines take a priority in the body, or in a header where an API's body has no place for it; which of both on which path
is the dialect's to say. The lower goes first: the highest class has 0, which is also what an engine takes for a request
that names none; a lower class has as much more as its priority is less. An engine that does not schedule by priority
ignores it. The client's own priority is replaced wherever it stands, since it would pass all classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ApiError
from ..http.messages import Request
from ..members import in_utf8, no_object, takes_members, with_members
from ..prompt.prompt import unread
from .exchange import Attempt, Exchange, Parent

if TYPE_CHECKING:
    from policies import QosClass

    from ..prompt import Prompt

FIELD = b"priority"
# How each spelling of that name begins that JSON knows: as it is, or with a small letter as an escape. No client that
# writes JSON spells letters so.
NAMED, ESCAPED = b'"priority"', (b"\\u006", b"\\u007")
LONGEST_READ = 2**18  # bytes of a body that the event loop reads for its priority: half a millisecond

# What makes the head of a request of this length: `exchange.request_head`, or one like it.
HeadOf = Callable[[Exchange, Attempt, int, Parent | None], bytes]


class _Body(msgspec.Struct):
    priority: Any = None


decode = msgspec.json.Decoder(_Body).decode


def has_priority(body: bytes) -> bool:
    """Whether a JSON object has a priority of its own, as far as one can tell: engines read some JSON that is none, and
    a long body is searched for the name without being read."""
    if NAMED not in body and not any(letters in body for letters in ESCAPED):
        return False
    if len(body) > LONGEST_READ:
        return True
    try:
        return decode(body).priority is not None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True


def encoding_refusal(request: Request) -> ApiError | None:
    """Why a request is refused in whose body no priority can be written: engines would take the client's own."""
    if not takes_members(request) or in_utf8(request.body):
        return None
    return no_object("requests have classes here, and that is where the priority of its class goes")


class Priorities:
    """Writes the priorities of `classes` into requests; `class_of` returns the class of a request."""

    def __init__(self, class_of: Callable[[Exchange, Prompt], QosClass], classes: Sequence[QosClass]):
        self._class_of, self._highest = class_of, max(one.priority for one in classes)

    def write(self, exchange: Exchange, attempt: Attempt, body: bytes, head_of: HeadOf) -> tuple[bytes, HeadOf]:
        """Return the body to send in place of `body`, and the function that makes the request's head."""
        prompt, replica = attempt.prompt, attempt.backend.replica
        if prompt is not None and replica.takes_priority:
            dialect = replica.dialect
            if prompt.path in dialect.priority_paths:
                return self._with_priority(exchange, prompt, body), head_of
            if prompt.path in dialect.priority_header_paths and dialect.priority_header is not None:
                line = b"%b: %d\r\n" % (dialect.priority_header, self._priority_of(exchange, prompt))
                return body, _with_line(head_of, line)
        if not takes_members(exchange.request) or not has_priority(body):
            return body, head_of
        prompt = exchange.prompt or unread(exchange.request.path, exchange.model)
        return self._with_priority(exchange, prompt, body), head_of

    def _with_priority(self, exchange: Exchange, prompt: Prompt, body: bytes) -> bytes:
        return with_members(body, {FIELD: b"%d" % self._priority_of(exchange, prompt)}) or body

    def _priority_of(self, exchange: Exchange, prompt: Prompt) -> int:
        return self._highest - self._class_of(exchange, prompt).priority


def _with_line(head_of: HeadOf, line: bytes) -> HeadOf:
    return lambda *args: b"%b%b\r\n" % (head_of(*args)[:-2], line)


def differ(classes: Sequence[QosClass]) -> bool:
    """Return whether classes differ in priority, so that there is one to send."""
    return len({one.priority for one in classes}) > 1
