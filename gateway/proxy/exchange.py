"""A client's request, from its last byte in to the last byte of its answer out, and its attempts.

An attempt is one leg of an exchange, to one replica: what was sent there and what came back. It is the sink of its
upstream connection, and holds what is known of the leg; what follows from each call is for the conductor to say.

An exchange is driven by calls from the client's side, from whoever prepares its prompt and finds it a replica, and from
the sweep's deadlines. Each becomes an event; the table in `states` says what follows, and the conductor does it.
Nothing waits here, and no task is made for a request unless its prompt is long or a connection has to be opened.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from policies.outputs import LEAST_OUTPUT

from ..errors import ApiError
from ..http.downstream import Downstream
from ..http.messages import KEEP_ALIVE, Request
from ..http.upstream import Head, Upstream, UpstreamError
from .answers import ANY_EVENT, OUTPUT_MARKS, USAGE, USAGE_KEY_BYTES, Beginning, UsageSearch, has_end, output_events
from .blame import UnattributedError
from .retries import AWAY, CLOSED, NO_CRASHES, TRANSFER_FAILED
from .states import ATTEMPT_TRANSITIONS, AttemptEvent, AttemptState, ExchangeEvent, ExchangeState, Leg

if TYPE_CHECKING:
    from policies import Placement
    from replicas.engines.transfer import Transfer

    from ..prompt import Prompt
    from ..tenants.limits import Cost
    from ..tenants.metering import Charge
    from ..tenants.tenant import Tenant
    from .answers import Usage
    from .backend import Backend
    from .responses import Stored
    from .resume.record import StreamRecord


log = logging.getLogger("hitherto.proxy")

# Reads kept to find the usage in: vLLM writes it, what ends the stream ([DONE], message_stop) and the last
# chunk one by one, and each may be a read of its own. One more, should a read end within the usage.
TAIL = 4
# A read of fewer bytes joins the one before it where that has fewer as well: many tiny reads do not push the usage out.
TINY = 128
# And of each as much as matters, where a client stops reading: a read may be 256 kB.
TAIL_BYTES = 4096
CONNECTING, ANSWERING = AttemptState.CONNECTING, AttemptState.ANSWERING
PREFILL = Leg.PREFILL


class AttemptHandler(Protocol):
    """Does what follows from each call of an attempt's replica."""

    def connected(self, attempt: Attempt, upstream: Upstream) -> None: ...
    def head(self, attempt: Attempt, body: bytes) -> None: ...
    def on_body(self, attempt: Attempt, data: bytes) -> None: ...
    def on_complete(self, attempt: Attempt) -> None: ...
    def lost(self, attempt: Attempt, error: UpstreamError) -> None: ...


class Attempt:
    __slots__ = (
        # given
        "backend", "placement", "prompt", "new_connection", "had_whole", "without_ids",
        # which leg it is and its body; None where it is the whole, with the client's
        "leg", "body",
        # whose it is: the exchange, its client and who conducts both; only None where the bytes pass elsewhere
        "exchange", "client", "conductor",
        # what was sent
        "state", "upstream", "sent_ids",
        # the answer: its status and head, and the status that an error behind a 200 amounts to, 0 without one; whether
        # the prompt was computed all the same
        "status", "response_head", "fault", "computed", "streams",
        # `withheld`: the first bytes of its body, held back because they show nothing of an answer yet; `beginning`:
        # what they show of a stream; `looked_at`: how many of them there were at the last look; `seen_late`: they were
        # passed on nevertheless, so its first token was noticed some time after it came
        "withheld", "beginning", "looked_at", "seen_late",
        # `tail`: the last reads of the answer, of `pieces` so far; `mark`: what each event that brings output has, of a
        # stream whose client asked for no usage, and `events`: how many of them came, there and where it is metered;
        # `usage`: what reads its usage, once that has begun; `pauses`: how often its client did not keep up
        "tail", "pieces", "mark", "events", "usage", "pauses", "seen_pieces", "seen_at",
        # monotonic seconds, 0.0 for what did not happen; `first_at`: of the answer itself, not of other bytes
        "begun_at", "sent_at", "first_at", "ended_at",
        # why it failed, if it did
        "error",
        # with traces on: its span, and the seconds to the first token that were predicted when it began
        "context", "predicted_ttft",
    )  # fmt: skip
    is_continued = asks_ids = False

    def __init__(
        self,
        backend: Backend,
        placement: Placement,
        prompt: Prompt | None,
        streams: bool,
        begun_at: float,
        *,
        new_connection: bool = False,
        had_whole: bool = False,
        without_ids: bool = False,
        leg: Leg | None = None,
        body: bytes | None = None,
    ):
        """`new_connection`: not on a kept connection. `had_whole`: the replica may have read all of the request on
        another one, which it closed. `without_ids`: without token ids, whatever the replica takes."""
        self.leg, self.body = leg, body
        self.backend, self.placement, self.prompt = backend, placement, prompt
        self.new_connection, self.without_ids, self.streams = new_connection, without_ids, streams
        self.had_whole = had_whole
        self.exchange: Exchange = None  # type: ignore[assignment]  # until it is added to one
        self.client: Downstream = None  # type: ignore[assignment]  # until it is the exchange's
        self.conductor: AttemptHandler = None  # type: ignore[assignment]  # as the client
        self.state = CONNECTING
        self.upstream: Upstream | None = None
        self.response_head: Head = None  # type: ignore[assignment]  # until the head is there
        self.sent_ids = self.computed = self.seen_late = False
        self.status = self.fault = self.looked_at = self.pieces = self.events = self.seen_pieces = self.pauses = 0
        self.withheld = b""
        self.mark: bytes | None = None
        self.beginning: Beginning | None = None
        self.usage: UsageSearch | None = None
        self.tail: deque[bytes] = deque(maxlen=TAIL)
        self.begun_at = begun_at
        self.seen_at = self.sent_at = self.first_at = self.ended_at = 0.0
        self.error: Exception | None = None
        self.context: Any = None
        self.predicted_ttft = 0.0

    def could_not_fetch(self, kind: str) -> bool:
        """Return whether this is a second leg and `kind` is a failure that engines show when they cannot fetch the
        prompt's cache."""
        return self.leg is Leg.DECODE and kind in TRANSFER_FAILED

    def advance(self, event: AttemptEvent) -> None:
        self.state = ATTEMPT_TRANSITIONS[self.state, event]

    def end_as(self, event: AttemptEvent, error: Exception | None = None) -> None:
        """Nothing stays connected: closing is what makes an engine give a request up."""
        self.state = ATTEMPT_TRANSITIONS[self.state, event]
        self.ended_at, self.error, self.withheld, self.beginning = monotonic(), error, b"", None
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.drop()

    def repeat(self, *, new_connection: bool = False, unread: bool = False, without_ids: bool = False) -> Attempt:
        """The next one, to the same replica and on the same reservation. `unread`: the replica cannot have read all of
        the request on this one's connection."""
        streams = self.prompt is not None and self.prompt.stream and self.leg is not PREFILL
        return self.__class__(
            self.backend,
            self.placement,
            self.prompt,
            streams,
            monotonic(),
            new_connection=new_connection or self.new_connection,
            had_whole=self.had_whole or (new_connection and not unread),
            without_ids=without_ids or self.without_ids,
            leg=self.leg,
            body=self.body,
        )

    # --- what the replica's side calls

    def connected(self, upstream: Upstream) -> None:
        self.conductor.connected(self, upstream)

    def head(self, status: int, head: Head, body: bytes) -> None:
        self.status, self.response_head = status, head
        self.conductor.head(self, body)

    def data(self, data: bytes) -> None:
        if self.state is ANSWERING:
            if len(data) < TINY:
                keep(self.tail, data)
            else:
                self.tail.append(data)
            self.pieces += 1
            if self.mark is not None:
                self.events += data.count(self.mark)
            self.client.transport.write(data)
        else:
            self.conductor.on_body(self, data)

    def count_events(self, data: bytes) -> None:
        """Count the events that bring output from here on, the first bytes: nobody else tells how many tokens came."""
        label = self.exchange.label
        self.mark, self.events = OUTPUT_MARKS.get(label, ANY_EVENT), output_events(label, data, True)

    def end(self) -> None:
        self.upstream = None
        self.conductor.on_complete(self)

    def closed(self) -> None:
        """The replica closed the connection, as it does after a body whose end nothing else tells, and when it dies."""
        head, seen = self.response_head, self.withheld or b"".join(self.tail)
        whole = bool(self.withheld) or (self.pieces <= TAIL and not self.pauses)
        record = self.exchange.stream_record
        if (record is not None and not record.is_unread) or head.get(b"content-encoding") is not None:
            self.end()  # the record knows whether it is whole, and nobody can look into what is encoded
        elif self.status >= 400:
            self.end()  # its status is what it says, with a body or without
        elif not has_end(self.exchange.label, seen, self.streams, head.get(b"content-type") or b"", whole):
            self.lost(UpstreamError(CLOSED, "closed its connection in the middle of an answer"))
        else:
            self.end()

    def lost(self, error: UpstreamError) -> None:
        self.conductor.lost(self, error)


class MeteredAttempt(Attempt):
    """One whose tokens somebody asks about: a tenant's limits, or the usage log. Its stream's
    events that bring output are counted, each a token or a few, however many of them a read has: not all clients ask
    for usage, and one that leaves gets none. Of an answer in one piece, and of a response, usage is found wherever it
    stands: behind it vLLM writes a prompt's log probabilities and token ids, if a client asks for them, and what the
    client says of its user."""

    __slots__ = ()

    def data(self, data: bytes) -> None:
        if self.state is ANSWERING:
            self.pieces += 1
            meter(self, data)
            self.client.transport.write(data)
        else:
            self.conductor.on_body(self, data)


def meter(attempt: Attempt, data: bytes) -> None:
    """Take note of a read of an answer that is metered."""
    if attempt.streams:
        attempt.events += output_events(attempt.exchange.label, data, not attempt.events)
    search, tail = attempt.usage, attempt.tail
    if search is not None:
        search.feed(data)
    elif not attempt.streams or attempt.exchange.tells_response:
        found = b"".join(tail)[-USAGE_KEY_BYTES:] + data
        if USAGE.search(found) is not None:
            attempt.usage = search = UsageSearch()
            search.feed(found)
    keep(tail, data)


def keep(tail: deque[bytes], data: bytes) -> None:
    """Add a read to the last ones of an answer."""
    if len(data) < TINY and tail and len(tail[-1]) < TINY:
        tail[-1] += data
    else:
        tail.append(data)


def output_tokens(attempt: Attempt, usage: Usage | None) -> int:
    """Return how many tokens came out: the engine's own count, else the number of events that brought output.

    Where the events of a stream could not be found because it is compressed, its reads are counted instead: there are a
    few more of them at its end, and fewer where several events came in one read.
    """
    if usage is not None and usage.completion is not None:
        return usage.completion
    return (attempt.events or attempt.pieces) if attempt.streams else 0


def time_per_token(attempt: Attempt, tokens: int) -> float | None:
    """Return the seconds between two of a stream's tokens, or None where they cannot be known: for a short answer, one
    whose client did not keep up, and one that broke off."""
    if not attempt.streams or tokens <= LEAST_OUTPUT or attempt.pauses or attempt.is_continued or attempt.seen_late:
        return None
    return (attempt.ended_at - attempt.first_at) / (tokens - 1)


class Legs:
    """What an exchange in two legs has besides its attempts: `placement` is the second leg's reservation until that leg
    is sent, `unsent` the first leg's where somebody else sends that, until the answer begins; `first` is the first leg
    while it runs beside the second one, which is the last attempt, and `computed_at` when it was complete. `computing`:
    the seconds that it is predicted to take where the second one waits for it. `parameters`: what the second leg is
    told of the first, by an answer of that good until `until`, in monotonic seconds. `cached`: prompt tokens that the
    first leg was predicted to find; `moved`: those that the decoder lacks, whose transfer takes `moving` seconds as
    predicted and took `moved_in`, if that is known."""

    __slots__ = (
        "transfer",
        "first",
        "computed_at",
        "prefiller",
        "decoder",
        "placement",
        "unsent",
        "computing",
        "cached",
        "moved",
        "moving",
        "moved_in",
        "usage",
        "parameters",
        "until",
    )

    def __init__(
        self,
        transfer: Transfer,
        prefiller: Backend,
        decoder: Backend,
        placement: Placement,
        cached: int,
        moved: int,
        moving: float,
    ):
        self.transfer, self.prefiller, self.decoder = transfer, prefiller, decoder
        self.placement: Placement | None = placement
        self.unsent: Placement | None = None
        self.first: Attempt | None = None
        self.computing = self.computed_at = 0.0
        self.cached, self.moved, self.moving = cached, moved, moving
        self.moved_in: float | None = None
        self.usage: Usage | None = None  # of the first leg's answer
        self.parameters, self.until = b"", 0.0


PREPARING, PREPARED, PLACED = ExchangeState.PREPARING, ExchangeEvent.PREPARED, ExchangeEvent.PLACED


class ExchangeHandler(AttemptHandler, Protocol):
    """Does what follows from each event of an exchange, and of its attempts; `first_legs` of those whose answer is
    kept."""

    @property
    def first_legs(self) -> AttemptHandler: ...

    def dispatch(self, exchange: Exchange, event: ExchangeEvent, detail: Any = None) -> None: ...


class Exchange:
    __slots__ = (
        # given
        "conductor", "client", "request", "id", "label",
        # whose API key it brought, and what it claims of that tenant's limits; None without --api-keys, or limits;
        # whether its answer's tokens are counted, and what its attempts are made as
        "tenant", "charge", "metered", "attempt_type",
        # found out: its prompt, or the model that a request without one names; the stored response it is about, if any,
        # which only one replica has
        "state", "prompt", "model", "response",
        # the head that its client has, where comments alone have followed: an error can be told in the stream alone
        "opened",
        # the stored response that its answer makes or tells; what it has cost, once somebody asked
        "stored", "cost",
        # its attempts, the last one at the end; the status of an answer that is ours
        "attempts", "status",
        # what it has besides if it is in two legs, and whether it is not to be any more
        "legs", "stays_whole",
        # what is kept of its stream so that another replica can resume it; None without --continue-streams
        "stream_record",
        # replicas that it is not to get again; how many attempts that counts as, and how many of them went down or hung
        # with it; errors that it was answered with
        "tried", "attempts_used", "crashes", "unattributed_errors",
        # monotonic seconds; what the gateway's own stages took of them
        "begun", "prepared_at", "stages",
        # with traces on, its trace, and why it was answered with an error of ours or cut
        "trace", "error",
    )  # fmt: skip

    def __init__(self, conductor: ExchangeHandler, client: Downstream, request: Request, request_id: bytes, label: str):
        self.conductor = conductor
        self.client = client
        self.request = request
        self.id = request_id
        self.label = label
        self.tenant: Tenant | None = None
        self.charge: Charge | None = None
        self.metered = False
        self.attempt_type = Attempt
        self.state = PREPARING
        self.prompt: Prompt | None = None
        self.model: str | None = None
        self.response: str | None = None
        self.opened: Head | None = None
        self.stored: Stored | None = None
        self.cost: Cost | None = None
        self.attempts: list[Attempt] = []
        self.legs: Legs | None = None
        self.stays_whole = False
        self.stream_record: StreamRecord | None = None
        self.status = self.attempts_used = 0
        self.crashes = NO_CRASHES
        self.tried: tuple[Backend, ...] = ()
        self.unattributed_errors: tuple[UnattributedError, ...] = ()
        # The clock starts when the request is there: what its upload took is the client's.
        self.begun = monotonic()
        self.prepared_at = 0.0
        self.stages: list[tuple[str, float]] = []
        self.trace: Any = None
        self.error: Exception | None = None

    def meter(self) -> None:
        """Count the tokens of its answer. Before its first attempt is made."""
        self.metered, self.attempt_type = True, MeteredAttempt

    @property
    def attempt(self) -> Attempt | None:
        """The last one."""
        return self.attempts[-1] if self.attempts else None

    @property
    def tells_response(self) -> bool:
        """Whether its answer is a response (`/v1/responses`). The last event of such a stream has all of it within."""
        return self.label == "responses" or self.response is not None

    @property
    def beginning(self) -> Attempt:
        """The attempt with which its answer began: the last one, unless that resumes it."""
        record = self.stream_record
        return self.attempts[-1 if record is None or not record.breaks else record.first]

    @property
    def answered_with(self) -> int:
        """The status that the client was told, ours or its replica's; 0 before."""
        return self.status or (self.beginning.status if self.attempts else 0)

    @property
    def fault(self) -> int:
        """The status that an error behind a replica's 200 amounts to, 0 without one."""
        return self.attempts[-1].fault if self.attempts and not self.status else 0

    @property
    def needs_replica(self) -> bool:
        """Whether a replica is wanted."""
        if self.state is ExchangeState.RESUMING:
            return self.attempts[-1].state is AttemptState.ENDED
        return self.state is ExchangeState.PLACING

    @property
    def is_continued(self) -> bool:
        """Whether its last attempt resumes what another replica began."""
        return self.stream_record is not None and self.stream_record.breaks > 0

    @property
    def unanswered(self) -> Attempt | None:
        """What was sent, and nothing of its answer has gone to the client."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.state is AttemptState.AWAITING else None

    def run_isolated(self, step: Callable[..., None], *given: object) -> None:
        """Call `step`; an exception in it, a bug of ours, ends this request alone, with an answer if it has none."""
        try:
            step(*given)
        except Exception as error:
            has_begun = self.is_continued or self.opened is not None or (self.attempts and self.attempts[-1].pieces)
            if has_begun and self.client.exchange is self:
                log.error("an answer that was under way made the gateway fail", exc_info=error)
                self.client_gone()
                self.client.abort()
            else:
                self.client.failed(self, error)

    def forget_body(self) -> None:
        """It will not be sent again. Whoever else has this request may have it for long: the client's side until the
        answer ends, a queue until its turn."""
        self.request.body = b""
        if self.legs is not None:
            self.attempts[-1].body = None
            if self.legs.first is not None:
                self.legs.first.body = None
        self.client.release()

    # --- what the client's side calls

    def client_gone(self) -> None:
        if self.state is not ExchangeState.ENDED:
            self.conductor.dispatch(self, ExchangeEvent.GONE)

    def cut(self) -> None:
        if self.state is not ExchangeState.ENDED:
            self.conductor.dispatch(self, ExchangeEvent.GONE, ConnectionAbortedError("the gateway is shutting down"))

    def pause(self) -> None:
        attempt = self.attempt
        if attempt is not None and attempt.upstream is not None:
            attempt.upstream.pause()
            attempt.pauses += 1
            attempt.tail = deque((piece[-TAIL_BYTES:] for piece in attempt.tail), TAIL)

    def resume(self) -> None:
        attempt = self.attempt
        if attempt is not None and attempt.upstream is not None:
            attempt.upstream.resume()

    # --- what those call who prepare its prompt and find it a replica

    def prepared(self, prompt: Prompt | None) -> None:
        if self.state is PREPARING:
            self.prompt = prompt
            if prompt is not None:
                self.response = prompt.previous_response
            self.conductor.dispatch(self, PREPARED)

    def refused(self, error: ApiError) -> None:
        if self.state is PREPARING:
            self.conductor.dispatch(self, ExchangeEvent.REFUSED, error)

    def add_attempt(self, attempt: Attempt) -> None:
        """Go on with this attempt: a replica is found, and the request is counted there."""
        attempt.exchange, attempt.client, attempt.conductor = self, self.client, self.conductor
        if attempt.leg is PREFILL:
            attempt.conductor = self.conductor.first_legs
        self.prompt = attempt.prompt
        self.attempts.append(attempt)

    def placed(self) -> None:
        self.conductor.dispatch(self, PLACED)

    def held(self) -> None:
        """It waits in the queue."""
        self.conductor.dispatch(self, ExchangeEvent.HELD)

    def called(self, place: Callable[[Any], None]) -> None:
        """It is its turn, perhaps. `place`: what its own step to placing calls as well."""
        self.conductor.dispatch(self, ExchangeEvent.CALLED)

    @property
    def size(self) -> int:
        """Bytes that it holds while it waits."""
        return len(self.request.body)

    def header(self, name: bytes) -> str | None:
        return self.request.header(name)

    def unplaced(self, error: ApiError) -> None:
        """Nobody can take it."""
        error.__traceback__ = None  # it has this request in its frames, and a trace keeps the error: a cycle
        if self.tried:
            why = f"no replica is left after {len(self.attempts)} attempt(s)"
            self.conductor.dispatch(self, ExchangeEvent.EXHAUSTED, self.exhausted(why))
        else:
            self.conductor.dispatch(self, ExchangeEvent.REFUSED, error)

    def exhausted(self, why: str, again: bool = True, **options: Any) -> ApiError:
        """The answer to it once its last attempt has failed and no other is made. An engine that ends, or takes no
        request, comes back or is replaced, so 503, as for requests that come a second later and find nobody ready."""
        attempt = self.attempts[-1]
        error = attempt.error
        last = f"the last: replica {attempt.backend.id}: {error}"
        is_away = isinstance(error, UpstreamError) and (error.unread or error.kind in AWAY)
        status = 503 if again and is_away else 502
        return ApiError(status, f"{why}; {last}", discreet=why, again=again, **options)


class Parent(NamedTuple):
    """The span that the replica's own are to be below: the header's value, and which of the client's it replaces."""

    value: bytes
    replaces: frozenset[bytes]


def request_head(exchange: Exchange, attempt: Attempt, length: int, parent: Parent | None) -> bytes:
    """`parent`: None where what the client said of that stands."""
    request, backend = exchange.request, attempt.backend
    dropped = backend.not_forwarded if parent is None else backend.not_forwarded | parent.replaces
    # The id is written here whether the client named it or not: one that the client's `Connection` names is not passed
    # on, and yet the engine gets the id that is logged and echoed.
    head = b"%b %b HTTP/1.1\r\n%bx-request-id: %b\r\n%b" % (
        request.method.encode(),
        request.target,
        backend.host_line,
        exchange.id,
        request.end_to_end(dropped),
    )
    if parent is not None:
        head += b"traceparent: %b\r\n" % parent.value
    if length or request.method in ("POST", "PUT", "PATCH"):
        head += b"content-length: %d\r\n" % length
    return head + b"\r\n"


# Proxies like nginx collect an answer before they pass it on, unless it says this.
NO_BUFFERING = b"x-accel-buffering: no\r\n"


class Added:
    """The header lines that the gateway adds to a replica's answer. `replica`: which one it was; `cached_tokens`: how
    many tokens of the prompt it was predicted to hold."""

    def __init__(self, replica: bool, cached_tokens: bool):
        self._replica, self._cached_tokens = replica, cached_tokens

    def lines(self, exchange: Exchange, attempt: Attempt, last: bool) -> bytes:
        """`last`: the connection ends with this answer."""
        lines = b"" if attempt.response_head.get(b"x-request-id") is not None else b"x-request-id: %b\r\n" % exchange.id
        if attempt.streams and attempt.response_head.get(b"x-accel-buffering") is None:
            lines += NO_BUFFERING
        if self._replica:
            lines += b"x-hitherto-replica: %b\r\n" % attempt.backend.id.encode()
        if self._cached_tokens and attempt.prompt is not None:
            held = attempt.placement.predicted if exchange.legs is None else exchange.legs.cached
            lines += b"x-hitherto-cached-tokens: %d\r\n" % held
        if exchange.charge is not None:
            lines += exchange.charge.header_lines()
        if last or attempt.response_head.until_close or not exchange.request.keep_alive:
            lines += b"connection: close\r\n"
        elif exchange.request.http10:
            lines += b"%b: %b\r\n" % KEEP_ALIVE
        return lines


Item = TypeVar("Item")

# What else the loop has waits meanwhile (`prompt.offload` bounds the time that prompts take of it). 16 and 32 at a time
# cost the same (24 pairs of bursts: .96 to 1.04 of each other), 8 an eighth more where prompts are long.
MOST = 12


class Batcher(Generic[Item]):
    """Items that are worked on by the dozen, so that of several stages each can be done for all before the next one.

    A busy loop wakes up to a dozen requests. From the socket to the socket, one by one, each finds the kernel's code
    and the stages before and after its own in the core's caches, instead of its own.
    """

    __slots__ = ("_work", "_items")

    def __init__(self, work: Callable[[list[Item]], None]):
        self._work = work
        self._items: list[Item] = []

    def add(self, item: Item) -> None:
        if not self._items:
            asyncio.get_running_loop().call_soon(self._run)
        self._items.append(item)

    def _run(self) -> None:
        items, self._items = self._items[:MOST], self._items[MOST:]
        if self._items:
            asyncio.get_running_loop().call_soon(self._run)
        self._work(items)
