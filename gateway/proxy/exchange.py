"""`Exchange`, a client's request until the last byte of its answer has gone out, and `Attempt`, one try to serve it.

An attempt sends the request to one replica. If the request is split into two legs (prefill on one replica, decode on
another), each leg is an attempt. The attempt also receives what comes on its replica's connection. It writes that to
the client, or passes it to the handler, which decides what follows.

An exchange is driven by calls from the client's connection, from the preparation of the prompt, from the choice of a
replica, and from the sweep that checks deadlines. Each call becomes an event. The table in `states` names the action
for it, and the handler runs the action. Other modules read the fields of both, and assign them only by calling the
methods that say what has happened. Nothing waits here, and no task is created for a request unless its prompt is
long or a connection has to be opened.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from policies.outputs import LEAST_OUTPUT

from ..errors import ApiError
from ..http.downstream import Downstream
from ..http.messages import Request
from ..http.upstream import Head, Upstream, UpstreamError
from .failures.blame import UnattributedError
from .failures.retries import AWAY, CLOSED, NO_CRASHES, TRANSFER_FAILED, Crashes
from .responses.answers import ANY_EVENT, OUTPUT_MARKS, USAGE, Beginning, has_end, output_events
from .responses.usage import USAGE_KEY_BYTES, UsageSearch
from .states import ATTEMPT_TRANSITIONS, AttemptEvent, AttemptState, ExchangeEvent, ExchangeState, Leg

if TYPE_CHECKING:
    from policies import Placement
    from replicas.engines.transfer import Transfer

    from ..prompt import Prompt
    from ..tenants.limits import Cost
    from ..tenants.metering import Charge
    from ..tenants.tenant import Tenant
    from .backend import Backend
    from .responses.stored import Stored
    from .responses.usage import Usage
    from .resume.record import StreamRecord


log = logging.getLogger("hitherto.proxy")

# How many of an answer's last reads are kept, to find the token usage in them: vLLM writes the usage, the end of the
# stream ([DONE], message_stop) and HTTP's last chunk separately, so each may be a read of its own. One more is kept in
# case the usage is split between two reads.
TAIL = 4
# Successive reads of fewer bytes than this are joined, so that many tiny reads do not push the usage out of the TAIL.
TINY = 128
# The longest read that is taken for one output event by its size: a longer event may come in several reads of one size.
LONGEST_SINGLE = 1024
# How many last bytes of each kept read remain in memory once the client stops reading: a read may be 256 kB.
TAIL_BYTES = 4096
CONNECTING, ANSWERING = AttemptState.CONNECTING, AttemptState.ANSWERING
CONNECTED, ANSWERED = AttemptEvent.CONNECTED, AttemptEvent.ANSWERED
PREFILL = Leg.PREFILL


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt to have a request, or one leg of it, answered by one replica, whose response it receives.

    Times are in monotonic seconds; 0.0 stands for what has not happened yet.
    """

    backend: Backend
    placement: Placement
    prompt: Prompt | None
    streams: bool  # whether the answer is expected to stream; once its head has come, whether it does
    begun_at: float
    _: KW_ONLY
    new_connection: bool = False  # use no pooled connection
    had_whole: bool = False  # the replica may have read the whole request on an earlier connection, which it closed
    without_ids: bool = False  # send the prompt as text even if the replica accepts token ids
    # Which leg (prefill or decode) it sends; None for a whole request. Its body if that is not the client's, and header
    # lines for the replica.
    leg: Leg | None = None
    body: bytes | None = None
    lines: bytes = b""
    # Set by `Exchange.add_attempt`; they stay None for a request that the gateway does not forward.
    exchange: Exchange = None  # type: ignore[assignment]
    client: Downstream = None  # type: ignore[assignment]
    handler: Any = None
    state: AttemptState = CONNECTING
    upstream: Upstream | None = None
    sent_ids: bool = False  # the prompt was sent as token ids
    asks_ids: bool = False  # the gateway has the engine report token ids, which the client did not request
    # The answer's status and head. `fault`: the status that an error in the body of a 200 amounts to; 0: no error.
    status: int = 0
    response_head: Head = None  # type: ignore[assignment]  # until the head is there
    fault: int = 0
    computed: bool = False  # the prompt was computed in spite of the fault
    # The first bytes of the body, held back because they show no answer yet, and the parser of them if it is a stream.
    withheld: bytes = b""
    beginning: Beginning | None = None
    looked_at: int = 0  # how many bytes were held back when they were last parsed
    came_whole: bool = False  # the whole answer came in one read, and `Settling.finish` accounts for it at once
    seen_late: bool = False  # bytes were relayed before output was seen in them, so `first_at` is later than in truth
    tail: deque[bytes] = field(default_factory=partial(deque, maxlen=TAIL))  # the last reads of the answer
    pieces: int = 0  # the number of reads
    # `mark`: the bytes that each output event contains, for a stream whose client requested no usage. `extra_events`:
    # how many more output events there were than reads, counted in such streams and in metered ones; as long as there
    # was no read, the number of events of the stream that the attempt resumes. `usage`: the search for the usage of a
    # metered answer, once its key was found.
    mark: bytes | None = None
    extra_events: int = 0
    usage: UsageSearch | None = None
    # In a stream with a `mark`, a read of at least `one_from` and fewer than `one_below` bytes is taken for one output
    # event without a search. In other answers, only reads below `TINY` need `search`, to be joined.
    one_from: int = TINY
    one_below: int = sys.maxsize
    pauses: int = 0  # how often reading was paused, since the client did not keep up
    seen_pieces: int = 0  # `pieces` when the sweep last found new ones, at `seen_at`
    seen_at: float = 0.0
    sent_at: float = 0.0
    first_at: float = 0.0  # when the first output, or an error in its place, came
    ended_at: float = 0.0
    error: Exception | None = None  # the failure
    # With tracing on: the attempt's span, and the TTFT in seconds that was predicted when the attempt began.
    context: Any = None
    predicted_ttft: float = 0.0
    is_continued = False

    # --- what happens to it; only the methods of this class and its subclasses assign its fields

    def send_on(self, upstream: Upstream) -> None:
        """Note that the request is being sent now, on this connection to the replica."""
        self.state = ATTEMPT_TRANSITIONS[self.state, CONNECTED]
        self.upstream, self.sent_at = upstream, monotonic()

    def sent_elsewhere(self) -> None:
        """Note that another proxy sends the request. It handles errors itself, so the answer counts as one with 200."""
        self.status, self.sent_at = 200, self.begun_at

    def traced(self, context: Any) -> None:
        """Keep the context of the attempt's trace span, and the TTFT in seconds that is predicted at its begin."""
        self.context, self.predicted_ttft = context, self.placement.ttft

    def ask_ids(self) -> None:
        """Note that the engine is asked for token ids that the client did not request."""
        self.asks_ids = True

    def send_ids(self) -> None:
        """Note that the prompt is sent as token ids."""
        self.sent_ids = True

    def forget_body(self) -> None:
        """Free the body of a leg, which will not be sent again."""
        self.body = None

    def parse_stream(self, beginning: Beginning) -> None:
        """Set the parser of the stream's first bytes, which are held back from the client until they show output."""
        self.beginning = beginning

    def hold_back(self, data: bytes) -> None:
        """Keep these first bytes of the answer, which do not show yet whether it is an answer or an error."""
        self.withheld = data

    def looked_through(self, size: int) -> None:
        """Note how many of the bytes held back from the client have been parsed (`size`)."""
        self.looked_at = size

    def found_error(self, status: int, computed: bool = False) -> None:
        """Note that an answer with status 200 has an error in its body, which amounts to `status`.

        `computed`: whether the prompt was computed all the same, as the error came after output.
        """
        self.fault, self.computed = status, computed

    def release_keep_alives(self, end: int, now: float) -> bytes:
        """Remove the first `end` bytes from those held back, and return them to be sent to the client.

        They are comments and pings, which keep the client's connection alive. `now`: in monotonic seconds.
        """
        chunked, data = self.response_head.is_chunked, self.withheld[:end]
        self.withheld = self.withheld[end:]
        self.looked_at = len(self.withheld)
        if end:
            self.beginning, self.seen_at = Beginning(chunked, self.withheld) if self.withheld else None, now
        return data

    def answer(self, shows_output: bool) -> None:
        """Note that this attempt's answer goes to the client from now on, including the bytes that were held back.

        `shows_output`: whether the bytes so far contain output or an error; if so, this is the time of the first token.
        """
        self.state = ATTEMPT_TRANSITIONS[self.state, ANSWERED]
        self.seen_at, self.withheld, self.beginning = monotonic(), b"", None
        if shows_output:
            self.first_at = self.seen_at
            ok, upstream = self.status == 200 and not self.fault, self.upstream
            self.came_whole = (
                ok and not self.streams and upstream is not None and upstream.complete
                and self.prompt is not None and self.leg is None
            )  # fmt: skip

    def first_read(self, data: bytes) -> None:
        """Keep the first bytes that go to the client, and begin to count output events if they have to be counted.

        They are counted in metered streams, and in streams for which the client requested no usage.
        """
        exchange, prompt = self.exchange, self.prompt
        if exchange.metered:
            meter(self, data)
        else:
            self.tail.append(data)
            if self.streams and prompt is not None and not prompt.include_usage:  # no usage will tell its tokens
                self.mark = OUTPUT_MARKS.get(exchange.label, ANY_EVENT)
                self.one_from = self.one_below = 0
                self.extra_events = output_events(exchange.label, data, True) - 1
        self.pieces = 1

    def show_first(self, at: float, late: bool = False) -> None:
        """Note that the first output was seen at `at`, in monotonic seconds.

        `late`: it was seen later than it came.
        """
        self.first_at, self.seen_late = at, late

    def untimed(self) -> None:
        """Treat the answer as not streamed: nobody reported its first byte, so its decode time is unknown."""
        self.streams = False

    def swept(self, now: float) -> None:
        """Note that the sweep has found new reads, or the head of a first leg's answer, at `now`."""
        self.seen_pieces, self.seen_at = self.pieces, now

    def continue_stream(self, events: int, mark: bytes | None, head: Head) -> None:
        """Note that this attempt's answer continues a stream that another replica began.

        `events`: the number of output events that the client has.
        `mark`: the bytes that each output event contains, None if events are not counted so.
        `head`: the head of the answer that the client has.
        """
        self.extra_events, self.mark, self.response_head, self.seen_at = events, mark, head, monotonic()

    def rewrite_head(self, head: Head) -> None:
        """Set the response head that the client gets in place of the replica's."""
        self.response_head = head

    def could_not_fetch(self, kind: str) -> bool:
        """Return whether this is a second leg (decode) that may have failed because it could not fetch the KV cache.

        `kind`: the kind of its failure. Engines report a failed transfer by an error of one of several kinds.
        """
        return self.leg is Leg.DECODE and kind in TRANSFER_FAILED

    def end_as(self, event: AttemptEvent, error: Exception | None = None) -> None:
        """End the attempt, and close its connection if it still has one, so that the engine aborts the request.

        `event`: FINISHED, FAILED, or DROPPED if the attempt is no longer needed.
        `error`: why it failed; None if it did not.
        """
        self.state = ATTEMPT_TRANSITIONS[self.state, event]
        self.ended_at, self.error, self.withheld, self.beginning = monotonic(), error, b"", None
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.drop()

    def repeat(self, *, new_connection: bool = False, unread: bool = False, without_ids: bool = False) -> Attempt:
        """Return a new attempt at the same replica, which takes over the load that is reserved for this one.

        `new_connection`: use no pooled connection.
        `unread`: the replica cannot have read the whole request on this attempt's connection.
        `without_ids`: send the prompt as text.
        """
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
            lines=self.lines,
        )

    # --- called by the upstream connection

    def connected(self, upstream: Upstream) -> None:
        self.handler.connected(self, upstream)

    def head(self, status: int, head: Head, body: bytes) -> None:
        """Note the status and head of the answer, and pass them to the handler, which decides about the answer."""
        self.status, self.response_head = status, head
        # names of media types have no case (RFC 9110, 8.3.1)
        content_type = (head.get(b"content-type") or b"").lower()
        self.streams = content_type.startswith(b"text/event-stream")
        self.handler.head(self, content_type, body)

    def data(self, data: bytes) -> None:
        """Write a read of the answer to the client, or pass it to the handler if the client has nothing of it yet."""
        if self.state is ANSWERING:
            if self.one_from <= len(data) < self.one_below:
                self.tail.append(data)
            else:
                self.search(data)
            self.pieces += 1
            self.client.write(data)
        else:
            self.handler.on_body(self, data)

    def search(self, data: bytes) -> None:
        """Keep a read among the last ones; in a stream with a `mark`, count its output events.

        Later reads of about the size of one that had one event (up to half as long again) count as one, unsearched.
        """
        if self.mark is not None:
            events, size = behind_last(self.tail, data, self.mark).count(self.mark), len(data)
            self.extra_events += events - 1
            if events == 1 and TINY <= size <= LONGEST_SINGLE and not 0 < self.one_from <= size:
                self.one_from, self.one_below = size, size + size // 2
        keep(self.tail, data)

    @property
    def events(self) -> int:
        """The number of output events of a stream; 0 where none are counted, as in answers that are not streamed."""
        exchange = self.exchange  # None for a request that another proxy forwards
        counts = self.mark is not None or (self.streams and exchange is not None and exchange.metered)
        return self.pieces + self.extra_events if counts else 0

    def end(self) -> None:
        self.upstream = None
        self.handler.on_complete(self)

    def closed(self) -> None:
        """Handle the close of a connection whose body has no stated length: end the answer, or fail the attempt.

        The replica closes it after a complete body, but also when it dies. The body's last bytes show which.
        """
        head, seen = self.response_head, self.withheld or b"".join(self.tail)
        whole = bool(self.withheld) or (self.pieces <= TAIL and not self.pauses)
        record = self.exchange.stream_record
        if record is not None:
            seen += record.part  # the last event, if it lacks the blank line after it
        if (record is not None and not record.is_unread) or head.get(b"content-encoding") is not None:
            self.end()  # a stream record checks for a missing end itself, and a compressed body cannot be checked
        elif self.status >= 400:
            self.end()  # the status alone is an answer
        elif not has_end(self.exchange.label, seen, self.streams, head.get(b"content-type") or b"", whole):
            self.lost(UpstreamError(CLOSED, "closed its connection in the middle of an answer"))
        else:
            self.end()

    def lost(self, error: UpstreamError) -> None:
        self.handler.failures.lost(self, error)


class MeteredAttempt(Attempt):
    """An attempt whose tokens are counted, for a tenant's limits or the usage log.

    In streams it counts output events, each of which has one token or a few, because not all clients request usage, and
    a client that leaves early gets none. In non-streamed answers, and at `/v1/responses`, it searches every read for
    usage, because usage need not come last: vLLM may write a prompt's log probabilities, its token ids and the client's
    user string after it.
    """

    __slots__ = ()

    def data(self, data: bytes) -> None:
        if self.state is ANSWERING:
            meter(self, data)
            self.pieces += 1
            self.client.write(data)
        else:
            self.handler.on_body(self, data)


def meter(attempt: Attempt, data: bytes) -> None:
    """Count the output events in a read of a metered answer, search it for usage, and keep it among the last reads."""
    if attempt.streams:
        label, first = attempt.exchange.label, not (attempt.pieces + attempt.extra_events)
        searched = behind_last(attempt.tail, data, OUTPUT_MARKS.get(label, ANY_EVENT))
        attempt.extra_events += output_events(label, searched, first) - 1
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
    """Append a read to the last reads of an answer (`tail`); successive reads of fewer than 128 bytes are joined."""
    if len(data) < TINY and tail and len(tail[-1]) < TINY:
        tail[-1] += data
    else:
        tail.append(data)


def behind_last(tail: deque[bytes], data: bytes, mark: bytes) -> bytes:
    """Return the bytes in which to search a read (`data`) for a `mark`.

    If the mark may have begun in the read before it, that read's last bytes come first. Only `ANY_EVENT` goes over the
    end of a line.
    """
    if not tail or (tail[-1].endswith(b"\n") and mark is not ANY_EVENT):
        return data
    return tail[-1][1 - len(mark) :] + data


def output_tokens(attempt: Attempt, usage: Usage | None) -> int:
    """Return the number of output tokens: the engine's own count, else the number of output events.

    The events of a compressed stream cannot be found, so its reads are counted instead. That is a few too many, as the
    end of the stream takes some reads, or too few, where several events came in one read.
    """
    if usage is not None and usage.completion is not None:
        return usage.completion
    return (attempt.events or attempt.pieces) if attempt.streams else 0


def time_per_token(attempt: Attempt, tokens: int) -> float | None:
    """Return the seconds per output token (TPOT) of a stream, or None if they cannot be measured.

    They cannot be measured if the answer is short, if reading was paused because the client did not keep up, if the
    stream was resumed by another replica, or if its first token was seen late.
    """
    if not attempt.streams or tokens <= LEAST_OUTPUT or attempt.pauses or attempt.is_continued or attempt.seen_late:
        return None
    return (attempt.ended_at - attempt.first_at) / (tokens - 1)


@dataclass(slots=True, eq=False)
class Legs:
    """The state of an exchange in two legs (prefill and decode), apart from the two attempts."""

    transfer: Transfer  # the engines' KV transfer that moves the prompt's cache from prefiller to decoder
    prefiller: Backend
    decoder: Backend
    placement: Placement | None  # the second leg's reservation until that leg is sent
    cached: int  # prompt tokens that the first leg was predicted to find in its cache
    moved: int  # prompt tokens whose KV cache the decoder lacks, and has to fetch
    moving: float  # the predicted seconds of that transfer
    moved_in: float | None = None  # the measured seconds
    # The first leg's reservation, until the answer begins, where the decoder's engine sends that leg itself.
    unsent: Placement | None = None
    # The first leg while it runs at the same time as the second one, which is then the last attempt.
    first: Attempt | None = None
    computing: float = 0.0  # the predicted seconds of the first leg, if the second one is sent before it is complete
    computed_at: float = 0.0  # when such a first leg was complete, in monotonic seconds
    usage: Usage | None = None  # of the first leg's answer
    parameters: bytes = b""  # the transfer parameters from the first leg's answer,
    until: float = 0.0  # valid until this time, in monotonic seconds

    # --- what happens to it; only its methods and `disagg.legs` assign its fields

    def take_unsent(self) -> Placement | None:
        """Return the first leg's reservation if the decoder's engine sends that leg, else None; then forget it."""
        placement, self.unsent = self.unsent, None
        return placement

    def take_first(self) -> Attempt | None:
        """Return the first leg if it runs at the same time as the second one, else None; then forget it."""
        first, self.first = self.first, None
        return first

    def repeat_first(self, again: Attempt) -> None:
        """Note that the first leg is sent once more, by this attempt."""
        self.first = again

    def arrived(self, seconds: float) -> float:
        """Note the measured seconds of the KV transfer, and return them; a negative measure counts as 0."""
        self.moved_in = max(0.0, seconds)
        return self.moved_in

    @property
    def fetching(self) -> float:
        """The predicted seconds until the decoder has the cache: the transfer, and what the first leg still takes."""
        return self.moving + self.computing


PREPARING, PREPARED, PLACED = ExchangeState.PREPARING, ExchangeEvent.PREPARED, ExchangeEvent.PLACED


@dataclass(slots=True, eq=False)
class Exchange:
    """A client's request, from the arrival of its last byte until the last byte of its answer is sent."""

    handler: Any  # the `Handler`, whose module imports this one
    client: Downstream
    request: Request
    id: bytes  # the client's, or the gateway's own
    label: str  # the API in metrics ("chat", "completions", ...); "other" for paths without a prompt
    # The tenant of its API key, and its claim on that tenant's limits; None without --api-keys, or limits.
    tenant: Tenant | None = None
    charge: Charge | None = None
    metered: bool = False  # the tokens of its answer are counted, for a tenant's limits or the usage log
    attempt_type: type[Attempt] = Attempt
    state: ExchangeState = PREPARING
    # What the last attempt's replica has to compute: the prompt as its engine spells it, or the rest of a stream that
    # broke off. At the end of such a stream it is the client's own prompt again.
    prompt: Prompt | None = None
    model: str | None = None  # named by a request without a prompt
    response: str | None = None  # the id of the stored response that it refers to, which only one replica has
    # The head that the client has, if only comments and pings have followed: an error must be an event of the stream.
    opened: Head | None = None
    stored: Stored | None = None  # the stored response that its answer creates or returns
    cost: Cost | None = None  # what it counts against its tenant's limits, once computed
    attempts: list[Attempt] = field(default_factory=list)  # oldest first
    status: int = 0  # of an answer that the gateway itself made; 0 without one
    legs: Legs | None = None  # while it is split into a prefill leg and a decode leg
    stays_whole: bool = False  # it must not be split into legs, nor pull its prompt's cache from another replica
    # The record from which another replica can resume its stream; None without --continue-streams.
    stream_record: StreamRecord | None = None
    tried: tuple[Backend, ...] = ()  # replicas that are not sent the request (again)
    able: tuple[Backend, ...] = ()  # those of them that are, if no other is left
    attempts_used: int = 0  # how many failed attempts count against the allowed number of retries
    retries_for: str = ""  # the kind of failure after which another replica is looked for; "" once it is found
    crashes: Crashes = NO_CRASHES  # how many replicas crashed or hung while they had the request
    unattributed_errors: tuple[UnattributedError, ...] = ()  # it is not known yet who is at fault, replica or request
    # When the request was complete, in monotonic seconds: the time of the upload depends on the client.
    begun: float = field(default_factory=monotonic)
    prepared_at: float = 0.0
    stages: list[tuple[str, float]] = field(default_factory=list)  # the gateway's work on it: names and seconds
    # Its trace, with tracing on; and why the gateway answered with an error or cut the stream.
    trace: Any = None
    error: Exception | None = None
    is_forwarded: ClassVar[Literal[True]] = True  # this gateway forwards it, unlike an `ExternalRequest`

    def meter(self) -> None:
        """Have the tokens of the answer counted; must be called before the first attempt is created."""
        self.metered, self.attempt_type = True, MeteredAttempt

    # --- what happens to it; only the methods of this class assign its fields

    def happened(self, event: ExchangeEvent, detail: Any = None) -> None:
        """Set the next state after an event, then call the action that follows, a method of `Handler` or of `Failures`.

        `states.TRANSITIONS` lists state and action by present state and event. If it does not list them, this is a bug
        of the gateway, and raises KeyError.

        `detail`: the action's second argument, for example an error or the first bytes of an answer.
        """
        self.state, act = self.handler.steps[self.state, event]
        act(self, detail)

    def refer_to(self, response: str | None) -> None:
        """Note the id of the stored response that the request refers to; None if it refers to none."""
        self.response = response

    def belong_to(self, tenant: Tenant) -> None:
        """Note the tenant whose API key the request has, and have the tokens of its answer counted."""
        self.tenant = tenant
        self.meter()

    def charged(self, charge: Charge | None) -> None:
        """Note the request's claim on its tenant's limits; None if the tenant has no limits."""
        self.charge = charge

    def costs(self, cost: Cost) -> None:
        """Note the request's cost, which counts against its tenant's limits."""
        self.cost = cost

    def names(self, model: str | None) -> None:
        """Note the model that the request names, for the logs and for the choice of a replica without a prompt."""
        self.model = model

    def traced(self, trace: Any) -> None:
        """Note the trace that was begun for the request."""
        self.trace = trace

    def stay_whole(self, stays: bool = True) -> None:
        """Have the request sent in one leg, and without pulling its prompt's KV cache from another replica.

        `stays`: False to allow both again.
        """
        self.stays_whole = stays

    def split(self, legs: Legs, prompt: Prompt) -> None:
        """Note that the request is split into two legs.

        `legs`: their state.
        `prompt`: the request's prompt, in the format of the prefiller.
        """
        self.legs, self.prompt = legs, prompt

    def leave_legs(self) -> Legs | None:
        """Note that the request is in one leg from now on; return the state of its legs, None if it had no legs."""
        legs, self.legs = self.legs, None
        return legs

    def opens(self, head: Head) -> None:
        """Note that the client is sent this response head before the answer has any output.

        This happens when the first comments or pings of a stream are relayed, to keep the client's connection alive.
        """
        self.opened = head

    def tells(self, stored: Stored | None) -> None:
        """Note the stored response that the answer creates or returns; None if there is none."""
        self.stored = stored

    def answered_by_gateway(self, status: int, error: Exception | None = None) -> None:
        """Note the status with which the gateway itself answers, and the error that it answers with."""
        self.status, self.error = status, error

    def broke_off(self, error: Exception | None) -> None:
        """Note the error that ended the answer before it was complete."""
        self.error = error

    def used(self, attempts: int) -> None:
        """Count this many failed attempts against the allowed number of retries."""
        self.attempts_used += attempts

    def looks_for_another(self, kind: str) -> None:
        """Note that another replica is being looked for, after a failure of this kind."""
        self.retries_for = kind

    def found_another(self) -> str:
        """Note that another replica was found, and return the kind of the failure after which it was looked for."""
        kind, self.retries_for = self.retries_for, ""
        return kind

    def rule_out(self, attempt: Attempt, kind: str) -> None:
        """Note that an attempt's replica is not sent the request again, after a failure of this kind.

        A decoder that only failed to fetch the prompt's KV cache is sent it if no other replica is left.
        """
        backend = attempt.backend
        self.tried += (backend,)
        if self.able:
            self.able = tuple(one for one in self.able if one is not backend)
        if attempt.could_not_fetch(kind):
            self.able += (backend,)

    def crashed(self, crashes: Crashes) -> None:
        """Note the numbers of replicas that have crashed or hung while they had the request."""
        self.crashes = crashes

    def erred(self, error: UnattributedError) -> None:
        """Add an error answer for which it is not known yet whether the replica or the request is at fault."""
        self.unattributed_errors += (error,)

    def attributed(self) -> tuple[UnattributedError, ...]:
        """Return the errors for which the fault was undecided until now, and remove them from the exchange."""
        errors, self.unattributed_errors = self.unattributed_errors, ()
        return errors

    def record_stream(self, record: StreamRecord | None, attempt_type: type[Attempt] | None = None) -> None:
        """Set the record of the request's stream, and the type of the attempts that fill the record.

        `record`: None to keep no record any more.
        `attempt_type`: None for the usual type, which keeps no record.
        """
        self.stream_record = record
        self.attempt_type = attempt_type or (MeteredAttempt if self.metered else Attempt)

    def resume_elsewhere(self, prompt: Prompt, tried: tuple[Backend, ...]) -> None:
        """Prepare the request for another replica, which is to write the rest of its stream in one leg.

        The retries are counted from zero again.

        `prompt`: what the other replica has to compute: the rest of the stream, or the whole request again.
        `tried`: the replicas that must not get it.
        """
        self.prompt, self.tried, self.able, self.attempts_used, self.stays_whole = prompt, tried, (), 0, True

    def told_whole(self, prompt: Prompt, events: int) -> None:
        """Set the prompt and the number of output events of a whole stream that several replicas wrote, for accounting.

        `prompt`: the client's own prompt, in place of the one that asked for the stream's rest. `events`: the output
        events that the client had when the stream broke off last.
        """
        last = self.attempts[-1]
        self.prompt, last.extra_events = prompt, max(last.extra_events, events - last.pieces)

    @property
    def attempt(self) -> Attempt | None:
        """The last attempt, or None."""
        return self.attempts[-1] if self.attempts else None

    @property
    def tells_response(self) -> bool:
        """Whether the answer is a response (`/v1/responses`), whose last event repeats the whole answer."""
        return self.label == "responses" or self.response is not None

    @property
    def first_answering(self) -> Attempt:
        """The attempt whose answer the client got first.

        This is the last attempt, unless other replicas resumed the stream of an earlier one.
        """
        record = self.stream_record
        return self.attempts[-1 if record is None or not record.breaks else record.first]

    @property
    def answered_with(self) -> int:
        """The status that the client was sent, the gateway's own or a replica's; 0 if it was sent none yet."""
        return self.status or (self.first_answering.status if self.attempts else 0)

    @property
    def fault(self) -> int:
        """The status that an error inside a replica's answer with status 200 amounts to; 0 if there is no error."""
        return self.attempts[-1].fault if self.attempts and not self.status else 0

    @property
    def result(self) -> int:
        """The status that the client was sent, or the one that an error in a 200 amounts to; 0 if it was sent none."""
        return self.fault or self.answered_with

    @property
    def needs_replica(self) -> bool:
        """Whether the request waits for a replica to be chosen, at first or to resume its stream."""
        if self.state is ExchangeState.RESUMING:
            return self.attempts[-1].state is AttemptState.ENDED
        return self.state is ExchangeState.PLACING

    @property
    def is_continued(self) -> bool:
        """Whether the stream has broken off, so that the last attempt resumes it or is the one that failed."""
        return self.stream_record is not None and self.stream_record.breaks > 0

    @property
    def unanswered(self) -> Attempt | None:
        """The last attempt, if its request was sent and no byte of its answer has gone to the client; else None."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.state is AttemptState.AWAITING else None

    def run_isolated(self, step: Callable[..., None], *given: object) -> bool:
        """Call `step(*given)`; if it raises, which is a bug of the gateway, log that and end only this request.

        Returns whether it did not raise.
        """
        try:
            step(*given)
            return True
        except Exception as error:
            has_begun = self.is_continued or self.opened is not None or (self.attempts and self.attempts[-1].pieces)
            if has_begun and self.client.exchange is self:
                log.error("an answer that was under way made the gateway fail", exc_info=error)
                self.client_gone()
                self.client.abort()
            else:
                self.client.failed(self, error)
            return False

    def forget_body(self) -> None:
        """Free the request's body, which will not be sent again.

        Other objects may keep the request itself for long: the client's connection until the answer ends, and a queue
        until the request would have had its turn.
        """
        self.request.body = b""
        if self.legs is not None:
            self.attempts[-1].forget_body()
            if self.legs.first is not None:
                self.legs.first.forget_body()
        self.client.release()

    # --- called by the client's connection

    def client_gone(self) -> None:
        """End the exchange, since the client has left."""
        if self.state is not ExchangeState.ENDED:
            self.happened(ExchangeEvent.GONE)

    def shut_down(self) -> None:
        """End the exchange because the gateway shuts down before the answer is complete."""
        if self.state is not ExchangeState.ENDED:
            self.happened(ExchangeEvent.GONE, ConnectionAbortedError("the gateway is shutting down"))

    def pause_reading(self) -> None:
        """Stop reading the answer from the replica, since the client does not keep up."""
        attempt = self.attempt
        if attempt is not None and attempt.upstream is not None:
            attempt.upstream.pause()
            attempt.pauses += 1
            attempt.tail = deque((piece[-TAIL_BYTES:] for piece in attempt.tail), TAIL)

    def resume_reading(self) -> None:
        """Go on reading the answer from the replica, since the client has caught up."""
        attempt = self.attempt
        if attempt is not None and attempt.upstream is not None:
            attempt.upstream.resume()

    # --- called by preparation, placing and the queue

    def prepared(self, prompt: Prompt | None, placed: list[Exchange] | None = None) -> None:
        """Go on to the choice of a replica, since the request's preparation is done.

        `prompt`: None if the gateway does not tokenize the request's prompt.
        `placed`: the list for requests of a batch that have a replica at once, as for `Placing.place`.
        """
        if self.state is PREPARING:
            self.prompt, self.prepared_at = prompt, monotonic()
            if prompt is not None:
                self.response = prompt.previous_response
            self.happened(PREPARED, placed)

    def refused(self, error: ApiError) -> None:
        """Refuse the request before a replica is chosen."""
        if self.state is PREPARING:
            self.happened(ExchangeEvent.REFUSED, error)

    def add_attempt(self, attempt: Attempt) -> None:
        """Add an attempt, for which a replica was chosen and load was reserved, as the request's last one."""
        attempt.exchange, attempt.client, attempt.handler = self, self.client, self.handler
        self.prompt = attempt.prompt
        self.attempts.append(attempt)

    def put_last(self, attempt: Attempt) -> None:
        """Make one of its attempts the last one, which is the one that may still answer the client."""
        self.attempts.remove(attempt)
        self.attempts.append(attempt)

    def placed(self) -> None:
        """Send the request to the replica of the last attempt that was added."""
        self.happened(PLACED)

    @property
    def size(self) -> int:
        """The bytes of the request's body, which stay in memory while it waits."""
        return len(self.request.body)

    def unplaced(self, error: ApiError) -> None:
        """End the request, since no replica can take it.

        `error`: why, if no replica has failed the request before. Otherwise the client gets an error that names the
            last failure.
        """
        error.__traceback__ = None  # its frames refer to this request, and the trace to the error: a cycle
        if self.tried:
            why = f"no replica is left after {len(self.attempts)} attempt(s)"
            self.happened(ExchangeEvent.EXHAUSTED, self.exhausted(why))
        else:
            self.happened(ExchangeEvent.REFUSED, error)

    def exhausted(self, why: str, again: bool = True, **options: Any) -> ApiError:
        """Return the error for a request whose last attempt has failed.

        The status is 503 if the last engine was shutting down or could not be sent the request, since such an engine
        comes back or is replaced. Otherwise, and if the client must not retry, it is 502.

        `why`: the message, to which the last failure is added.
        `again`: whether the client may retry.
        `options`: passed to `ApiError`.
        """
        attempt = self.attempts[-1]
        error = attempt.error
        last = f"the last: replica {attempt.backend.id}: {error}"
        is_away = isinstance(error, UpstreamError) and (error.unread or error.kind in AWAY)
        status = 503 if again and is_away else 502
        return ApiError(status, f"{why}; {last}", discreet=why, again=again, **options)


# Proxies like nginx buffer an answer unless it has this header.
NO_BUFFERING = b"x-accel-buffering: no\r\n"


# The most items of a batch, during which the event loop does nothing else (`prompt.offload` bounds the time for
# prompts). Batches of 16 and 32 take the same time per item (24 pairs of bursts: ratios of .96 to 1.04), batches of 8
# an eighth more with long prompts.
MOST = 12


class Batcher:
    """A collector of the items that arrive in one event-loop iteration; `work` is called with up to 12 (`MOST`).

    An iteration of a busy loop has up to a dozen requests. Working on all of them stage by stage keeps the code of one
    stage in the CPU core's caches. One by one, each stage would find there the code of the kernel and of other stages.
    """

    __slots__ = ("_work", "_items")

    def __init__(self, work: Callable[[list[Any]], None]):
        self._work = work
        self._items: list[Any] = []

    def add(self, item: Any) -> None:
        if not self._items:
            asyncio.get_running_loop().call_soon(self._run)
        self._items.append(item)

    def _run(self) -> None:
        items, self._items = self._items[:MOST], self._items[MOST:]
        if self._items:
            asyncio.get_running_loop().call_soon(self._run)
        self._work(items)
