"""With --continue-streams: breaks before the first word and behind the last one, and engines that write what no engine
writes."""

import asyncio
import tracemalloc

import pytest

from gateway.proxy.states import ExchangeState

from ...http.talk import eventually, read_request
from ..replies import SSE_HEAD, chunk, post, says, streams
from .test_resumer import BODY, DONE, GREEDY, PROMPT_IDS, WORDS, continued, engine, event, told

SAMPLED = GREEDY | {"temperature": 1, "stop": ["zzz"]}
# More than is held back before the first word.
MUCH = chunk(b": " + b"x" * 2**18 + b"\n\n")
ROLE = event("1", None)
DIED = chunk(b'data: {"error":{"message":"died","code":500}}\n\n')
USAGE = {"stream_options": {"include_usage": True}}


def writes(*pieces, seen=None, pause=None):
    """An engine that writes this, and breaks off."""
    return streams(*pieces, end=None, seen=seen, pause=pause)


def words(name: str, first: int = 1, ids: bool = True, end: bytes = chunk(DONE) + b"0\r\n\r\n") -> list[bytes]:
    """The events of these words, and the end of their stream."""
    written = [(number, "length" if number == 6 else None) for number in range(first, 7)]
    told = [event(name, [n] if ids else None, WORDS[n - 1], finish_reason=reason) for n, reason in written]
    return [*told, end]


async def read_to(talk, mark: bytes) -> None:
    """To where this stands, or to the end; more than a reader takes may come before."""
    end = b""
    while mark not in end and (data := await talk.reader.read(2**16)):
        end = end[-100:] + data


# --- before the first word


@pytest.mark.parametrize("fields", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "begun", [[MUCH], [MUCH, ROLE], [MUCH, ROLE, event("1", [200], "")]], ids=["ping", "role", "part"]
)
@pytest.mark.parametrize("ends", [b"", b"0\r\n\r\n", DIED], ids=["close", "end", "error"])
async def test_a_request_whose_client_has_no_word_yet_is_asked_again(fields, begun, ends):
    seen = []
    async with continued(writes(*begun, ends, seen=seen), writes(event("2", PROMPT_IDS), *words("2"), seen=seen)) as s:
        body = (await s.ask(post(fields)))[2]
        text, names = told(body)
        assert text == "abcdef" and len(names) == 1 and body.count(b'"role"') == 1
        assert seen[0][1] == seen[1][1]
        # an error is looked for before anything goes out, where it comes with what announces the answer
        assert s.metrics.continued_streams.total(way="repeat") == 1 or ends == DIED


async def test_a_stream_that_was_asked_again_is_gone_on_with_by_its_ids():
    async with continued(writes(MUCH, ROLE), engine("2", b"", 2), engine("3")) as s:
        assert told((await s.ask(post(BODY)))[2]) == ("abcdef", {"1"})
        ways = s.metrics.continued_streams
        assert ways.total(way="repeat") == 1 and ways.total(way="ids") >= 1


async def test_two_replicas_that_die_before_a_word_get_no_third():
    async with continued(writes(MUCH, ROLE), writes(ROLE, MUCH), engine("3")) as s:
        assert b"broke off" in (await s.ask(post(BODY)))[2]
        assert s.metrics.streams_not_continued.total(reason="crashes") == 1


async def test_what_a_parser_makes_passes_where_nothing_was_given():
    """Reasoning, say; after a second break nobody goes on with it."""
    thinks = event("2", None, None, delta={"reasoning": "Hm"})
    async with continued(writes(MUCH, ROLE), writes(event("2", None), thinks, *words("2", ids=False))) as s:
        body = (await s.ask(post(BODY)))[2]
        assert b'"reasoning":"Hm"' in body and body.endswith(DONE) and b'"id":"2"' not in body
    async with continued(writes(MUCH, ROLE), writes(event("2", None), thinks), engine("3")) as s:
        body = (await s.ask(post(BODY)))[2]
        assert b'"reasoning":"Hm"' in body and b"broke off" in body
        assert s.metrics.streams_not_continued.total(reason="events") == 1


async def test_a_client_that_has_a_word_keeps_no_body():
    """Of a sampled stream, which cannot be asked again."""
    rest = asyncio.Event()

    async with continued(writes(MUCH + ROLE + event("1", None, "a"), pause=rest.wait)) as s:
        talk = await s.say(post(SAMPLED | {"user": "x" * 50_000}))
        await read_to(talk, b'"content":"a"')
        assert 0 < s.proxy.handler.resumer.kept < 10_000
        rest.set()


# --- behind the last word


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b""])
async def test_usage_that_was_asked_for_is_written_where_the_stream_ends_without(end):
    async with continued(writes(event("1", PROMPT_IDS), *words("1", end=end)), engine("2")) as s:
        body = (await s.ask(post(GREEDY | USAGE)))[2]
        assert told(body)[0] == "abcdef" and b'"completion_tokens":6' in body and body.count(b"[DONE]") == 1


@pytest.mark.parametrize("fields", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("end", [b"0\r\n\r\n", b""])
async def test_a_stream_that_lacks_done_alone_gets_it(end, fields):
    async with continued(writes(event("1", PROMPT_IDS), *words("1", end=end)), engine("2")) as s:
        body = (await s.ask(post(fields)))[2]
        assert told(body)[0] == "abcdef" and body.count(b"[DONE]") == 1
        assert not s.metrics.streams_not_continued.total() and bool(s.faults) == (not end)


async def test_a_connection_that_breaks_behind_the_end_adds_nothing():
    async with continued(writes(event("1", PROMPT_IDS), *words("1", end=chunk(DONE))), engine("2")) as s:
        body = (await s.ask(post(BODY)))[2]
        assert told(body)[0] == "abcdef" and body.count(b"[DONE]") == 1


@pytest.mark.parametrize("fields", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_stream_that_ends_with_nothing_is_a_death(fields):
    """No reason, no usage, no [DONE], and an end as HTTP has it."""
    async with continued(writes(event("1", None), event("1", None, "a"), b"0\r\n\r\n")) as s:
        body = (await s.ask(post(fields)))[2]
        assert b"broke off" in body and b"[DONE]" not in body
        assert s.metrics.streams_not_continued.total() == 1


# --- what no engine writes


async def test_an_event_that_is_too_long_to_be_read_passes_as_it_is():
    """Nothing is wrong with it; but its stream is not gone on with."""
    long, size = event("1", [1], "x" * 6_000_000), 2**16
    pieces = [chunk(long[at : at + size]) for at in range(0, len(long), size)]
    async with continued(writes(event("1", PROMPT_IDS), *pieces, *words("1"))) as s:
        body = (await s.ask(post(BODY)))[2]
        assert b"x" * 6_000_000 in body and body.endswith(DONE)


@pytest.mark.parametrize(
    "large", [{"user": "x" * 100_000}, {"messages": [{"role": "user", "content": "one " * 25_000}]}]
)
async def test_many_streams_of_large_requests_keep_no_more_than_the_budget(large):
    """Of their fields, and of their bodies while there is no word yet; whatever is kept, all are answered."""
    budget, count, may = 2**20, 30, asyncio.Event()

    script = says(SSE_HEAD + MUCH, may, *words("1", ids=False))
    async with continued(script, continue_budget=budget) as s:
        resumer = s.proxy.handler.resumer
        talkers = await s.crowd(count, post(SAMPLED | large))
        await eventually(lambda: [one.state for one in s.proxy.exchanges].count(ExchangeState.ANSWERING) == count, 30)
        assert budget / 2 < resumer.kept <= budget
        may.set()
        for talk in talkers:
            assert (await talk.response(30))[2].endswith(DONE)
        await eventually(lambda: s.idle() and not resumer.kept)


@pytest.mark.parametrize("is_one_chunk", [True, False])
@pytest.mark.parametrize("after_a_break", [False, True])
async def test_engines_that_write_without_end_take_no_more_than_the_budget(is_one_chunk, after_a_break):
    """Eight streams of 24 MB in one event or one chunk, or in lines without an event's end; measured."""
    budget, size, count = 2**22, 2**16, 384
    piece = b"a" * (size - 1) + b"\n"
    wide = [b"%x\r\n" % (size * count), *[piece] * count, b"\r\n"] if is_one_chunk else [chunk(piece)] * count
    begun = event("1", PROMPT_IDS)

    async def attacks(reader, writer):
        body = (await read_request(reader))[1]
        writer.write(SSE_HEAD)
        if after_a_break and b"prompt_token_ids" not in body:
            writer.write(begun + event("1", [1], "a"))
            return
        writer.write(event("1", [*PROMPT_IDS, 1] if after_a_break else PROMPT_IDS))
        for one in wide:
            writer.write(one)
            await writer.drain()

    async with continued(attacks, attacks, continue_budget=budget) as s:

        async def client():
            talk = await s.say(post(BODY))
            await read_to(talk, b"0\r\n\r\n")

        tracemalloc.start()
        try:
            await asyncio.wait_for(asyncio.gather(*(client() for _ in range(8))), 60)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert not s.proxy.handler.resumer.kept and s.idle()
        assert peak < 3 * budget + 2**23, peak
