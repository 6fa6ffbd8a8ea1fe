"""One request's life, from the client's last byte in to its last byte out.

`Life` is driven by calls from both sides of the wire and by the sweep's deadlines. Each call becomes an
event; the table in `states` says what follows; the methods at the end do it. Nothing here waits, and no
task is made for a request unless its prompt is long or a connection has to be opened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from ..http.downstream import Downstream
from ..http.messages import Request
from ..http.upstream import Head, Upstream, UpstreamError
from .answers import Sight, begins, error_status, foreign_head, keeps_alive, look
from .blame import DOUBTFUL, REFUSED_ALIKE, Suspicion, agree, settled
from .errors import JSON, error_body, error_event
from .heads import request_head, response_lines
from .states import TRANSITIONS, Action, Event, State

if TYPE_CHECKING:
    from policies import Placement

    from ..prompt.pipeline import Prompt
    from .backend import Backend
    from .dispatcher import Dispatcher

# 501 means the engine can't do it at all, and neither can its siblings.
RETRYABLE = frozenset((500, 502, 503, 504))
# To a request with ids in it: it is said again as received, so that the client's own fault is all a client is told of.
MAY_BE_OURS = frozenset((400, 404, 413, 415, 422, 431))
# Kinds of failure that an answer itself shows: an error behind a status 200, and one that no engine wrote.
ERROR_ANSWER, FOREIGN_ANSWER = "error answer", "foreign answer"
# Failures after which nothing was computed: nobody took the request, a full one said that another should, or its answer
# began with the failure.
REFUSED = REFUSED_ALIKE | {"connect", "elsewhere", "status 503", ERROR_ANSWER, FOREIGN_ANSWER}
# Failures that show a replica going down, or hanging, with the request in its hands ...
LOSSES = frozenset(("closed", "protocol", "hung"))
# ... after which no other replica is risked. One may be a coincidence.
MOST_LOSSES = 2
# Clients of OpenAI and Anthropic, which repeat a request after a 5xx by themselves, obey it.
NO_RETRY = (b"x-should-retry", b"false")
# Comments that keep a connection alive are held back for so long, and then passed on: proxies give up after 60 s of silence.
KEEP_ALIVE_SECONDS = 30.0
# Reads kept to find the usage in: vLLM writes it, what ends the stream ([DONE], message_stop) and the last
# chunk one by one, and each may be a read of its own. One more, should a read end within the usage.
TAIL = 4
# And of each as much as matters, where a client stops reading: a read may be 256 kB.
TAIL_BYTES = 4096


class Failure(Exception):
    """Why a request is answered with an error of ours: an HTTP status and the words for the client."""

    def __init__(self, status: int, message: str, *, allow: bytes = b"", again: bool = True, **fields: str | None):
        """`again`: False tells clients that retry by themselves (OpenAI's and Anthropic's do after a 5xx) not to."""
        super().__init__(message)
        self.status, self.message, self.allow, self.again, self.fields = status, message, allow, again, fields


class Life:
    __slots__ = (
        # given
        "dispatcher", "client", "request", "id", "label",
        # found out
        "state", "prompt", "backend", "upstream", "placement", "held", "status", "streams",
        # the status that an error behind a 200 amounts to, 0 without one
        "fault",
        # first bytes of a body that were held back, since nothing of an answer was in them
        "announced",
        # retries; `losses`: replicas that went down or hung under it; `suspicions`: errors that it was answered with
        "tried", "last_error", "reconnected", "losses", "suspicions",
        # the stored response it is about, if any: only one replica has that
        "response",
        # what a request without prompt names as its model
        "model",
        # whether the body has the prompt's ids in it, and the replica that would not have them
        "sent_ids", "ids_refused",
        # the answer as it passes
        "tail", "pieces", "seen_pieces", "seen_at",
        # times, monotonic seconds; `first_at`: of the answer itself, 0 if only other bytes were seen
        "begun", "sent_at", "first_at",
    )  # fmt: skip

    trace_id: str | None = None  # with traces on

    def __init__(self, dispatcher: Dispatcher, client: Downstream, request: Request, request_id: bytes, label: str):
        self.dispatcher = dispatcher
        self.client = client
        self.request = request
        self.id = request_id
        self.label = label
        self.state = State.PREPARING
        self.prompt: Prompt | None = None
        self.backend: Backend | None = None
        self.upstream: Upstream | None = None
        self.placement: Placement | None = None
        self.held: Head | None = None
        self.status = self.fault = self.losses = 0
        self.announced = b""
        self.streams = False
        self.tried: tuple[Backend, ...] = ()
        self.suspicions: tuple[Suspicion, ...] = ()
        self.last_error = ""
        self.reconnected = False
        self.response = self.model = None
        self.sent_ids = False
        self.ids_refused: Backend | None = None
        self.tail: deque[bytes] = deque(maxlen=TAIL)
        self.pieces = self.seen_pieces = 0
        # The clock starts when the request is there: what its upload took is the client's.
        self.begun = self.seen_at = monotonic()
        self.sent_at = self.first_at = 0.0

    def advance(self, event: Event, detail: object = None) -> None:
        self.state, action = TRANSITIONS[self.state, event]
        DO[action](self, detail)

    # --- what the client's side calls

    def client_gone(self) -> None:
        if self.state is not State.ENDED:
            self.advance(Event.GONE)

    def pause(self) -> None:
        if self.upstream is not None:
            self.upstream.pause()
            self.tail = deque((piece[-TAIL_BYTES:] for piece in self.tail), TAIL)

    def resume(self) -> None:
        if self.upstream is not None:
            self.upstream.resume()

    # --- what the dispatcher calls

    @property
    def unanswered(self) -> bool:
        """Sent, and nothing of an answer has gone to the client."""
        return self.state is State.AWAITING

    def take_step(self, step: Callable[..., None], *given: object) -> None:
        """A bug of ours in it ends this request alone, with an answer."""
        try:
            step(*given)
        except Exception as error:
            self.client.failed(self, error)

    def prepared(self, prompt: Prompt | None) -> None:
        if self.state is State.PREPARING:
            self.prompt = prompt
            if prompt is not None:
                self.streams = prompt.stream
                self.response = prompt.previous_response
            self.advance(Event.PREPARED)

    def refused(self, failure: Failure) -> None:
        if self.state is State.PREPARING:
            self.dispatcher.outcomes.turned_away(failure)
            self.advance(Event.REFUSED, failure)

    def check(self, now: float) -> None:
        """The sweep: is a deadline over?"""
        if self.state is State.STREAMING:
            if self.pieces != self.seen_pieces:
                self.seen_pieces, self.seen_at = self.pieces, now
            elif now - self.seen_at > (limit := self.dispatcher.silence(self.backend)):
                self._stalled(limit)
        elif self.state is not State.ENDED:
            if now - self.begun > self.dispatcher.request_timeout:
                self.dispatcher.outcomes.failed(self.backend, "timeout")
                where = f"replica {self.backend.id} sent" if self.backend else "no replica sent"
                self.advance(Event.TIMED_OUT, Failure(504, f"{where} no byte of an answer within {self.dispatcher.request_timeout:g} s"))
            elif self.state is State.AWAITING:
                if self.announced and now - self.sent_at > KEEP_ALIVE_SECONDS and keeps_alive(self.announced):
                    data, self.announced = self.announced, b""
                    self.advance(Event.ANSWERED, data)
                elif self.dispatcher.better_elsewhere(self, now):
                    self.advance(Event.LOST, UpstreamError("hung", f"is {self.backend.replica.state} and sent no byte for {now - self.sent_at:.0f} s"))
                elif not self.streams:
                    self.dispatcher.outcomes.assume_prefilled(self, now)

    def _stalled(self, seconds: float) -> None:
        if self.client.writing_paused:  # it is the client that does not take what is there
            client = self.client
            self.advance(Event.GONE)
            client.abort()
        else:
            self.advance(Event.TIMED_OUT, UpstreamError("stalled", f"no byte for {seconds:g} s"))

    # --- what the replica's side calls

    def connected(self, upstream: Upstream) -> None:
        if self.state is State.CONNECTING and upstream.pool is self.backend.pool:
            self.take_step(self.advance, Event.CONNECTED, upstream)
            return
        upstream.pool.release(upstream)
        if self.state is State.CONNECTING:  # the replica has moved meanwhile, and this leads to where it was
            self.take_step(self._connect, None)

    def head(self, status: int, head: Head, body: bytes) -> None:
        """Held back until the body shows that something was computed: engines send the head before the prefill, and while
        the client has nothing, the request can still go elsewhere."""
        self.status = status
        self.held = head
        content_type = head.get(b"content-type") or b""
        self.streams = content_type.startswith(b"text/event-stream")
        if self.prompt is not None and not self.streams and foreign_head(status, content_type):
            self._foreign(f"answered {status} with {content_type.decode('latin-1')[:100]}")
        elif (status in RETRYABLE or (status in DOUBTFUL and self.prompt is not None and self.response is None)) and self._unsettled(f"status {status}"):
            self.advance(Event.UNWELL, UpstreamError(f"status {status}", f"answered {status}"))
        elif status == 404 and self.response is not None and self.dispatcher.may_be_elsewhere(self):
            self.advance(Event.UNWELL, UpstreamError("elsewhere", "answered 404"))
        elif self.sent_ids and status in MAY_BE_OURS:
            self.ids_refused = self.backend
            self.advance(Event.UNWELL, UpstreamError("ids", f"answered {status}"))
        elif body:
            self._answered(body)

    def _answered(self, data: bytes, whole: bool = False) -> None:
        """The first bytes of an answer's body, or all of it: they may tell that there will be none."""
        held_back = self.announced
        if held_back:
            data, self.announced = held_back + data, b""
        if self.status == 200 and self.prompt is not None:
            if (held_back or not begins(self.label, data, self.streams)) and self._kept(data, whole):
                return
            self.fault = error_status(data, self.streams)
            if self.fault >= 500 and self._unsettled(ERROR_ANSWER):
                self.advance(Event.UNWELL, UpstreamError(ERROR_ANSWER, f"answered 200 with an error that amounts to {self.fault}"))
                return
            if self.sent_ids and self.fault in MAY_BE_OURS:
                self.ids_refused = self.backend
                self.advance(Event.UNWELL, UpstreamError("ids", f"answered 200 with an error that amounts to {self.fault}"))
                return
        if self.backend.replica.dialect.abort_marker in data:
            if self.dispatcher.may_retry(self):
                self.advance(Event.UNWELL, UpstreamError("aborted", "aborted it"))
                return
            self.fault = 503
            self.dispatcher.outcomes.failed(self.backend, "aborted")
        self.first_at = monotonic()
        self.advance(Event.ANSWERED, data)

    def _kept(self, data: bytes, whole: bool) -> bool:
        """Whether these bytes do not go to the client (now): nothing of an answer is in them, or no engine wrote them."""
        if self.held.get(b"content-encoding") is not None:
            return False  # illegible
        sight = look(self.label, data, self.streams, self.held.get(b"content-type") or b"", whole)
        if sight is Sight.FOREIGN:
            self._foreign(f"answered 200 with {data[:40]!r}")
        elif sight is Sight.EARLY:
            self.announced = data
        elif sight is Sight.BLIND:
            self.advance(Event.ANSWERED, data)
        return sight is not Sight.ANSWER

    def _unsettled(self, kind: str) -> bool:
        """Whether to ask another replica, now that this one has answered with an error. Else the client gets that."""
        self.dispatcher.outcomes.suspect(self, kind)
        if not settled(self.suspicions) and self.dispatcher.may_retry(self):
            return True
        if agree(self.suspicions):
            self.held.add(NO_RETRY)
        return False

    def _foreign(self, what: str) -> None:
        """No engine wrote this: something else listens at the replica's address. No client is given such an answer."""
        self.advance(Event.LOST, UpstreamError(FOREIGN_ANSWER, f"{what}, which is no answer of an inference engine"))

    def data(self, data: bytes) -> None:
        if self.state is State.STREAMING:
            self.tail.append(data)
            self.pieces += 1
            self.client.transport.write(data)
        else:
            self._answered(data)

    def end(self) -> None:
        self.upstream = None
        if self.state is State.AWAITING:
            self._answered(b"", whole=True)
        if self.state is State.STREAMING:
            self.advance(Event.FINISHED)

    def lost(self, error: UpstreamError) -> None:
        if self.state is not State.ENDED:
            self.take_step(self.advance, Event.LOST, error)

    # --- what the table asks for

    def _choose(self, _: object) -> None:
        self.dispatcher.choose(self)

    def chosen(self) -> None:
        """What the dispatcher calls when `backend` and `placement` are there."""
        self.advance(Event.CHOSEN)

    def unchosen(self, failure: Failure) -> None:
        """What it calls when nobody can take the request."""
        failure.__traceback__ = None  # it has this request in its frames, and a trace keeps the failure: a cycle
        if self.tried:
            failure = Failure(502, f"no replica is left after {len(self.tried)} attempt(s); the last: {self.last_error}")
        else:
            self.dispatcher.outcomes.turned_away(failure)
        self.advance(Event.EXHAUSTED, failure)

    def _connect(self, _: object) -> None:
        pool = self.backend.pool
        # Behind a kept connection that died of old age there may be more of the same age.
        upstream = None if self.request.http10 or self.reconnected else pool.acquire()
        if upstream is not None:
            self.advance(Event.CONNECTED, upstream)
        else:
            pool.connect(self)

    def _send(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.sent_at = monotonic()
        body = self.dispatcher.forwarding.body(self)
        head = request_head(self, len(body))
        upstream.send(self, head, body, self.request.method == "HEAD")

    def _retry(self, error: UpstreamError) -> None:
        upstream, self.upstream = self.upstream, None
        unanswered, self.held, self.fault, self.announced = self.held is None, None, 0, b""
        if upstream is not None:
            upstream.drop()
        dispatcher = self.dispatcher
        if error.kind == "ids":
            dispatcher.metrics.retries.inc("ids")
            self.advance(Event.CHOSEN)
            return
        if upstream is not None and upstream.used and unanswered and not self.reconnected and error.kind == "closed":
            # A kept connection may die of old age under the request; that says nothing about the replica.
            self.reconnected = True
            dispatcher.on_traffic(self.backend.id, "reconnect")
            dispatcher.metrics.retries.inc("reconnect")
            self.advance(Event.CHOSEN)
            return
        if not error.kind.startswith(("status", "elsewhere", ERROR_ANSWER)):
            dispatcher.outcomes.failed(self.backend, error.kind)
        dispatcher.router.abandon(self.placement, computed=error.kind not in REFUSED)
        self.sent_at, self.streams = 0.0, self.prompt is not None and self.prompt.stream
        self.tried += (self.backend,)
        self.last_error = f"replica {self.backend.id}: {error}"
        # A refused connection is a loss as well if the one before it died with this request on it.
        self.losses += error.kind in LOSSES or (error.kind == "connect" and self.reconnected)
        if self.losses >= MOST_LOSSES:
            message = f"{self.losses} replicas went down or hung with this request, so no other is tried; the last: {self.last_error}"
            self.advance(Event.EXHAUSTED, Failure(502, message, again=False, code="replicas_lost"))
            return
        if error.kind != "elsewhere" and not dispatcher.has_attempts(self):
            self.advance(Event.EXHAUSTED, Failure(502, f"no replica answered after {len(self.tried)} attempt(s); the last: {self.last_error}"))
            return
        dispatcher.metrics.retries.inc(error.kind)
        self.reconnected = False
        dispatcher.choose(self)

    def _relay(self, data: bytes) -> None:
        self.tail.append(data)
        self.pieces = 1
        if self.first_at:
            self.seen_at = self.first_at
            self.dispatcher.outcomes.first_byte(self)
        else:  # what was held back, and shows nothing
            self.seen_at = monotonic()
            self.dispatcher.outcomes.undecided(self)
        if self.label == "responses" or self.response is not None:
            self.dispatcher.responses.answered(self, data)
        if self.prompt is None or not self.prompt.token_ids:  # else `forwarding` may ask about it
            self._forget_body()
        lines = response_lines(self, self.dispatcher.draining)
        self.client.transport.write(self.held.block(lines) + data)

    def _settle(self, _: object) -> None:
        self._leave()
        self.client.finish(not self.held.until_close)
        self.dispatcher.outcomes.complete.add(self)

    def _cut(self, error: UpstreamError) -> None:
        self._leave()
        self._release()
        message = f"the answer broke off: replica {self.backend.id} {error}"
        # Only where the chunk before is whole can another one follow; else the cut itself must tell.
        if self.streams and self.tail[-1].endswith(b"\n\n\r\n") and self.held.get(b"transfer-encoding") == b"chunked":
            event = error_event(self.request.path, 502, message)
            self.client.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
            self.client.finish()  # whole to HTTP: closing would fail the next request of a client that keeps connections
        elif self.streams and self.held.until_close and self.tail[-1].endswith(b"\n\n"):
            self.client.write(error_event(self.request.path, 502, message))
            self.client.finish(keep_alive=False)
        else:
            self.client.abort()
        self.dispatcher.outcomes.failed(self.backend, error.kind)
        self.dispatcher.outcomes.ended(self, "cut")

    def _report(self, failure: Failure) -> None:
        self._leave()
        self._release()
        self.dispatcher.outcomes.undecided(self)
        self._forget_body()
        self.status = failure.status
        headers = JSON + [(b"x-request-id", self.id)]
        if failure.status == 503:
            headers.append((b"retry-after", b"1"))
        elif failure.status == 405:
            headers.append((b"allow", failure.allow))
        if not failure.again:
            headers.append(NO_RETRY)
        self.client.reply(failure.status, error_body(self.request.path, failure.status, failure.message, **failure.fields), headers)
        self.dispatcher.outcomes.ended(self, "refused")

    def _abandon(self, _: object) -> None:
        self._leave()
        self._release()
        self.dispatcher.outcomes.undecided(self)
        self._forget_body()
        self.dispatcher.outcomes.ended(self, "aborted")

    def _forget_body(self) -> None:
        """It will not be sent again. Whoever else has this request may have it for long: the client's side until the
        answer ends, a queue until its turn."""
        self.request.body = b""
        self.client.release()

    def _leave(self) -> None:
        """Whatever the end was: nothing stays connected or listed."""
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.drop()
        self.dispatcher.lives.discard(self)

    def _release(self) -> None:
        """An end of another kind than that which `outcomes` settles."""
        if self.placement is not None:
            self.dispatcher.router.abandon(self.placement, computed=self.sent_at > 0)


DO = {
    Action.CHOOSE: Life._choose,
    Action.CONNECT: Life._connect,
    Action.SEND: Life._send,
    Action.RETRY: Life._retry,
    Action.RELAY: Life._relay,
    Action.SETTLE: Life._settle,
    Action.CUT: Life._cut,
    Action.REPORT: Life._report,
    Action.ABANDON: Life._abandon,
}
