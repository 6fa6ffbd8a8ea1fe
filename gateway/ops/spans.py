"""Traces by OpenTelemetry's SDK: sampling, ids, and the export of spans.

This module is imported only if traces are on (see `receiver` in `traces.py`). A request's trace begins with
`Spans.begin`, before anything is sent to a replica: the trace's ids, and whether it is sampled, are sent along. The
spans are made when the request has ended, from recorded times. The SDK's batch processor sends them in its thread.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from time import monotonic, time_ns
from typing import Any
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode

from .. import __version__

log = logging.getLogger("hitherto.traces")

FLUSH_SECONDS = 2.0  # for sending the last spans when the gateway stops; a worker is killed after 3
QUIET_SECONDS = 60.0  # between two log lines with the same message
RANDOM = 0x02  # a flag of Trace Context level 2: the trace id is random, which other samplers may rely on
Attributes = Mapping[str, Any]
Moment = tuple[str, float, Attributes]  # name, monotonic seconds, attributes


class Trace:
    """The trace of one request.

    `root`: the ids of the request's own span. `parent`: those of the client's span above it, or None. `sampled`:
    whether spans are exported.
    """

    __slots__ = ("sampled", "root", "parent", "attributes", "_ids", "_zero")

    def __init__(
        self, sampled: bool, root: SpanContext, parent: SpanContext | None, attributes: Attributes, ids: IdGenerator
    ):
        self.sampled, self.root, self.parent, self.attributes = sampled, root, parent, attributes
        self._ids, self._zero = ids, time_ns() - int(monotonic() * 1e9)

    @property
    def id(self) -> str:
        return f"{self.root.trace_id:032x}"

    def child(self) -> SpanContext:
        """Return the ids of a new span below the request's own span."""
        root = self.root
        return SpanContext(root.trace_id, self._ids.generate_span_id(), False, root.trace_flags, root.trace_state)

    def nanoseconds(self, at: float) -> int:
        """Convert a time of the monotonic clock, in seconds, to nanoseconds since 1970."""
        return self._zero + int(at * 1e9)


def traceparent(of: SpanContext) -> bytes:
    """Return the value of a `traceparent` header that names this span as the parent (W3C Trace Context)."""
    return b"00-%032x-%016x-%02x" % (of.trace_id, of.span_id, of.trace_flags)


class Spans:
    """The maker and exporter of spans: OpenTelemetry's SDK, configured by its own environment variables.

    These are OTEL_EXPORTER_OTLP_*, OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
    """

    def __init__(self) -> None:
        _hear(_Seldom())
        said = OTELResourceDetector().detect().attributes
        self._resource = Resource.create(
            {"service.name": "hitherto", "service.version": __version__, "service.instance.id": str(uuid4()), **said}
        )
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._sampler, self._ids = provider.sampler, provider.id_generator
        self._scope = InstrumentationScope("hitherto", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._batches = BatchSpanProcessor(OTLPSpanExporter())

    def begin(self, name: str, attributes: Attributes, headers: Mapping[str, list[str]]) -> Trace:
        """Start the trace of a request, and decide whether it is sampled.

        `name`, `attributes`: those of the request's span. `headers`: the values of the client's `traceparent` and
        `tracestate` headers, by header name.
        """
        context = self._propagator.extract(headers) if len(headers.get("traceparent", ())) == 1 else None
        parent = get_current_span(context).get_span_context() if context is not None else None
        if parent is None or not parent.is_valid:
            context, parent = None, None
            trace_id, flags = self._ids.generate_trace_id(), 0
        else:
            trace_id, flags = parent.trace_id, parent.trace_flags & RANDOM
        result = self._sampler.should_sample(context, trace_id, name, SpanKind.SERVER, attributes)
        if sampled := result.decision.is_sampled():
            flags |= TraceFlags.SAMPLED
        root = SpanContext(trace_id, self._ids.generate_span_id(), False, TraceFlags(flags), result.trace_state)
        return Trace(sampled, root, parent, {**attributes, **(result.attributes or {})}, self._ids)

    def end(
        self,
        trace: Trace,
        context: SpanContext,
        name: str,
        begun: float,
        ended: float,
        attributes: Attributes,
        moments: Sequence[Moment],
        error: str | None,
    ) -> None:
        """Export one span of a sampled trace: the request's own (SERVER), or that of an attempt below it (CLIENT).

        `context`: the span's ids. `begun`, `ended`: monotonic seconds. `moments`: events within the span. `error`: None
        for a success, else the reason of the failure, which may be "".

        The span is built directly and not by a Tracer, which makes two spans take 24 us instead of 72 us.
        """
        ours = context is trace.root
        span = ReadableSpan(
            name,
            context,
            trace.parent if ours else trace.root,
            self._resource,
            {key: value for key, value in attributes.items() if value is not None},
            [Event(what, dict(told), trace.nanoseconds(at)) for what, at, told in moments],
            (),
            SpanKind.SERVER if ours else SpanKind.CLIENT,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error or None),
            start_time=trace.nanoseconds(begun),
            end_time=trace.nanoseconds(ended),
            instrumentation_scope=self._scope,
        )
        self._batches.on_end(span)

    def close(self) -> None:
        """Send the spans that are left, and return after FLUSH_SECONDS at most.

        The limit is enforced here, since neither the SDK nor the exporter keeps its own.
        """
        closing = threading.Thread(target=self._batches.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(FLUSH_SECONDS)
        if closing.is_alive():
            log.warning("the receiver of traces did not take the last spans within %g s; they are lost", FLUSH_SECONDS)


class _Seldom(logging.Handler):
    """A logging handler that passes on each message of OpenTelemetry's SDK at most once in QUIET_SECONDS.

    The SDK repeats its message for every batch of spans that it could not send.
    """

    def __init__(self) -> None:
        super().__init__()
        self._quiet_until: dict[str, float] = {}  # by message before formatting: the SDK has a few dozen
        self._untold: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        what, now = str(record.msg), monotonic()
        if now < self._quiet_until.get(what, 0.0):
            self._untold[what] += 1
            return
        self._quiet_until[what] = now + QUIET_SECONDS
        more = self._untold.pop(what, 0)
        said = record.getMessage() + (f" ({more} more like it in the last {QUIET_SECONDS:g} s)" if more else "")
        log.log(record.levelno, "%s", said, exc_info=record.exc_info)


class _Kept(logging.Handler):
    """A logging handler that collects the messages of OpenTelemetry's SDK in the list `said`."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _hear(handler: logging.Handler) -> None:
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.handlers[:] = [handler]


def refusal(seconds: float) -> str:
    """Send an export without spans to the receiver, and return the exporter's error, or "" if it was accepted.

    Blocks for up to `seconds`.
    """
    _hear(kept := _Kept())
    exporter = OTLPSpanExporter(timeout=seconds)
    taken = exporter.export(()) is SpanExportResult.SUCCESS
    exporter.shutdown()
    return "" if taken else kept.said[0]
