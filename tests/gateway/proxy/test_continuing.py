"""With --continue-streams: what ends a stream for its engine, and what its client gets then."""

import asyncio
import json

import orjson
import pytest

from gateway.prompt.pipeline import Pipeline
from gateway.proxy.retries import STALLED
from replicas import State
from replicas.simulated.model import sim_model_dir

from ..http.talk import eventually, read_request
from .replies import SSE_HEAD, chunk, post, streams
from .stack import stack

PIPELINE = Pipeline(sim_model_dir(), "m", 16)
GREEDY = {
    "model": "m",
    "stream": True,
    "temperature": 0,
    "max_tokens": 6,
    "messages": [{"role": "user", "content": "Hi"}],
}
BODY = orjson.dumps(GREEDY)
PROMPT_IDS = [*memoryview(PIPELINE.prepare("/v1/chat/completions", BODY).token_ids).cast("I")]
WORDS = ["a", "b", "c", "d", "e", "f"]  # of ids 1 to 6


def event(name, ids=None, text=None, **choice) -> bytes:
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    told = {"prompt_token_ids": ids} if text is None else {}
    one = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
    if text is not None:
        one["token_ids"] = ids
    return chunk(b"data: " + orjson.dumps({"id": name, "created": 1, "choices": [one], **told}) + b"\n\n")


def engine(name: str, ends=b"", after: int = 6, seen: list | None = None, then=None):
    """Writes the words that follow the ids it is given; `after` so many of them come `ends`, and `then`."""

    async def script(reader, writer):
        while True:
            request = json.loads((await read_request(reader))[1])
            if seen is not None:
                seen.append(request)
            given = (request.get("kv_transfer_params") or {}).get("prompt_token_ids", PROMPT_IDS)
            assert given[: len(PROMPT_IDS)] == PROMPT_IDS and request["return_token_ids"] is True
            written = len(given) - len(PROMPT_IDS)
            assert given[len(PROMPT_IDS) :] == [*range(1, written + 1)]
            assert request["max_tokens"] == 6 - written
            writer.write(SSE_HEAD + event(name, given))
            for number in range(written + 1, min(7, written + after + 1)):
                reason = "length" if number == 6 else None
                writer.write(event(name, [number], WORDS[number - 1], finish_reason=reason))
                await writer.drain()
                await asyncio.sleep(0)
            if after < 6 - written or ends:
                writer.write(ends)
                await writer.drain()
                if then is not None:
                    await then()
                return
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return script


def continued(*scripts, **options):
    return stack(*scripts, pipeline=PIPELINE, continue_streams="exact", **options)


def told(body: bytes) -> tuple[str, set]:
    """Text and names of a stream that is complete."""
    assert body.endswith(b"data: [DONE]\n\n"), body
    found = [json.loads(line[5:]) for line in body.splitlines() if line.startswith(b"data: {")]
    assert b'token_ids":[' not in body
    choices = [choice for one in found for choice in one["choices"]]
    return "".join(choice["delta"]["content"] for choice in choices), {one["id"] for one in found}


async def never():
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    "ends",
    [
        b"",  # the connection breaks between two events
        event("1", [3], "c")[:20],  # within a chunk
        b"4\r\nda",  # within an event
        b"0\r\n\r\n",  # the body ends as HTTP has it, and no last event was there
        chunk(b'data: {"error": {"message": "EngineDeadError", "type": "InternalServerError", "code": 500}}\n\n')
        + b"0\r\n\r\n",
        event("1", [], "", finish_reason="abort") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
    ],
)
async def test_however_an_engine_ends_another_goes_on(ends):
    seen = []
    async with continued(engine("1", ends, 2, seen), engine("2", seen=seen)) as s:
        talk = await s.talk()
        await talk.say(post(BODY))
        _, headers, body = await talk.response()
        assert told(body) == ("abcdef", {"1"}) and b"role" in body and body.count(b"role") == 1
        assert s.metrics.continued_streams.total(way="ids") == 1
        assert s.metrics.continue_gap_seconds.count("ids") == 1
        await eventually(s.idle)
        await talk.say(post(BODY))  # the connection is good for the next request
        assert (await talk.response())[0] == 200


async def test_each_of_several_engines_goes_on_where_the_last_one_broke_off():
    async with continued(engine("1", b"", 1), engine("2", b"", 2), engine("3", b"", 1), engine("4")) as s:
        talk = await s.talk()
        await talk.say(post(BODY))
        assert told((await talk.response())[2]) == ("abcdef", {"1"})
        assert s.metrics.continued_streams.total(way="ids") >= 3
        await eventually(s.idle)


async def test_a_stream_that_lacks_its_end_alone_is_ended_here():
    options = {"stream_options": {"include_usage": True}}
    body = orjson.dumps(GREEDY | options)
    async with continued(engine("1", b"1", 6), engine("2", b"1", 6)) as s:
        talk = await s.talk()
        await talk.say(post(body))
        answer = (await talk.response())[2]
        assert told(answer) == ("abcdef", {"1"})
        assert json.loads(answer.split(b"\n\n")[-3][6:])["usage"] == {
            "prompt_tokens": len(PROMPT_IDS), "completion_tokens": 6, "total_tokens": len(PROMPT_IDS) + 6
        }  # fmt: skip
        assert s.metrics.continued_streams.total(way="over") == 1
        await eventually(s.idle)


async def test_an_engine_that_falls_silent_is_left():
    async with continued(engine("1", b"", 2, then=never), engine("2"), idle_timeout=0.2) as s:
        talk = await s.talk()
        await talk.say(post(BODY))
        sweeps = asyncio.create_task(sweep(s))
        assert told((await talk.response())[2]) == ("abcdef", {"1"})
        sweeps.cancel()
        assert s.faults == [STALLED]
        await eventually(s.idle)


async def sweep(s):
    while True:
        s.proxy.sweep(asyncio.get_running_loop().time())
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("others", [[], [engine("2", b"", 0), engine("3", b"", 0)]])
async def test_a_stream_that_nobody_goes_on_with_ends_with_an_error(others):
    async with continued(engine("1", b"", 2), *others) as s:
        talk = await s.talk()
        await talk.say(post(BODY))
        body = (await talk.response())[2]
        assert b"broke off" in body and not body.endswith(b"[DONE]\n\n")
        assert s.metrics.streams_not_continued.total() == 1
        await eventually(s.idle)


async def test_a_client_that_leaves_while_another_is_asked_leaves_nothing_behind():
    asked = asyncio.Event()

    async def silent(reader, writer):
        await read_request(reader)
        asked.set()
        await reader.read()

    async with continued(engine("1", b"", 2), silent) as s:
        talk = await s.talk()
        await talk.say(post(BODY))
        await asyncio.wait_for(asked.wait(), 5)
        await talk.close()
        await eventually(s.idle)
        assert not s.proxy.conductor.continuing.kept


async def test_an_engine_that_does_not_take_the_ids_is_passed_over():
    async def deaf(reader, writer):
        """Begins the answer from its beginning, whatever ids it is given."""
        await read_request(reader)
        writer.write(SSE_HEAD + event("2", PROMPT_IDS) + event("2", [1], "a"))
        await writer.drain()
        await reader.read()

    async with continued(engine("1", b"", 2), deaf) as s:
        talk = await s.talk()
        await talk.say(post(BODY))
        body = (await talk.response())[2]
        assert b"broke off" in body and body.count(b'"content":"a"') == 1
        assert s.metrics.streams_not_continued.total(reason="differs") == 1
        await eventually(s.idle)


async def test_an_engine_that_refuses_to_go_on_is_passed_over():
    async def refuses(reader, writer):
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")

    async with continued(engine("1", b"", 2), refuses, engine("3")) as s:
        talk = await s.talk()
        await talk.say(post(BODY))
        assert told((await talk.response())[2])[0] == "abcdef"
        await eventually(s.idle)


async def test_what_is_kept_has_a_budget():
    async with continued(engine("1", b"", 2), engine("2"), continue_budget=10) as s:
        talk = await s.talk()
        await talk.say(post(BODY))
        assert b"broke off" in (await talk.response())[2]
        assert s.metrics.streams_not_continued.total(reason="budget") == 1
        await eventually(lambda: s.idle() and not s.proxy.conductor.continuing.kept)


async def test_without_the_setting_a_stream_is_cut_as_ever():
    async with stack(streams(event("1", [1], "a"), end=None), streams(), pipeline=PIPELINE) as s:
        talk = await s.talk()
        await talk.say(post(BODY))
        assert b"broke off" in (await talk.response())[2]
        assert not s.metrics.streams_not_continued.total() and not s.metrics.continued_streams.total()


async def test_a_part_of_a_character_is_written_by_the_next_engine():
    """Ids whose text is not shown yet are not given to it, so that no character is lost."""
    seen = []

    async def first(reader, writer):
        await read_request(reader)
        writer.write(SSE_HEAD + event("1", PROMPT_IDS) + event("1", [1], "a") + event("1", [200], ""))
        await writer.drain()

    async with continued(first, engine("2", seen=seen)) as s:
        talk = await s.talk()
        await talk.say(post(BODY))
        assert told((await talk.response())[2])[0] == "abcdef"
        assert seen[0]["kv_transfer_params"]["prompt_token_ids"] == [*PROMPT_IDS, 1]


async def test_a_replica_that_is_not_ready_does_not_go_on():
    async with continued(engine("1", b"", 2), engine("2")) as s:
        [*s.proxy.backends.values()][1].replica.state = State.FAILED
        s.proxy.changed()
        talk = await s.talk()
        await talk.say(post(BODY))
        assert b"broke off" in (await talk.response())[2]
        assert s.metrics.streams_not_continued.total(reason="no replica") == 1
