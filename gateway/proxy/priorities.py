"""A request's class, told to its engine as a priority: who waits in the engine goes in the order of the classes too.

Engines take it in the body, or in a header where an API's body has no place for it, the lower first: 0 is the highest
class, and what an engine takes a request for that says nothing; a lower class has as much more as its priority is less.
Some versions refuse a priority unless they were started to schedule by it, and others ignore it then: each process is
asked once, with a prompt of one word and an answer of one token, and is sent none before it has answered 200. The
client's own priority is replaced wherever it stands, since it would pass all classes; an engine that refuses priorities
refuses it as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import orjson

from replicas.access import session_to

from ..errors import ApiError
from ..http.messages import Request
from ..members import in_utf8, no_object, takes_members, with_members
from ..prompt.prompt import COMPLETIONS, unread
from .backend import Backend
from .exchange import Attempt, Exchange, Parent
from .token_ids import poster

if TYPE_CHECKING:
    from policies import QosClass

    from ..prompt import Prompt

log = logging.getLogger("hitherto.proxy")

ANSWER_SECONDS, PAUSE_SECONDS = 60.0, 30.0  # for an answer, and before the question is asked again without one
FIELD = b"priority"
# How each spelling of that name begins that JSON knows: as it is, or with a small letter as an escape. No client that
# writes JSON spells letters so.
NAMED, ESCAPED = b'"priority"', (b"\\u006", b"\\u007")
LONGEST_READ = 2**18  # bytes of a body that the event loop reads for its priority: half a millisecond
REFUSALS = (400, 422)  # of the field; others speak of the client's key or model, or of the moment

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


class _Known:
    """What one process has answered."""

    __slots__ = ("incarnation", "takes", "again_at", "asking")

    def __init__(self, incarnation: str | None):
        self.incarnation = incarnation
        self.takes: bool | None = None
        self.again_at = 0.0
        self.asking: asyncio.Task[None] | None = None


class Priorities:
    """`class_of`: whose priority a request has, of these `classes`."""

    def __init__(self, class_of: Callable[[Exchange, Prompt], QosClass], classes: Sequence[QosClass]):
        self._class_of, self._highest = class_of, max(one.priority for one in classes)
        self._known: dict[Backend, _Known] = {}

    def told(self, exchange: Exchange, attempt: Attempt, body: bytes, head_of: HeadOf) -> tuple[bytes, HeadOf]:
        """What is sent of this body, and what makes the head."""
        prompt, backend = attempt.prompt, attempt.backend
        dialect = backend.replica.dialect
        if prompt is None or prompt.path not in dialect.priority_paths + dialect.priority_header_paths:
            known = self._known.get(backend)
            refuses = known is not None and known.takes is False
            return body if refuses else self._instead(exchange, body), head_of
        known = self._known.get(backend)
        if known is None or known.incarnation != backend.incarnation:
            known = self._known[backend] = _Known(backend.incarnation)
        if known.takes is None:
            self._ask(known, backend, exchange, prompt)
        if not known.takes:
            return body if known.takes is False else self._instead(exchange, body), head_of
        priority = self._highest - self._class_of(exchange, prompt).priority
        if prompt.path in dialect.priority_paths:
            return with_members(body, {FIELD: b"%d" % priority}) or body, head_of
        assert dialect.priority_header is not None
        return body, _with_line(head_of, b"%b: %d\r\n" % (dialect.priority_header, priority))

    def _instead(self, exchange: Exchange, body: bytes) -> bytes:
        """The class's priority where the client says one, in a body that else is not read."""
        if not takes_members(exchange.request) or not has_priority(body):
            return body
        prompt = exchange.prompt or unread(exchange.request.path, exchange.model)
        return with_members(body, {FIELD: b"%d" % (self._highest - self._class_of(exchange, prompt).priority)}) or body

    def _ask(self, known: _Known, backend: Backend, exchange: Exchange, prompt: Prompt) -> None:
        """In the background, as the client of this request would ask."""
        if known.asking is not None or monotonic() < known.again_at:
            return
        self._known = {one: what for one, what in self._known.items() if not one.gone}
        self._known[backend] = known
        given = None if b"authorization" in backend.hidden else exchange.header(b"authorization")
        known.asking = asyncio.ensure_future(self._asked(known, backend, prompt.model, given))

    async def _asked(self, known: _Known, backend: Backend, model: str, authorization: str | None) -> None:
        replica = backend.replica
        given = {"authorization": authorization} if authorization else {}
        one = {**({"model": model} if model else {}), "prompt": "one", "max_tokens": 1, "priority": 1}
        try:
            async with session_to(
                replica.address,
                replica.tls,
                base_url=replica.url,
                headers={**given, **replica.headers, **replica.credentials},
                timeout=aiohttp.ClientTimeout(ANSWER_SECONDS),
            ) as session:
                status, _ = await poster(session)(COMPLETIONS, orjson.dumps(one))
        except Exception as error:  # also where its credentials are no header
            log.info("replica %s: whether it takes priorities is not known yet: %s", backend.id, error)
            return
        finally:
            known.asking, known.again_at = None, monotonic() + PAUSE_SECONDS
        if status == 200:
            known.takes = True
            log.info("replica %s gets the priority of each request's class from now on", backend.id)
        elif status in REFUSALS:
            known.takes = False
            log.info("replica %s refuses priorities with status %d, and gets none", backend.id, status)


def _with_line(head_of: HeadOf, line: bytes) -> HeadOf:
    return lambda *args: b"%b%b\r\n" % (head_of(*args)[:-2], line)


def differ(classes: Sequence[QosClass]) -> bool:
    """Whether there is anything to tell an engine."""
    return len({one.priority for one in classes}) > 1
