"""What goes wrong once the client has a part of its answer: it can tell, and nobody is blamed in vain."""

import asyncio
import json

import orjson
import pytest

from replicas import State

from ..http.talk import eventually, read_request
from .engine_events import DONE, TOKEN
from .replies import EVENT, SSE_HEAD, chunk, post, reply, says, streams
from .stack import stack


async def test_a_stream_that_is_silent_ends_sooner_where_the_replica_is_lost():
    async with stack(says(SSE_HEAD + chunk(EVENT)), idle_timeout=60.0) as s:
        (ill,) = s.proxy.backends.values()
        talk = await s.say(post())
        exchange = await s.exchange(lambda attempt: attempt.pieces)
        s.proxy.sweep(exchange.attempt.seen_at + 59)
        ill.replica.state = State.FAILED
        s.proxy.sweep(exchange.attempt.seen_at + 9)
        assert s.faults == []
        s.proxy.sweep(exchange.attempt.seen_at + 11)
        status, _, body = await talk.response()
        assert status == 200 and body.startswith(EVENT) and b"no byte for 10 s" in body and s.faults == ["stalled"]


@pytest.mark.parametrize(
    ("path", "marks"),
    [
        (b"/v1/chat/completions", [b'"code":"replica_failed"']),
        (b"/v1/responses", [b"event: error", b'"type":"error"']),
        (b"/v1/messages", [b"event: error", b'"type":"api_error"']),
    ],
)
async def test_death_in_the_stream_ends_it_with_an_error_event_and_no_done(path, marks):
    async with stack(streams(chunk(EVENT), chunk(EVENT), end=None)) as s:
        talk = await s.talk()
        status, _, body = await talk.ask(post(path=path))
        assert status == 200 and body.startswith(EVENT + EVENT)
        assert all(mark in body for mark in marks) and b"[DONE]" not in body
        await eventually(s.idle)
        await talk.say(post(path=path))  # the connection is as good as before
        assert (await talk.response())[0] == 200


async def test_the_error_of_a_response_is_numbered_and_raises_in_openais_client():
    told = b'"type":"response.output_text.delta","delta":"\\"sequence_number\\":99","x":{"sequence_number":3}'
    event = b'event: response.output_text.delta\ndata: {"sequence_number":%d,' + told + b"}\n\n"
    async with stack(streams(chunk(event % 7), chunk(event % 8), end=None)) as s:
        error = orjson.loads((await s.ask(post(path=b"/v1/responses")))[2].rpartition(b"data: ")[2])
        assert error["type"] == "error" and error["sequence_number"] == 9
        assert {name: error[name] for name in ("code", "message", "param")}.items() <= error["error"].items()


CRLF_EVENT = EVENT.replace(b"\n", b"\r\n")


@pytest.mark.parametrize(
    "reads",
    [
        [chunk(CRLF_EVENT)],
        [chunk(EVENT)[:-2], b"\r\n"],
        [chunk(EVENT)[:-1], b"\n"],
        [chunk(CRLF_EVENT)[:-4], b"\r", b"\n\r\n"],
    ],
    ids=["CRLF", "chunk's end apart", "chunk's end torn", "CRLF, torn"],
)
async def test_a_stream_that_ends_between_events_is_told_of_however_its_lines_and_reads_end(reads):
    async def script(reader, writer):
        await read_request(reader)
        for read in (SSE_HEAD + chunk(EVENT), *reads):
            writer.write(read)
            await eventually(lambda read=read: b"".join(tail()).endswith(read[-30:]))

    def tail():
        return [piece for exchange in s.proxy.exchanges for attempt in exchange.attempts for piece in attempt.tail]

    async with stack(script) as s:
        status, _, body = await s.ask(post())
        assert status == 200 and b"the answer broke off" in body and b"[DONE]" not in body
        assert body.startswith(EVENT) and b"\n\ndata: {" in body[len(EVENT) :].replace(b"\r\n", b"\n")


@pytest.mark.parametrize(
    ("begun", "end"),
    [
        (SSE_HEAD + chunk(EVENT) + chunk(b"data: half\r\n"), chunk(b"data: half\r\n")),
        (SSE_HEAD + chunk(EVENT) + chunk(b"data: half\n"), chunk(b"data: half\n")),
        (SSE_HEAD + chunk(EVENT) + b"ff\r\ndata: half", b""),
        (SSE_HEAD + chunk(EVENT) + b"ff", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", b"half"),
    ],
    ids=["an event, CRLF", "an event", "a chunk", "a chunk's size", "a plain body"],
)
async def test_death_within_an_event_a_chunk_or_a_plain_body_cuts_the_connection(begun, end):
    async with stack(says(begun, then_hangs=False)) as s:
        talk = await s.say(post())
        raw = await talk.rest()
        assert raw.endswith(end) and not raw.endswith((b"}", b"0\r\n\r\n")) and b"[DONE]" not in raw


@pytest.mark.parametrize(
    "begun",
    [SSE_HEAD + chunk(EVENT), SSE_HEAD.replace(b"Transfer-Encoding: chunked", b"Connection: close") + CRLF_EVENT],
    ids=["chunked", "without chunks, its lines end with CRLF"],
)
async def test_a_stream_that_stalls_is_ended_with_an_error_event(begun):
    async with stack(says(begun), idle_timeout=0.2) as s:
        talk = await s.say(post(extra=b"Connection: close\r\n"))
        body = await talk.rest()
        assert b"no byte for 0.2 s" in body and b"[DONE]" not in body


@pytest.mark.parametrize("after", ["request", "first event"])
async def test_a_client_that_leaves_aborts_the_request_upstream(after):
    left, arrived = asyncio.Event(), asyncio.Event()

    async def script(reader, writer):
        await says(SSE_HEAD + chunk(EVENT) if after == "first event" else b"", arrived.set)(reader, writer)
        left.set()

    async with stack(script) as s:
        talk = await s.say(post())
        await arrived.wait()
        if after == "first event":
            await talk.until(EVENT)
        await talk.close()
        await asyncio.wait_for(left.wait(), 5)
        await eventually(s.idle)
        assert s.metrics.client_aborts.total() == 1


async def test_a_client_that_does_not_read_is_dropped_and_the_replica_not_blamed():
    script = streams(chunk(EVENT), *[chunk(b"d" * 65536)] * 400)
    async with stack(script, idle_timeout=0.3) as s:
        await s.say(post())
        await eventually(lambda: s.metrics.client_aborts.total() == 1)
        await eventually(s.idle)
        assert s.faults == []


USAGE_EVENT = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\n'
LAST_EVENTS = {
    b"/v1/chat/completions": [EVENT, USAGE_EVENT, DONE],
    b"/v1/completions": [TOKEN, DONE],
    b"/v1/messages": [
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}\n\n',
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ],
    b"/v1/responses": [
        b'event: response.created\ndata: {"type":"response.created","response":{"tools":[{"usage": {"type":"object"}}]}}\n\n'
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r","output":[]}}\n\n',
    ],
}


@pytest.mark.parametrize("frame", [chunk, bytes], ids=["chunked", "until its connection ends"])
@pytest.mark.parametrize("in_one", [False, True])
@pytest.mark.parametrize("path", LAST_EVENTS)
async def test_a_client_that_closes_once_it_has_the_last_event_has_all(path, in_one, frame):
    """As many do at `data: [DONE]`, before HTTP's last chunk, which engines send apart."""
    events, ends = LAST_EVENTS[path], []
    head = SSE_HEAD if frame is chunk else SSE_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")

    async def script(reader, writer):
        await read_request(reader)
        whole = len(asked) % 2 == 0  # the second client's answer has no end yet
        asked.append(whole)
        writer.write(head + b"".join(map(frame, events if whole and in_one else events[:1])))
        if whole and not in_one:
            await writer.drain()
            await has_first.wait()
            writer.write(b"".join(map(frame, events[1:])))
        await reader.read()

    asked, has_first = [], asyncio.Event()
    async with stack(script, on_end=[lambda exchange, outcome, usage: ends.append((outcome, usage))]) as s:
        body = json.dumps({"model": "m", "stream": True, "messages": [], "prompt": "x", "input": "x"}).encode()
        for last in (events[-1], events[0]):
            talk = await s.say(post(body, path))
            await talk.until(events[0])
            has_first.set()
            if last is not events[0]:
                await talk.until(last)
            await talk.close()
            await eventually(lambda: len(ends) == len(asked))
        assert [outcome for outcome, _ in ends] == ["complete", "aborted"]
        assert s.metrics.client_aborts.total() == 1 and s.faults == []
        assert USAGE_EVENT not in events or ends[0][1].completion == 7


async def test_a_stream_tells_proxies_to_pass_it_on_as_it_comes():
    """nginx collects an answer before it passes it on, unless it is told not to."""
    told = b"X-Accel-Buffering: yes\r\n\r\n"
    events = chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n"
    heads = [SSE_HEAD, SSE_HEAD.removesuffix(b"\r\n") + told, reply()]
    for head, expected in zip(heads, ["no", "yes", None], strict=True):
        async with stack(says(head if expected is None else head + events)) as s:
            assert (await s.ask(post()))[1].get("x-accel-buffering") == expected
