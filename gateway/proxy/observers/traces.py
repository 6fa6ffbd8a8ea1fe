"""Traces of requests: one span for the request (of kind SERVER), and a child span for each attempt (of kind CLIENT).

Names and attributes follow OpenTelemetry's semantic conventions; other attributes begin with `hitherto.`. Of the
content of requests and answers, spans contain only the model's name and token counts.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from policies.decisions import SHUTTING_DOWN

from ...ops.spans import Spans, traceparent
from ..exchange import Attempt, Exchange
from ..failures.retries import TIMEOUT
from ..outgoing import Outgoing
from ..responses.usage import NOTHING, Usage
from ..states import Leg

if TYPE_CHECKING:
    from ...ops.spans import Moment, Trace

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"))
LONGEST = 1000  # the most characters of a client's string that a span contains
# The client's headers that the gateway replaces. A `tracestate` is only valid with the `traceparent` that it came with,
# so if the client sent no valid `traceparent`, its `tracestate` is dropped as well.
PARENT, PARENT_AND_STATE = frozenset((b"traceparent",)), frozenset((b"traceparent", b"tracestate"))


class Traces:
    """The tracing of requests: starts spans, sends replicas the parent of their spans, and ends spans."""

    def __init__(self, spans: Spans, policy: str):
        self._spans, self._policy = spans, policy

    def begin(self, exchange: Exchange) -> None:
        """Start the request's span, as a child of the client's span if it sent a valid `traceparent`."""
        request = exchange.request
        method = request.method if request.method in METHODS else "_OTHER"
        known = {"http.request.method": method, "url.scheme": "http", "url.path": request.path[:LONGEST]}
        headers: dict[str, list[str]] = {}
        for name, value in request.headers:
            if name in PARENT_AND_STATE:
                headers.setdefault(name.decode(), []).append(value.decode("latin-1"))
        exchange.traced(self._spans.begin(_name(exchange), known, headers))

    def attempt(self, exchange: Exchange, attempt: Attempt) -> None:
        """Start the attempt's span, if the request is sampled."""
        if exchange.trace.sampled:
            attempt.traced(exchange.trace.child())

    def before_send(self, exchange: Exchange, attempt: Attempt, outgoing: Outgoing) -> None:
        """Write the trace context for the replica into a request, unless the client's own headers are forwarded."""
        trace: Trace = exchange.trace
        # If the request is not sampled and has no context from the client, the engine must be told so, or it would
        # decide itself whether to sample.
        if trace.sampled or trace.parent is None:
            parent = attempt.context if trace.sampled else trace.root
            outgoing.lines += b"traceparent: %b\r\n" % traceparent(parent)
            outgoing.left_out |= PARENT if trace.parent is not None else PARENT_AND_STATE

    def ended(self, exchange: Exchange, outcome: str, usage: Usage | None) -> None:
        """End the spans of a request and of its attempts, with their attributes; does nothing if it is not sampled.

        `outcome`: how the request ended, see `Settling.ended`.
        """
        trace: Trace = exchange.trace
        if not trace.sampled:
            return
        tried = [attempt for attempt in exchange.attempts if attempt.context is not None]
        for number, attempt in enumerate(tried):
            before = _kind(tried[number - 1]) if number else None
            retries = sum(one.error is not None for one in tried[:number])
            of_leg = usage if attempt is tried[-1] else None
            if attempt.leg is Leg.PREFILL and attempt.error is None and exchange.legs is not None:
                of_leg = exchange.legs.usage
            self._attempt(exchange, attempt, retries, before, of_leg)
        answered = outcome != "aborted" or bool(tried and tried[-1].first_at)
        status = exchange.result
        failed = outcome == "cut" or (outcome != "aborted" and status >= 500)
        error = exchange.error if failed else None
        moments: list[Moment] = [("prepared", exchange.prepared_at, {})] if exchange.prepared_at else []
        moments += [("chosen", one.begun_at, {"hitherto.replica": one.backend.id}) for one in tried]
        told = {
            **trace.attributes,
            **_address(exchange.request.header(b"host")),
            "http.route": exchange.request.path if exchange.label != "other" else None,
            "http.response.status_code": exchange.answered_with if answered else None,
            "error.type": None
            if not failed
            else _kind(tried[-1]) or SHUTTING_DOWN
            if outcome == "cut"
            else str(status),
            "hitherto.outcome": outcome,
            "hitherto.request_id": exchange.id.decode("latin-1")[:LONGEST],
            **_both_legs(exchange),
            **_tokens(exchange, usage or NOTHING),
        }
        self._spans.end(
            trace,
            trace.root,
            _name(exchange),
            exchange.begun,
            monotonic(),
            told,
            moments,
            str(error or "") if failed else None,
        )

    def _attempt(
        self, exchange: Exchange, attempt: Attempt, number: int, before: str | None, usage: Usage | None
    ) -> None:
        """End an attempt's span.

        `number`: how many attempts failed before it.
        `before`: the kind of failure of the attempt before it, or None.
        `usage`: the token usage of its answer, None if unknown.
        """
        replica, kind = attempt.backend.replica, _kind(attempt)
        fault = exchange.fault if attempt is exchange.attempts[-1] else 0
        refused = (fault or attempt.status) >= 400
        ttft = attempt.first_at - attempt.sent_at if attempt.first_at and attempt.streams else None
        told = {
            "http.request.method": exchange.trace.attributes["http.request.method"],
            "url.full": replica.url + exchange.request.path[:LONGEST],
            "server.address": replica.host,
            "server.port": replica.port,
            "http.response.status_code": attempt.status or None,
            "http.request.resend_count": number or None,
            "error.type": str(fault or attempt.status) if refused else kind,
            "hitherto.replica": attempt.backend.id,
            "hitherto.leg": attempt.leg.value if attempt.leg is not None else None,
            **_both_legs(exchange),
            "hitherto.policy": self._policy,
            "hitherto.retry_reason": before,
            "hitherto.cached_tokens.observed": usage.cached if usage is not None else None,
            "hitherto.ttft.observed": ttft,
        }
        if attempt.prompt is not None and attempt.prompt.tokens:
            told |= {
                "hitherto.cached_tokens.predicted": attempt.placement.predicted,
                "hitherto.ttft.predicted": attempt.predicted_ttft,
            }
        moments: list[Moment] = [
            (name, at, {}) for name, at in (("sent", attempt.sent_at), ("first_byte", attempt.first_at)) if at
        ]
        error = str(attempt.error or "") if kind or refused else None
        self._spans.end(
            exchange.trace,
            attempt.context,
            _name(exchange),
            attempt.begun_at,
            attempt.ended_at or monotonic(),
            told,
            moments,
            error,
        )


def _kind(attempt: Attempt) -> str | None:
    """Return the kind of failure that an attempt ended with, or None."""
    return None if attempt.error is None else getattr(attempt.error, "kind", TIMEOUT)


def _both_legs(exchange: Exchange) -> dict[str, Any]:
    """Return the attributes of a request in two legs: its replicas, and tokens and seconds of the KV transfer."""
    legs = exchange.legs
    if legs is None:
        return {}
    return {
        "hitherto.legs.prefill": legs.prefiller.id,
        "hitherto.legs.decode": legs.decoder.id,
        "hitherto.legs.moved_tokens": legs.moved,
        "hitherto.legs.transfer.predicted": legs.moving,
        "hitherto.legs.transfer.observed": legs.moved_in,
    }


def _name(exchange: Exchange) -> str:
    """Return the span's name: the method, and the path if it is one of the few known endpoints."""
    request = exchange.request
    method = request.method if request.method in METHODS else "HTTP"
    return f"{method} {request.path}" if exchange.label != "other" else method


def _tokens(exchange: Exchange, usage: Usage) -> dict[str, Any]:
    prompt = exchange.prompt
    if prompt is None:
        return {}
    counted = prompt.tokens if prompt.mode == "exact" else None
    return {
        "gen_ai.request.model": prompt.model[:LONGEST] if prompt.model else None,
        "gen_ai.usage.input_tokens": usage.prompt if usage.prompt is not None else counted,
        "gen_ai.usage.output_tokens": usage.completion,
    }


def _address(host: str | None) -> dict[str, Any]:
    """Return the attributes of the gateway's address, as the client wrote it in its `Host` header."""
    if not host:
        return {}
    name, colon, port = host[:LONGEST].rpartition(":")
    if not colon or not port.isdecimal() or len(port) > 5:  # a collector's integers have 64 bits
        return {"server.address": host[:LONGEST]}
    return {"server.address": name, "server.port": int(port)}
