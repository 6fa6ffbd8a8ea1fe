"""With --continue-streams: what ends a stream for its engine, and what its client gets then."""

import asyncio
import hashlib
import json
import re
from contextlib import asynccontextmanager

import orjson
import pytest

from gateway.prompt.pipeline import Pipeline
from gateway.proxy.admission.overload import Overload
from gateway.proxy.failures.retries import STALLED
from gateway.proxy.resume import resumer
from gateway.tenants.keys import Keys
from policies import Classes, QosClass, Rules, Slo
from replicas import State
from replicas.simulated.model import sim_model_dir

from ...http.talk import eventually, read_request
from ..replies import ENDS, SSE_HEAD, answers, chunk, post, says, streams
from ..stack import stack

PIPELINE = Pipeline(sim_model_dir(), "m", 16)
SAID = [{"role": "user", "content": "Hi"}]
GREEDY = {"model": "m", "stream": True, "temperature": 0, "max_tokens": 6, "messages": SAID}
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


def engine(name: str, ends=b"", after: int = 6, seen: list | None = None, then=None, prompt=PROMPT_IDS):
    """Writes the words that follow the ids it is given; `after` so many of them come `ends`, and `then`."""

    async def script(reader, writer):
        while True:
            request = json.loads((await read_request(reader))[1])
            if seen is not None:
                seen.append(request)
            given = (request.get("kv_transfer_params") or {}).get("prompt_token_ids", prompt)
            assert given[: len(prompt)] == prompt and request["return_token_ids"] is True
            written = len(given) - len(prompt)
            assert given[len(prompt) :] == [*range(1, written + 1)]
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
            writer.write(ENDS)

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
        ENDS,  # nor did any say why it ends
        chunk(b'data: {"error": {"message": "EngineDeadError", "type": "InternalServerError", "code": 500}}\n\n')
        + b"0\r\n\r\n",
        event("1", [], "", finish_reason="abort") + ENDS,
    ],
)
async def test_however_an_engine_ends_another_goes_on(ends):
    seen = []
    async with continued(engine("1", ends, 2, seen), engine("2", seen=seen)) as s:
        talk = await s.talk()
        _, headers, body = await talk.ask(post(BODY))
        assert told(body) == ("abcdef", {"1"}) and b"role" in body and body.count(b"role") == 1
        assert s.metrics.continued_streams.total(way="ids") == 1
        assert s.metrics.continue_gap_seconds.count("ids") == 1
        await eventually(s.idle)
        await talk.say(post(BODY))  # the connection is good for the next request
        assert (await talk.response())[0] == 200


async def test_each_of_several_engines_goes_on_where_the_last_one_broke_off():
    async with continued(engine("1", b"", 1), engine("2", b"", 2), engine("3", b"", 1), engine("4")) as s:
        assert told((await s.ask(post(BODY)))[2]) == ("abcdef", {"1"})
        assert s.metrics.continued_streams.total(way="ids") >= 3


END = b"0\r\n\r\n"  # of a body, as HTTP has it


@pytest.mark.parametrize("before", [[], [engine("1", b"", 2)]])
async def test_an_answer_that_ends_behind_its_announcement_is_nobodys(before):
    async with continued(*before, engine("2", END, 0), engine("3")) as s:
        talk = await s.say(post(BODY))
        assert told((await asyncio.wait_for(talk.response(), 10))[2])[0] == "abcdef"


async def test_where_nobody_is_left_it_is_an_error_of_its_client():
    async with continued(engine("2", END, 0)) as s:
        talk = await s.say(post(BODY))
        assert b"broke off" in (await asyncio.wait_for(talk.response(), 10))[2]


async def test_a_stream_that_lacks_its_end_alone_is_ended_here():
    options = {"stream_options": {"include_usage": True}}
    body = orjson.dumps(GREEDY | options)
    async with continued(engine("1", b"1", 6), engine("2", b"1", 6)) as s:
        answer = (await s.ask(post(body)))[2]
        assert told(answer) == ("abcdef", {"1"})
        assert json.loads(answer.split(b"\n\n")[-3][6:])["usage"] == {
            "prompt_tokens": len(PROMPT_IDS), "completion_tokens": 6, "total_tokens": len(PROMPT_IDS) + 6
        }  # fmt: skip
        assert s.metrics.continued_streams.total(way="over") == 1


async def test_an_engine_that_falls_silent_is_left():
    async with continued(engine("1", b"", 2, then=never), engine("2"), idle_timeout=0.2) as s:
        talk = await s.say(post(BODY))
        sweeps = asyncio.create_task(sweep(s))
        assert told((await talk.response())[2]) == ("abcdef", {"1"})
        sweeps.cancel()
        assert s.faults == [STALLED]


async def sweep(s):
    while True:
        s.proxy.sweep(asyncio.get_running_loop().time())
        await asyncio.sleep(0.02)


crashes, fails = says(b"", then_hangs=False), answers(b"{}", b"500 Internal Server Error")
# Breaks off after two words, whatever it was asked.
cut_short = says(
    SSE_HEAD + event("1", PROMPT_IDS) + event("1", [1], "a" * 2000) + event("1", [2], "b"), then_hangs=False
)


@pytest.fixture
def keys(tmp_path):
    """One tenant's."""
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{name: one, sha256: {hashlib.sha256(b'hth-one').hexdigest()}}}\n")
    return Keys(file)


@pytest.mark.parametrize("others", [[], [fails, fails], [crashes, crashes]])
async def test_who_did_not_go_on_with_a_stream_is_named_to_no_tenant(others, keys):
    told = []
    for given in (None, keys):
        async with continued(engine("1", b"", 2), *others, keys=given) as s:
            told.append((await s.ask(post(BODY, extra=b"authorization: Bearer hth-one\r\n")))[2])
    assert all(b"the answer broke off" in body for body in told)
    assert [b"127.0.0.1" in body for body in told] == [True, False]


@asynccontextmanager
async def while_another_is_asked():
    """A stream has broken off, and who is to go on with it says nothing."""
    asked = asyncio.Event()
    async with continued(engine("1", b"", 2), says(asked.set)) as s:
        talk = await s.say(post(BODY))
        await asyncio.wait_for(asked.wait(), 5)
        yield s, talk


async def test_a_client_that_leaves_while_another_is_asked_leaves_nothing_behind():
    async with while_another_is_asked() as (s, talk):
        await talk.close()
        await eventually(s.idle)
        assert not s.proxy.handler.resumer.kept


async def test_a_stream_that_a_stop_cuts_while_another_is_asked_is_told_so_and_not_left_by_its_client():
    async with while_another_is_asked() as (s, talk):
        s.proxy.drain()
        await s.server.drain(0)
        assert (s.proxy.refuse_unanswered(), s.proxy.end_streams()) == (0, 1)
        told = await talk.until(b"0\r\n\r\n")
        assert b"the gateway is shutting down" in told and b"[DONE]" not in told
        assert b'"code":"shutting_down"' in told and s.metrics.streams_not_continued.total(reason="shutting_down") == 1
        assert await s.server.end() == 0 and s.idle()
        assert s.metrics.requests.total(status="cut") == 1 and not s.metrics.client_aborts.values


@pytest.mark.parametrize("budget", [10, 2000])  # before it is sent, and as it passes
async def test_what_is_kept_has_a_budget(budget):
    async with continued(cut_short, engine("2"), continue_budget=budget) as s:
        body = (await s.ask(post(BODY)))[2]
        assert b"broke off" in body and body.count(b'"b"') == 1
        assert s.metrics.streams_not_continued.total(reason="budget") == 1


async def test_without_the_setting_a_stream_is_cut_as_ever():
    async with stack(streams(event("1", [1], "a"), end=None), streams(), pipeline=PIPELINE) as s:
        assert b"broke off" in (await s.ask(post(BODY)))[2]
        assert not s.metrics.streams_not_continued.total() and not s.metrics.continued_streams.total()


def failed(other):
    other.replica.state = State.FAILED


def hashes_other_blocks(other):
    """It is ready, so the reason is another one than that nobody is there."""
    other.candidate.space = 7


# From the beginning, whatever it is given.
deaf = says(SSE_HEAD + event("2", PROMPT_IDS) + event("2", [1], "a"))


@pytest.mark.parametrize(
    ("others", "change", "reason"),
    [
        ([], None, "no replica"),
        ([engine("2", b"", 0), engine("3", b"", 0)], None, "crashes"),
        ([engine("2")], failed, "no replica"),
        ([engine("2")], hashes_other_blocks, "unlike"),
        ([crashes, crashes, engine("4")], None, "crashes"),
        ([deaf], None, "differs"),
    ],
    ids=["nobody", "two that write nothing", "not ready", "unlike", "two that crash", "takes no ids"],
)
async def test_a_stream_that_nobody_goes_on_with_ends_with_an_error_and_is_counted_by_why(others, change, reason):
    async with continued(engine("1", b"", 2), *others) as s:
        for other in [*s.proxy.backends.values()][1:]:
            if change:
                change(other)
        s.proxy.changed()
        body = (await s.ask(post(BODY)))[2]
        assert b"broke off" in body and not body.endswith(b"[DONE]\n\n") and body.count(b'"content":"a"') == 1
        assert s.metrics.streams_not_continued.by("reason") == {reason: 1}


async def test_a_part_of_a_character_is_written_by_the_next_engine():
    """Ids whose text is not shown yet are not given to it, so that no character is lost."""
    seen = []

    first = streams(event("1", PROMPT_IDS) + event("1", [1], "a") + event("1", [200], ""), end=None)
    async with continued(first, engine("2", seen=seen)) as s:
        assert told((await s.ask(post(BODY)))[2])[0] == "abcdef"
        assert seen[0]["kv_transfer_params"]["prompt_token_ids"] == [*PROMPT_IDS, 1]


@pytest.mark.parametrize("second", [crashes, answers(b"{}", b"400 Bad Request")], ids=["crashes", "refuses"])
async def test_one_that_does_not_go_on_leaves_it_to_a_third_replica(second):
    async with continued(engine("1", b"", 2), second, engine("3")) as s:
        assert told((await s.ask(post(BODY)))[2]) == ("abcdef", {"1"})


async def test_an_error_on_the_way_to_who_goes_on_is_that_replicas():
    async with continued(engine("1", b"", 2), fails, engine("3")) as s:
        second = [*s.proxy.backends][1]
        assert told((await s.ask(post(BODY)))[2])[0] == "abcdef"
        await eventually(s.idle)
        assert s.metrics.upstream_errors.total(replica=second, kind="status 500") == 1
        assert "status 500" in s.faults


BARE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def bare(head: bytes, first: int, last: int, end: bytes):
    """Writes these words without chunks, and ends with `end`."""

    raw = event("2", [*PROMPT_IDS, *range(1, first)])
    for number in range(first, last + 1):
        raw += event("2", [number], WORDS[number - 1], finish_reason="length" if number == 6 else None)
    body = b"".join(line.strip() + b"\n\n" for line in raw.split(b"\r\n")[1::2] if line.strip()) + end
    return says((head % len(body) if b"%d" in head else head) + body, then_hangs=False)


LENGTH_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("head", [BARE_HEAD, LENGTH_HEAD])
async def test_the_rest_may_be_framed_in_another_way_than_the_beginning(head):
    async with continued(engine("1", b"", 2), bare(head, 3, 6, DONE)) as s:
        assert told((await s.ask(post(BODY)))[2]) == ("abcdef", {"1"})


async def test_a_stream_whose_last_event_lacks_its_blank_line_is_complete_though_it_cannot_be_resumed():
    first = {"index": 0, "delta": {"role": "assistant", "reasoning": "hm"}, "finish_reason": None}
    last = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
    events = b"".join(b"data: %b\n\n" % orjson.dumps({"id": "1", "choices": [one]}) for one in (first, last))
    async with continued(says(BARE_HEAD + events + b"data: [DONE]\n", then_hangs=False)) as s:
        talk = await s.say(post(BODY))
        body = await talk.rest()
        assert body.rstrip().endswith(b"data: [DONE]") and b"error" not in body
        await eventually(s.idle)
        assert not s.metrics.upstream_errors.total()


@pytest.mark.parametrize("spelling", [b": Chunked", b": CHUNKED "])
@pytest.mark.parametrize("end", [b"", chunk(b'data: {"choices": [{"ind')])
async def test_chunked_is_written_in_any_case(end, spelling):
    def spelt(script):
        async def shouts(reader, writer):
            written = writer.write
            writer.write = lambda data: written(data.replace(b": chunked", spelling))
            await script(reader, writer)

        return shouts

    async with continued(spelt(engine("1", end, 2)), spelt(engine("2"))) as s:
        talk = await s.say(post(BODY))
        await talk.until(b"\r\n\r\n")
        body = await talk.until(b"0\r\n\r\n")
        assert body.count(b"[DONE]") == 1 and body.count(b'"content":"f"') == 1
        assert s.metrics.continued_streams.total(way="ids") == 1


async def test_chunks_may_follow_what_had_none():
    async with continued(bare(BARE_HEAD, 1, 2, b""), engine("2")) as s:
        talk = await s.say(post(BODY))
        await talk.until(b"\r\n\r\n")
        body = await talk.rest()
        assert told(body)[0] == "abcdef" and b"\r\n" not in body


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data: [DONE]\n"])
async def test_a_last_event_without_a_blank_line_is_the_end(end):
    async with continued(bare(BARE_HEAD, 1, 6, end)) as s:
        talk = await s.say(post(BODY))
        await talk.until(b"\r\n\r\n")
        assert (await talk.rest()).endswith(DONE)
        await eventually(s.idle)
        assert not s.metrics.streams_not_continued.total() and not s.faults


async def counts(reader, writer):
    """Goes on with one word, and counts 20."""
    given = json.loads((await read_request(reader))[1])["kv_transfer_params"]["prompt_token_ids"]
    writer.write(SSE_HEAD + event("2", given) + event("2", [given[-1] + 1], "b"))
    await writer.drain()
    await asyncio.sleep(0.05)
    usage = {"prompt_tokens": len(given), "completion_tokens": 20, "total_tokens": len(given) + 20}
    writer.write(event("2", [given[-1] + 2], "c", finish_reason="stop"))
    writer.write(chunk(b"data: " + orjson.dumps({"id": "2", "created": 1, "choices": [], "usage": usage}) + b"\n\n"))
    writer.write(ENDS)
    await writer.drain()


async def begins(reader, writer, pause):
    """Write one token of an answer, and nothing for `pause` seconds."""
    await read_request(reader)
    writer.write(SSE_HEAD + event("1", PROMPT_IDS) + event("1", [1], "a"))
    await writer.drain()
    await asyncio.sleep(pause)


async def test_figures_speak_of_what_the_client_saw():
    pause = 0.3

    async def slow(reader, writer):
        await begins(reader, writer, pause)
        writer.write(event("1", [2], "b"))
        await writer.drain()

    async with continued(slow, counts, slo_figures=True) as s:
        steps = {one.id: one.candidate.costs.step.value for one in s.proxy.backends.values()}
        await s.ask(post(GREEDY | {"stream_options": {"include_usage": True}}))
        await eventually(s.idle)
        spent = s.metrics.answer_phase_seconds.by("phase")
        assert spent["decode"] >= pause and not spent.get("retry") and spent["engine"] < pause
        assert not s.metrics.answer_tpot_seconds.count(("default", "m"))
        assert {one.id: one.candidate.costs.step.value for one in s.proxy.backends.values()} == steps


async def test_tokens_of_a_stream_without_usage_are_those_of_all_replicas():
    async with continued(engine("1", b"", 2), engine("2"), slo_figures=True) as s:
        assert told((await s.ask(post(BODY)))[2])[0] == "abcdef"
        await eventually(s.idle)
        assert s.metrics.answer_tokens.by("kind")["output"] == 6


async def test_a_body_that_is_too_long_to_be_kept_is_counted_where_its_stream_breaks_off(monkeypatch):
    monkeypatch.setattr(resumer, "MOST_BYTES", len(BODY) - 1)

    async with continued(streams(event("1", PROMPT_IDS) + event("1", [1], "a"), end=None)) as s:
        await s.ask(post(BODY))
        await eventually(s.idle)
        assert s.metrics.streams_not_continued.by("reason") == {"budget": 1}


async def test_a_limit_on_the_first_token_is_met_by_the_replica_that_wrote_it():
    """And nobody's time per token is that of a stream that broke off."""
    pause = 0.4

    async def slow(reader, writer):
        await begins(reader, writer, pause)

    qos = QosClass("only", slo=Slo(ttft=pause / 2))
    async with continued(slow, counts, overload=Overload(Classes([qos], []), Rules(), None)) as s:
        assert told((await s.ask(post(BODY)))[2])[0].startswith("a")
        await eventually(s.idle)
        assert s.metrics.slo_requests.by("outcome") == {"met": 1}


async def test_a_tenant_is_charged_for_what_all_replicas_wrote(keys):
    events = []
    async with continued(engine("1", b"", 3), fails, engine("3"), keys=keys) as s:
        s.proxy.settling.on_end.append(lambda exchange, outcome, usage: events.append(exchange.attempts[-1].events))
        await s.ask(post(BODY, extra=b"authorization: Bearer hth-one\r\n"))
        await eventually(s.idle)
        assert events == [6]  # the words, neither the role nor the end


async def test_a_first_read_that_ends_within_an_event_is_no_event(keys):
    events, begun = [], asyncio.Event()
    first = event("1", [1], "a", finish_reason="stop")

    script = says(SSE_HEAD + first[:-20], begun, first[-20:] + ENDS)
    async with continued(script, keys=keys) as s:
        s.proxy.settling.on_end.append(lambda exchange, outcome, usage: events.append(exchange.attempts[-1].events))
        talk = await s.say(post(BODY, extra=b"authorization: Bearer hth-one\r\n"))
        await talk.until(b"\r\n\r\n")
        begun.set()
        await talk.until(b"0\r\n\r\n")
        await eventually(s.idle)
        assert events == [1]  # the word


async def test_replicas_that_were_not_asked_are_no_attempts():
    async with continued(engine("1", b"", 2), fails, engine("3"), engine("4")) as s:
        for other in [*s.proxy.backends.values()][2:]:
            other.candidate.space = 9
        assert b"after 2 attempt(s)" in (await s.ask(post(BODY)))[2]


async def test_a_mistake_of_ours_while_it_is_placed_cuts_the_stream():
    class Breaks:
        def choose(self, *given):
            raise RuntimeError("a bug")

        def __getattr__(self, name):
            return getattr(policy, name)

    def breaks():
        s.proxy.router.policy = Breaks()

    begun = SSE_HEAD + event("1", PROMPT_IDS) + event("1", [1], "a")
    async with continued(says(begun, breaks, then_hangs=False), engine("2")) as s:
        policy = s.proxy.router.policy
        talk = await s.say(post(BODY))
        assert b"HTTP/1.1 500" not in await talk.rest() and not s.proxy.exchanges
        s.proxy.router.policy = policy


async def test_a_replica_that_takes_no_ids_beside_messages_is_not_asked():
    class Other:
        chat_token_ids = None

        def __getattr__(self, name):
            return getattr(dialect, name)

    seen = []
    async with continued(engine("1", b"", 2), engine("2", seen=seen), engine("3")) as s:
        second = [*s.proxy.backends.values()][1]
        dialect, second.replica.dialect = second.replica.dialect, Other()
        assert told((await s.ask(post(BODY)))[2])[0] == "abcdef" and not seen


def interruptions(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if "broke off" in one.getMessage()]


async def test_a_stream_that_was_gone_on_with_is_a_line_of_the_log(caplog):
    caplog.set_level("INFO", "hitherto.proxy")
    async with continued(engine("1", b"", 3), engine("2")) as s:
        first, second = s.proxy.backends
        await s.ask(post(BODY, extra=b"x-request-id: mine\r\n"))
        await eventually(s.idle)
        [line] = interruptions(caplog)
    assert line.startswith(f"stream mine of replica {first} broke off after 3 tokens: connection closed")
    assert re.search(rf"; replica {second} resumed it \d\.\d{{3}} s later \(ids\)$", line)


async def test_a_stream_that_lacked_only_its_end_is_a_line_as_well(caplog):
    caplog.set_level("INFO", "hitherto.proxy")
    async with continued(cut_short, cut_short) as s:
        await s.ask(post(GREEDY | {"max_tokens": 2}))
    [line] = interruptions(caplog)
    assert "after 2 tokens" in line and "; the gateway wrote its end " in line


async def test_of_many_streams_that_break_off_some_are_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr("gateway.proxy.resume.resumer.MOST_LINES", 1)
    caplog.set_level("INFO", "hitherto.proxy")
    async with continued(engine("1", b"", 1), engine("2", b"", 1), engine("3", b"", 1), engine("4")) as s:
        await s.ask(post(BODY))
        await eventually(s.idle)
        assert s.metrics.continued_streams.total() > 1
    assert len(interruptions(caplog)) == 1
