"""A life that takes the time of each of its events, and is a trace once it is over.

One span for the request (SERVER), and below it one for each attempt at a replica (CLIENT), named as OpenTelemetry's
semantic conventions have it; what they have no name for is under `hitherto.`. Of what clients and engines say to each
other nothing is in them but the model's name and the counts of tokens.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from ..ops.spans import Spans, traceparent
from ..http.downstream import Downstream
from ..http.messages import Request
from .life import Failure, Life
from .states import Event, State
from .usage import NOTHING, Usage

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from ..http.upstream import UpstreamError
    from .backend import Backend
    from .dispatcher import Dispatcher

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"))
FAILURES = frozenset((Event.REFUSED, Event.EXHAUSTED, Event.UNWELL, Event.LOST, Event.TIMED_OUT))
LONGEST = 1000  # characters kept of what a client wrote


class Attempt:
    """One request to a replica. Times in monotonic seconds, 0.0 for what did not happen."""

    __slots__ = ("context", "backend", "begun", "sent", "first", "ended", "status", "error", "cached", "ttft")

    def __init__(self, context: SpanContext, backend: Backend, begun: float):
        self.context, self.backend, self.begun = context, backend, begun
        self.sent = self.first = self.ended = 0.0
        self.status = 0
        self.error: UpstreamError | Failure | None = None
        self.cached: int | None = None  # as predicted
        self.ttft: float | None = None

    @property
    def kind(self) -> str | None:
        """Of its error."""
        return None if self.error is None else getattr(self.error, "kind", "timeout")


class TracedLife(Life):
    __slots__ = ("spans", "trace", "prepared_at", "attempts", "error")

    def __init__(self, spans: Spans, dispatcher: Dispatcher, client: Downstream, request: Request, request_id: bytes, label: str):
        super().__init__(dispatcher, client, request, request_id, label)
        self.spans = spans
        self.prepared_at = 0.0
        self.attempts: list[Attempt] = []
        self.error: UpstreamError | Failure | None = None  # the last
        method = request.method if request.method in METHODS else "_OTHER"
        known = {"http.request.method": method, "url.scheme": "http", "url.path": request.path[:LONGEST]}
        headers: dict[str, list[str]] = {}
        for name, value in request.headers:
            if name in (b"traceparent", b"tracestate"):
                headers.setdefault(name.decode(), []).append(value.decode("latin-1"))
        self.trace = spans.begin(self._name(), known, headers)
        if not self.trace.sampled and self.trace.parent is None:
            self._tell_replica(self.trace.root)  # that it is not sampled: the engine would decide for itself

    @property
    def trace_id(self) -> str:
        return self.trace.id

    def advance(self, event: Event, detail: object = None) -> None:
        if self.trace.sampled:
            self._note(event, detail)
        super().advance(event, detail)

    def _note(self, event: Event, detail: Any) -> None:
        if event in FAILURES:
            self.error = detail
        if event is Event.PREPARED:
            self.prepared_at = monotonic()
        elif event is Event.CHOSEN:
            self._begin_attempt()
        elif event is Event.CONNECTED:
            self._tell_replica(self.attempts[-1].context)
        elif event is not Event.ANSWERED and self.attempts and not self.attempts[-1].ended:
            self._end_attempt(self.attempts[-1], detail if event in FAILURES else None)

    def _begin_attempt(self) -> None:
        attempt = Attempt(self.trace.child(), self.backend, monotonic())
        if self.prompt is not None and self.prompt.tokens:
            attempt.cached = self.placement.overlap
            attempt.ttft = self.placement.ttft
        self.attempts.append(attempt)

    def _end_attempt(self, attempt: Attempt, error: UpstreamError | Failure | None) -> None:
        attempt.ended, attempt.error = monotonic(), error
        if self.sent_at >= attempt.begun:
            attempt.sent = self.sent_at
        if self.state is State.STREAMING:
            attempt.first = self.first_at
        if self.held is not None:
            attempt.status = self.status

    def _tell_replica(self, parent: SpanContext) -> None:
        """In the request's headers, which are sent on."""
        dropped = (b"traceparent",) if self.trace.parent is not None else (b"traceparent", b"tracestate")  # a state belongs to a valid parent
        # A copy: of the request as it came, its head is kept for those that repeat it.
        request = self.request = self.request.again(self.request.body, self.request.begun)
        kept = [header for header in request.headers if header[0] not in dropped]
        request.set_headers([*kept, (b"traceparent", traceparent(parent))])

    # --- the end

    def export(self, outcome: str, usage: Usage | None) -> None:
        """Hand the spans on. `outcome`, `usage`: as the dispatcher's `on_end` is told."""
        if not self.trace.sampled:
            return
        for number, attempt in enumerate(self.attempts):
            self._export_attempt(number, attempt, usage if attempt is self.attempts[-1] else None)
        answered = outcome != "aborted" or self.first_at
        status = self.fault or self.status
        failed = outcome == "cut" or (outcome != "aborted" and status >= 500)
        error = self.error if failed and outcome != "complete" else None
        moments = [("prepared", self.prepared_at, {})] if self.prepared_at else []
        moments += [("chosen", one.begun, {"hitherto.replica": one.backend.id}) for one in self.attempts]
        told = {
            **self.trace.attributes,
            **_address(self.request.header(b"host")),
            "http.route": self.request.path if self.label != "other" else None,
            "http.response.status_code": self.status if answered else None,
            "error.type": None if not failed else self.attempts[-1].kind if outcome == "cut" else str(status),
            "hitherto.outcome": outcome,
            "hitherto.request_id": self.id.decode("latin-1")[:LONGEST],
            **self._tokens(usage or NOTHING),
        }
        self.spans.end(self.trace, self.trace.root, self._name(), self.begun, monotonic(), told, moments, str(error or "") if failed else None)

    def _tokens(self, usage: Usage) -> dict[str, Any]:
        prompt = self.prompt
        if prompt is None:
            return {}
        counted = prompt.tokens if prompt.mode == "exact" else None
        return {
            "gen_ai.request.model": prompt.model[:LONGEST] if prompt.model else None,
            "gen_ai.usage.input_tokens": usage.prompt if usage.prompt is not None else counted,
            "gen_ai.usage.output_tokens": usage.completion,
        }

    def _export_attempt(self, number: int, attempt: Attempt, usage: Usage | None) -> None:
        replica = attempt.backend.replica
        kind = attempt.kind
        status = self.fault if attempt is self.attempts[-1] and self.fault else attempt.status
        refused = status >= 400
        told = {
            "http.request.method": self.trace.attributes["http.request.method"],
            "url.full": replica.url + self.request.path[:LONGEST],
            "server.address": replica.host,
            "server.port": replica.port,
            "http.response.status_code": attempt.status or None,
            "http.request.resend_count": number or None,
            "error.type": str(status) if refused else kind,
            "hitherto.replica": attempt.backend.id,
            "hitherto.policy": self.dispatcher.router.policy.name,
            "hitherto.retry_reason": self.attempts[number - 1].kind if number else None,
            "hitherto.cached_tokens.predicted": attempt.cached,
            "hitherto.cached_tokens.observed": usage.cached if usage is not None else None,
            "hitherto.ttft.predicted": attempt.ttft,
            "hitherto.ttft.observed": attempt.first - attempt.sent if attempt.first and self.streams else None,
        }
        moments = [(name, at, {}) for name, at in (("sent", attempt.sent), ("first_byte", attempt.first)) if at]
        error = str(attempt.error or "") if kind or refused else None
        self.spans.end(self.trace, attempt.context, self._name(), attempt.begun, attempt.ended, told, moments, error)

    def _name(self) -> str:
        """As many as there are endpoints, whatever clients ask for."""
        request = self.request
        method = request.method if request.method in METHODS else "HTTP"
        return f"{method} {request.path}" if self.label != "other" else method


def _address(host: str | None) -> dict[str, Any]:
    """What the client calls the gateway."""
    if not host:
        return {}
    name, colon, port = host[:LONGEST].rpartition(":")
    if not colon or not port.isdecimal() or len(port) > 5:  # a collector's integers have 64 bits
        return {"server.address": host[:LONGEST]}
    return {"server.address": name, "server.port": int(port)}
