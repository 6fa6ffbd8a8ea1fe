"""Answers whose end nothing tells but a closed connection, which is what the death of an engine looks like, too; and
clients of HTTP/1.0, to whom what came in chunks ends so."""

import asyncio

import pytest

from ..http.talk import eventually, read_request
from .replies import ANSWER, EVENT, SSE_HEAD, answers, chunk, post, says
from .stack import stack

UNFRAMED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
UNFRAMED_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"message_stop"}}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
WRITTEN = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed","response":{"output":[]}}\n\n'
LONG_END = b'x","usage":{"input_tokens":1}}}\n\n'  # of that event, of which the beginning is no longer kept
DONE = b"data: [DONE]\n\n"
SPOKEN = EVENT.replace(b"x", b"data: [DONE]")
ERROR = b'data: {"error":{"message":"no","code":500}}\n\n'
CHAT, MESSAGES, RESPONSES = b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"


def asked(version, **how):
    return post(**how).replace(b"HTTP/1.1", b"HTTP/" + version)


ENDS_BY_CLOSE = pytest.mark.parametrize(
    ("head", "frame", "version"),
    [(SSE_HEAD, chunk, b"1.0"), (UNFRAMED, bytes, b"1.0"), (UNFRAMED, bytes, b"1.1")],
    ids=["a client of 1.0", "a client of 1.0 and an engine without chunks", "an engine without chunks"],
)
MORE = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"x" * 65536)
PIECES = 512  # 32 MB, and the kernel holds some


async def was_reset(talk):
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(talk.reader.read(), 5)


async def test_a_client_of_http_1_0_gets_its_stream_without_chunks_from_a_connection_that_is_kept():
    connections = []

    async def script(reader, writer):
        connections.append(writer)
        while True:
            head, _ = await read_request(reader)
            assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
            writer.write(SSE_HEAD + chunk(EVENT)[:9])
            await writer.drain()
            writer.write(chunk(EVENT)[9:] + chunk(DONE) + b"0\r\n\r\n")

    async with stack(script) as s:
        for _ in range(2):
            talk = await s.say(asked(b"1.0"))
            head, _, body = (await talk.rest()).partition(b"\r\n\r\n")
            assert body == EVENT + DONE and b"transfer-encoding" not in head.lower()
            await eventually(s.idle)
        assert len(connections) == 1 and s.faults == []


async def test_a_client_of_http_1_0_gets_json_that_came_in_chunks_as_it_is():
    head = SSE_HEAD.replace(b"text/event-stream; charset=utf-8", b"application/json")
    async with stack(says(head + chunk(ANSWER[:9]) + chunk(ANSWER[9:]) + b"0\r\n\r\n")) as s:
        talk = await s.say(asked(b"1.0"))
        assert (await talk.rest()).endswith(b"\r\n\r\n" + ANSWER)


async def test_a_client_of_http_1_0_that_keeps_its_connection_is_told_that_it_stays_open():
    async with stack(answers()) as s:
        talk = await s.talk()
        for request in (post(), post(extra=b"X-Own: y\r\n"), post(path=b"/no/such/path")):
            keeping = request.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"\r\n", b"\r\nConnection: keep-alive\r\n", 1)
            assert (await talk.ask(keeping))[1]["connection"] == "keep-alive"
        await talk.say(asked(b"1.0"))
        assert b"connection: close" in (await talk.rest()).lower()


async def test_a_client_of_http_1_0_is_told_that_its_engine_died():
    async with stack(says(SSE_HEAD + chunk(EVENT), then_hangs=False)) as s:
        talk = await s.say(asked(b"1.0"))
        body = (await talk.rest()).partition(b"\r\n\r\n")[2]
        assert body.startswith(EVENT + b'data: {"error"') and b"the answer broke off" in body and s.faults == ["closed"]


async def test_framing_that_is_broken_is_no_end_for_a_client_of_http_1_0():
    here = asyncio.Event()

    async with stack(says(SSE_HEAD + chunk(EVENT), here, b"1;" + b"x" * 70_000)) as s:
        talk = await s.say(asked(b"1.0"))
        await talk.until(EVENT)
        here.set()
        assert (await talk.rest()).startswith(b'data: {"error"') and s.faults == ["protocol"]


@pytest.mark.parametrize(
    ("path", "events"),
    [
        (CHAT, EVENT + DONE),
        (CHAT, EVENT + ERROR),
        (MESSAGES, DELTA + STOP),
        (RESPONSES, WRITTEN + COMPLETED),
        (RESPONSES, WRITTEN + LONG_END),
        (b"/v1/something", b"data: a language of its own\n\n"),
    ],
)
async def test_a_stream_with_its_last_event_is_whole_when_its_connection_is_closed(path, events):
    async with stack(says(UNFRAMED + events, then_hangs=False), allow_paths=["/v1/something"]) as s:
        talk = await s.say(post(path=path))
        assert (await talk.rest()).endswith(b"\r\n\r\n" + events)
        await eventually(s.idle)
        assert "closed" not in s.faults


@pytest.mark.parametrize(
    ("path", "events"),
    [
        (CHAT, EVENT),
        (CHAT, EVENT + b"data: [DON"),
        (CHAT, SPOKEN),
        (MESSAGES, DELTA),
        (RESPONSES, WRITTEN),
        (RESPONSES, WRITTEN + COMPLETED[:-20]),
    ],
)
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_stream_that_ends_before_its_last_event_is_no_whole_one(path, events, version):
    async with stack(says(UNFRAMED + events, then_hangs=False)) as s:
        talk = await s.say(asked(version, path=path))
        if events.endswith(b"\n\n"):
            body = (await talk.rest()).partition(b"\r\n\r\n")[2]
            assert body.startswith(events) and b"the answer broke off" in body
        else:  # within an event nothing can be told
            await was_reset(talk)
        await eventually(s.idle)
        assert s.faults == ["closed"]


@pytest.mark.parametrize("body", [b"", b'{"error":{"message":"x"', b"no"])
async def test_an_error_answer_is_passed_on_as_it_is(body):
    async with stack(says(UNFRAMED_JSON.replace(b"200 OK", b"400 Bad") + body, then_hangs=False)) as s:
        talk = await s.say(post())
        head, _, said = (await talk.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and said == body and s.faults == []


async def test_json_that_ends_within_its_object_resets_the_connection_and_a_whole_one_does_not():
    async with stack(says(UNFRAMED_JSON + ANSWER + b"\n", then_hangs=False)) as s:
        talk = await s.say(post())
        assert (await talk.rest()).endswith(ANSWER + b"\n") and s.faults == []
    async with stack(says(UNFRAMED_JSON + ANSWER[:-20], then_hangs=False)) as s:
        talk = await s.say(post())
        await was_reset(talk)
        await eventually(s.idle)
        assert s.faults == ["closed"]


@ENDS_BY_CLOSE
async def test_a_stream_is_reset_where_the_gateway_stops_within_it(head, frame, version):
    async with stack(says(head + frame(EVENT))) as s:
        talk = await s.say(asked(version))
        await talk.until(EVENT)
        assert await s.server.end() == 1
        await was_reset(talk)
        assert s.idle()


def too_much(head, frame, end):
    """More of a stream than a client takes that reads none of it."""

    async def script(reader, writer):
        await read_request(reader)
        writer.write(head)
        for _ in range(PIECES):
            writer.write(frame(MORE))
            await writer.drain()
        writer.write(end)
        await writer.drain()
        if frame is not chunk:
            writer.close()
        await reader.read()

    return script


@ENDS_BY_CLOSE
async def test_a_stream_is_reset_where_its_client_does_not_take_it(head, frame, version):
    async with stack(too_much(head, frame, frame(DONE)), idle_timeout=0.5) as s:
        talk = await s.say(asked(version))
        await talk.until(b"\r\n\r\n")
        await eventually(lambda: not s.server.connections, 10)
        await was_reset(talk)
        assert s.faults == [] and s.idle()
