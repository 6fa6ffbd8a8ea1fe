"""A receiver of traces on a real port: OTLP over HTTP, protobuf decoded."""

from __future__ import annotations

import asyncio
import gzip
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

KINDS = {1: "INTERNAL", 2: "SERVER", 3: "CLIENT"}


class Span:
    """One span as received, ids in hex, times in ns; `told` are its attributes, `events` name -> (time, attributes)."""

    def __init__(self, span: Any, resource: dict[str, Any]):
        self.resource = resource
        self.name, self.kind = span.name, KINDS[span.kind]
        self.trace, self.id, self.parent = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.state = span.trace_state
        self.begun, self.ended = span.start_time_unix_nano, span.end_time_unix_nano
        self.told = attributes(span.attributes)
        self.events = [(event.name, event.time_unix_nano, attributes(event.attributes)) for event in span.events]
        self.failed, self.message = span.status.code == 2, span.status.message
        self.raw = span.SerializeToString()


def attributes(pairs) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


class Collector:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def of(self, kind: str) -> list[Span]:
        """By their begin."""
        return sorted((span for span in self.spans if span.kind == kind), key=lambda span: span.begun)

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("content-encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.headers.append(dict(request.headers))
        for one in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = attributes(one.resource.attributes)
            self.spans += [Span(span, resource) for scope in one.scope_spans for span in scope.spans]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )

    async def until(self, true, seconds: float = 60) -> None:
        """Wait until `true(self)`."""
        end = asyncio.get_running_loop().time() + seconds
        while not true(self):
            assert asyncio.get_running_loop().time() < end, (
                f"did not come in time: {[(span.kind, span.name) for span in self.spans]}"
            )
            await asyncio.sleep(0.01)


@asynccontextmanager
async def collecting(answer=None):
    """A running collector; `answer` in place of its own is a handler that may never answer."""
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", answer or collector.take)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()
