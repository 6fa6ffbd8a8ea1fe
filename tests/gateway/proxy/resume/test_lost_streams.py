"""With --continue-streams: streams that nobody can go on with pass as they do without the setting."""

import asyncio
import gzip
import json

import orjson
import pytest

from ...http.talk import eventually, read_request
from ..replies import ENDS, NEXT, SSE_HEAD, chunk, post, reply, says
from .test_resumer import BODY, GREEDY, PROMPT_IDS, continued, engine, event, told

EVENTS = b"".join(
    b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"%d"},"finish_reason":null}]}\r\n\r\n' % number
    for number in range(300)
)
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(gzip.compress(EVENTS)) + b"0\r\n\r\n",
        b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
    ],
    ids=["gzip", "length"],
)
async def test_a_framing_that_cannot_be_gone_on_with_arrives_byte_for_byte(answer):
    async with continued(says(PLAIN_HEAD + answer, NEXT, PLAIN_HEAD + answer)) as s:
        talk = await s.talk()
        for _ in range(2):  # the connection is good for another one
            _, headers, body = await talk.ask(post(BODY))
            assert (gzip.decompress(body) if "content-encoding" in headers else body) == EVENTS
        await eventually(s.idle)
        assert not s.proxy.handler.resumer.kept and not s.proxy.handler.resumer._refused


THINKS = chunk(
    b'data: {"id":"1","created":1,"choices":[{"index":0,"delta":{"reasoning":"Hm"},"finish_reason":null,"token_ids":[77,78]}]}\n\n'
)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("cut", [0, 40, len(THINKS) + 25])
async def test_from_an_unknown_event_on_a_stream_passes_unread_with_the_ids_that_its_client_asked_for(asks, cut):
    """However the reads fall."""
    last = event("1", [1234], "b", finish_reason="stop") + ENDS
    rest = THINKS + event("1", [5], "a") + last
    drained = asyncio.Event()
    if not cut:
        drained.set()
    begun = SSE_HEAD + event("1", PROMPT_IDS) + event("1", [1], "x") + rest[:cut]
    async with continued(says(begun, drained, rest[cut:])) as s:
        talk = await s.say(post(GREEDY | ({"return_token_ids": True} if asks else {})))
        seen = await talk.until(b'"x"')
        drained.set()
        body = seen + await talk.until(b"0\r\n\r\n")
        assert body.count(b"Hm") == 1 and body.count(b"[DONE]") == 1 and body.count(b'"content":"') == 4
        assert [piece in body for piece in (b"[1]", b"[77,78]", b"[5]", b"[1234]")] == 4 * [asks]


async def test_an_engine_that_refuses_to_be_asked_for_ids_gets_requests_as_they_came():
    seen = []

    async def strict(reader, writer):
        while True:
            request = json.loads((await read_request(reader))[1])
            seen.append("return_token_ids" in request)
            if seen[-1]:
                writer.write(reply(b"{}", b"400 Bad Request"))
                continue
            writer.write(SSE_HEAD + event("1", None, "a") + event("1", None, "b", finish_reason="stop"))
            writer.write(ENDS)

    async with continued(strict) as s:
        for count in (2, 3):  # it is remembered
            status, _, body = await s.ask(post(BODY))
            assert (status, told(body)[0], len(seen)) == (200, "ab", count)
        assert seen == [True, False, False]


async def test_a_stream_that_is_left_and_breaks_off_is_counted_by_why():
    script = says(SSE_HEAD + event("1", PROMPT_IDS) + event("1", [1], "a") + THINKS, then_hangs=False)
    tools = orjson.dumps(GREEDY | {"tools": [{"type": "function", "function": {"name": "f"}}]})
    async with continued(script, script, engine("2")) as s:
        for body, reason in ((BODY, "events"), (tools, "tools")):
            assert b"broke off" in (await s.ask(post(body)))[2]
            assert s.metrics.streams_not_continued.total(reason=reason) == 1


@pytest.mark.parametrize("whole", [True, False])
async def test_the_budget_binds_after_a_break_as_well(whole):
    """The client gets all that the second replica writes; if that breaks off as well, nobody goes on."""
    most = []

    async def writes_much(reader, writer):
        given = json.loads((await read_request(reader))[1])["kv_transfer_params"]["prompt_token_ids"]
        writer.write(SSE_HEAD + event("2", given))
        for number in range(200):
            writer.write(event("2", [number], "y" * 1000))
            await writer.drain()
            await asyncio.sleep(0)
            most.append(s.proxy.handler.resumer.kept)
        if whole:
            writer.write(event("2", [7], "z", finish_reason="stop") + ENDS)
            await writer.drain()

    async with continued(engine("1", b"", 2), writes_much, engine("3"), continue_budget=20_000) as s:
        body = (await s.ask(post(BODY)))[2]
        assert body.count(b"y" * 1000) == 200 and (b"[DONE]" in body, b"broke off" in body) == (whole, not whole)
        assert max(most) < 60_000
        assert s.metrics.streams_not_continued.total(reason="budget") == (0 if whole else 1)
