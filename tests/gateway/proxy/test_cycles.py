"""What a client sent is freed when it is done with, or gone, and not when the garbage collector comes by.

`serve` sets the collector so that a full collection comes about once in millions of requests. So whatever is left in a
cycle of references is there for hours: 60 aborted uploads of 60 MB were.
"""

import asyncio
import gc
import threading
from contextlib import contextmanager, suppress

import orjson
import pytest
import uvloop
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gateway.errors import ApiError
from gateway.ops import spans
from gateway.prompt.pipeline import OFFLOAD_BYTES, Pipeline
from gateway.proxy.observers.traces import Traces
from gateway.proxy.placement.decisions import Decisions
from replicas.simulated.model import sim_model_dir

from ..http.talk import eventually, free_port, read_request
from .replies import EVENT, SSE_HEAD, answers, chunk, post, says, silent, streams
from .stack import stack

OURS = ("gateway.", "httptools.")


@contextmanager
def no_cycles():
    """Nothing of the gateway's may be left to the collector by what happens within."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = sorted({f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage})
        assert [name for name in left if name.startswith(OURS)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


LONG = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x " * OFFLOAD_BYTES}]})
BAD = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": "many"})
NOT_JSON = b'{"model": "m", "messages": ' + b"[" * 1000
STRANGE = orjson.dumps(
    {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}
)
UNKNOWN = orjson.dumps({"model": "nobody's", "messages": [{"role": "user", "content": "hi"}]})


async def leaves(talk, raw: bytes) -> None:
    await talk.say(raw)
    await asyncio.sleep(0.01)


async def asks(talk, *raws: bytes) -> None:
    for raw in raws:
        await talk.ask(raw)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
OTHERS = (b"/v1/models", b"/health", b"/version", b"/no/such")
CLIENTS = {
    "an upload that is not finished": lambda talk: leaves(talk, HEAD + b"Content-Length: 9000000\r\n\r\n" + b"x" * 3_000_000),
    "chunks that are not finished": lambda talk: leaves(talk, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 9000)),
    "a head that is not finished": lambda talk: leaves(talk, b"POST /v1/completions HTTP/1.1\r\nHos"),
    "requests, the head the same": lambda talk: asks(talk, post(), post(), post(LONG)),
    "what other paths there are": lambda talk: asks(talk, *(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in OTHERS)),
    "a request in HTTP/1.0": lambda talk: asks(talk, b"GET /version HTTP/1.0\r\n\r\n"),
    "an offer of h2c": lambda talk: asks(talk, post(extra=b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n")),
    "a malformed request": lambda talk: asks(talk, post(), b"NONSENSE\r\n\r\n"),
    "a body that is too large": lambda talk: asks(talk, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\nxxx"),
    "bodies that are refused": lambda talk: asks(talk, post(BAD), post(NOT_JSON), post(STRANGE), post(UNKNOWN), post(b"\xff\xfe")),
    "a request that is left": lambda talk: leaves(talk, post()),
    "a long one that is left": lambda talk: leaves(talk, post(LONG)),
    "several at once that are left": lambda talk: leaves(talk, post() * 20),
}  # fmt: skip


@pytest.fixture(scope="module")
def pipeline():
    return Pipeline(sim_model_dir(), "m", 16)


@pytest.mark.parametrize("doing", CLIENTS)
def test_no_client_leaves_anything_to_the_collector(doing, pipeline):
    async def run():
        async with stack(answers(), pipeline=pipeline, retries=0) as s:
            await asks(await s.talk(), post(), post(LONG))  # what is made once
            await eventually(s.idle)
            with no_cycles():
                talk = await s.talk()
                await CLIENTS[doing](talk)
                await talk.close()
                await eventually(lambda: s.idle() and len(s.server.connections) == 1)
                await asyncio.sleep(0.01)

    uvloop.run(run())


async def breaks(reader, writer):
    await read_request(reader)
    writer.write(SSE_HEAD + chunk(EVENT))


REPLICAS = {
    "answers once a connection": [answers(close_after=True)],
    "streams": [streams(chunk(EVENT), chunk(EVENT))],
    "streams without an end": [streams(chunk(EVENT), end=None)],
    "breaks a stream": [breaks],
    "is unwell": [answers(status=b"503 Service Unavailable"), answers()],
    "is no replica": [says(b"SSH-2.0-OpenSSH\r\n")],
    "switches protocols": [says(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")],
    "says more than it was asked": [says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokandmore")],
    "is silent": [silent],
    "is not there": [],
    "is none": [],
}  # fmt: skip


class Nobody(SpanExporter):
    """A receiver that takes every span. To one that is not there the SDK's thread sends for 10 s more, and draws random
    numbers for it, of which hypothesis complains in whatever test it runs at that time."""

    def export(self, spans):
        return SpanExportResult.SUCCESS


@pytest.fixture
def traces(monkeypatch):
    """Of a gateway; no thread of the SDK outlives the test."""
    monkeypatch.setattr(spans, "OTLPSpanExporter", Nobody)
    made = spans.Spans()
    yield Traces(made, "round_robin")
    made.close()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("Otel")]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("doing", REPLICAS)
def test_no_replica_leaves_anything_to_the_collector(doing, traced, pipeline, request):
    options = {"traces": request.getfixturevalue("traces")} if traced else {}

    async def run():
        ports = [free_port()] if doing == "is not there" else []
        async with stack(*REPLICAS[doing], ports=ports, pipeline=pipeline, request_timeout=0.3, **options) as s:
            with no_cycles():
                talk = await s.talk()
                for _ in range(2):
                    await talk.say(post())
                await asyncio.wait_for(talk.reader.read(1), 5)
                await talk.close()
                await eventually(lambda: s.idle() and not s.server.connections)
                for backend in s.proxy.backends.values():
                    backend.pool.sweep(float("inf"))
                await asyncio.sleep(0.01)

    uvloop.run(run())


async def test_a_bug_of_ours_leaves_nothing_to_the_collector(pipeline, monkeypatch):
    """Nor does what the admin side asks about."""

    def fails(*_):
        raise ZeroDivisionError("a bug")

    async with stack(answers(), pipeline=pipeline) as s:
        decisions = Decisions(s.proxy)
        with no_cycles():
            with monkeypatch.context() as patched:
                patched.setattr(s.proxy.models.routes, "prepare", fails)
                talk = await s.talk()
                await asks(talk, post(), post(LONG))
            with monkeypatch.context() as patched:
                patched.setattr(s.proxy.settling, "_settle", fails)
                await asks(talk, post(), post(LONG))
                await eventually(s.idle)
            with monkeypatch.context() as patched:
                patched.setattr(s.proxy.settling, "on_end", [fails])
                await asks(talk, post())
                await eventually(s.idle)
            for body in (BAD, LONG, NOT_JSON + b" " * OFFLOAD_BYTES):
                with suppress(ApiError):
                    await s.proxy.preparation.prompt("/v1/chat/completions", body, {})
            with suppress(ApiError):
                await decisions.decide("/v1/chat/completions", UNKNOWN, {})
            await talk.close()
            await eventually(lambda: s.idle() and not s.server.connections)
