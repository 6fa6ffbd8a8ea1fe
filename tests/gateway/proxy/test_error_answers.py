"""Answers that are errors behind a status 200, or no engine's: what they teach, whom they count against, what a client
gets."""

import asyncio
import json
from time import monotonic

import pytest

from replicas import State

from ..http.talk import eventually, free_port, read_request
from .engine_events import DIED, DONE, ERRORS, NAMES, PINGS, ROLE, TOKEN
from .replies import ANSWER, ENDS, LONG, NEXT, SSE_HEAD, answers, chunk, post, reply, says, streams
from .stack import stack


class Intake:
    """Of what is followed by events: how many requests must have shown some."""

    finished = 0

    def request_finished(self, blocks):
        self.finished += 1


def body_for(path):
    given = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi " * 100}]},
        "/v1/completions": {"prompt": "hi " * 100},
    }
    given |= {"/v1/messages": given["/v1/chat/completions"], "/v1/responses": {"input": "hi " * 100}}
    return json.dumps({"model": "m", "stream": True, "max_tokens": 5, **given[path.decode()]}).encode()


async def ask(s, path, talk=None):
    talk = talk or await s.talk()
    answer = await talk.ask(post(body_for(path), path))
    await eventually(s.idle)
    await eventually(lambda: s.metrics.requests.total() > 0)
    return answer


@pytest.mark.parametrize(("path", "event", "status"), ERRORS, ids=NAMES)
async def test_a_stream_that_is_an_error_teaches_nothing_and_counts_as_what_it_is(path, event, status):
    async with stack(streams(chunk(event))) as s:
        (backend,) = s.proxy.backends.values()
        backend.intake = Intake()
        got, _, body = await ask(s, path)
        assert (got, body) == (200, event + DONE)  # the last replica's word stands
        assert backend.candidate.costs.count == 0
        assert s.metrics.replica_ttft_seconds.count(backend.id) == s.metrics.ttft_seconds.count(()) == 0
        assert s.metrics.predictions.total() == 0
        assert backend.intake.finished == 0, "nothing was computed, so no event must come"
        prompt = s.proxy.models.pipelines[0].prepare(path.decode(), body_for(path))
        assert s.proxy.router.map.match(prompt.hashes, 0.0).held[backend.slot] == 0
        kind = f"{status // 100}xx"
        assert s.metrics.requests.total(status=kind) == 1
        assert s.metrics.replica_requests.total(replica=backend.id, status=kind) == 1
        assert s.faults == [] and s.unconfirmed == s.metrics.upstream_errors.total(kind="error answer") * [
            backend.id
        ] == (status >= 500) * [backend.id]


@pytest.mark.parametrize(("path", "event", "status"), ERRORS, ids=NAMES)
async def test_a_stream_that_fails_after_its_first_token_counts_as_failed_too(path, event, status):
    seen = asyncio.Event()
    async with stack(streams(chunk(TOKEN), chunk(event), pause=seen.wait)) as s:
        (backend,) = s.proxy.backends.values()
        backend.intake = Intake()
        talk = await s.say(post(body_for(path), path))
        await talk.until(TOKEN)
        seen.set()
        assert event in await talk.until(b"\r\n0\r\n\r\n")
        await eventually(lambda: s.metrics.requests.total() > 0)
        assert backend.candidate.costs.count == 1, "the first token came, and took what it took"
        assert backend.intake.finished == 0 and s.metrics.requests.total(status=f"{status // 100}xx") == 1
        assert s.faults == (["error answer"] if status >= 500 else [])


@pytest.mark.parametrize(("path", "event", "status"), ERRORS, ids=NAMES)
async def test_the_engines_own_error_is_tried_elsewhere_the_clients_is_told(path, event, status):
    async with stack(streams(chunk(event)), streams(chunk(TOKEN))) as s:
        talk = await s.talk()
        bodies = [(await ask(s, path, talk))[2] for _ in range(2)]
        if status >= 500:
            assert bodies == [TOKEN + DONE] * 2 and set(s.metrics.retries.values) == {("error answer",)}
        else:
            assert sorted(bodies) == sorted([event + DONE, TOKEN + DONE]) and s.metrics.retries.total() == 0


@pytest.mark.parametrize("spelling", [b"Application/JSON", b"APPLICATION/json; Charset=UTF-8"])
async def test_a_media_type_may_be_written_in_any_case(spelling):
    """That of a stream, too: its first token is learned from."""
    plain = reply().replace(b"application/json", spelling)
    stream = SSE_HEAD.replace(b"text/event-stream", b"Text/Event-Stream") + chunk(TOKEN) + ENDS
    async with stack(says(plain, NEXT, stream)) as s:
        talk = await s.talk()
        assert (await talk.ask(post()))[0::2] == (200, ANSWER) and s.faults == []
        assert (await talk.ask(post()))[2] == TOKEN + DONE
        await eventually(s.idle)
        assert s.metrics.ttft_seconds.count(()) == 1


async def test_a_clients_own_error_behind_a_200_is_told_and_not_tried_elsewhere():
    error = b'{"error":{"message":"x","code":400}}'
    async with stack(answers(error), answers()) as s:
        await s.answered(2, post())
        await eventually(lambda: s.metrics.requests.total() == 2)
        assert not s.faults and not s.metrics.retries.total() and s.metrics.requests.total(status="4xx") == 1


async def test_what_a_client_asks_of_other_paths_may_have_any_shape():
    async with stack(answers(b"<html>", b"200 OK", b"X-Kind: any\r\n")) as s:
        assert (await s.ask(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"))[0::2] == (200, b"<html>") and s.faults == []


CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"}}\n\n'


async def test_an_announced_response_is_no_first_token_and_can_still_go_elsewhere():
    path, delta = b"/v1/responses", b'event: response.output_text.delta\ndata: {"delta":"x"}\n\n'
    dies, lives = streams(chunk(CREATED), end=None), streams(chunk(CREATED), chunk(delta))
    async with stack(dies, lives) as s:
        talk = await s.talk()
        for _ in range(2):
            assert (await ask(s, path, talk))[2] == CREATED + delta + DONE
        assert set(s.faults) == {"closed"} and s.proxy.placing.responses.maker("resp_1") in s.proxy.backends
    async with stack(streams(chunk(CREATED), end=b"0\r\n\r\n")) as s:
        assert (await ask(s, path))[2] == CREATED  # whatever it means, it is all there is


async def test_after_two_replicas_went_down_under_a_request_no_third_is_tried():
    asked = []
    dies = says(lambda: asked.append(1), then_hangs=False)
    async with stack(dies, dies, dies, dies, retries=5) as s:
        status, headers, body = await s.ask(post())
        assert (status, json.loads(body)["error"]["code"], len(asked)) == (502, "replicas_lost", 2)
        assert headers["x-should-retry"] == "false", "clients of OpenAI and Anthropic retry a 502 by themselves"


async def test_a_replica_that_dies_with_a_kept_connection_and_is_gone_then_counts_as_lost():
    """The request that killed it came over a kept connection, so it is tried there once more, and refused."""

    async def once(reader, writer):
        await read_request(reader)
        writer.write(reply())
        await read_request(reader)
        (killed,) = (b for b in s.proxy.backends.values() if b.pool.port == writer.get_extra_info("sockname")[1])
        killed.pool.port = free_port()

    async with stack(once, once, once, retries=5) as s:
        talk = await s.talk()
        for _ in range(3):
            assert (await talk.ask(post()))[0] == 200
        status, _, body = await talk.ask(post())
        assert (status, json.loads(body)["error"]["code"]) == (502, "replicas_lost")
        assert s.faults == ["connect"] * 2 and s.metrics.retries.values == {("reconnect",): 2, ("connect",): 1}


async def test_a_degraded_replica_is_tried_before_a_502():
    async with stack(answers(), ports=[free_port()]) as s:
        gone, ill = s.proxy.backends.values()
        s.becomes(ill.replica, State.DEGRADED)
        await s.answered(2, post(), ANSWER)
        assert s.metrics.retries.total() == 2 and s.metrics.replica_requests.total(replica=ill.id) == 2


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [("/v1/chat/completions", {"n": 16_385}, "n must be at most 16384, got 16385"), ("/v1/completions", {"n": 10**15}, "n must be at most 16384"),
     ("/v1/chat/completions", {"max_tokens": 101}, "max_tokens=101 cannot be greater than max_model_len=100"),
     ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 10**15}, "max_completion_tokens=1000"),
     ("/v1/completions", {"max_tokens": 101}, "max_tokens=101"), ("/v1/responses", {"max_output_tokens": 101}, "max_output_tokens=101"),
     ("/v1/messages", {"max_tokens": 101}, "max_tokens=101")],
)  # fmt: skip
async def test_numbers_beyond_the_engines_limits_are_refused_in_its_words(path, fields, words):
    async with stack(answers()) as s:
        s.proxy.models.pipelines[0].max_model_len = 100
        given = {**json.loads(body_for(path.encode())), "stream": False}
        talk = await s.talk()
        assert (await talk.ask(post(given, path.encode())))[0] == 200
        status, _, body = await talk.ask(post({**given, **fields}, path.encode()))
        said = json.loads(body)
        assert status == 400
        assert said["error"]["message"].startswith(words)
        assert (said.get("type") == "error") == path.endswith("messages")
        assert s.metrics.replica_requests.total() == 1


LISTED = ["a"] * 50
BOUND = "sequences: more than the 16,384 that a request may ask for. Send at most"


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [("/v1/completions", {"prompt": LISTED, "n": 16_384}, "n",
      f"50 prompts with n=16384 are 819,200 {BOUND} 1 prompts in a request"),
     ("/v1/completions", {"prompt": LISTED, "n": "328"}, "n",
      f"50 prompts with n=328 are 16,400 {BOUND} 49 prompts in a request"),
     ("/v1/completions", {"prompt": [[1]] * 50, "n": 2, "best_of": 400}, "best_of",
      f"50 prompts with best_of=400 are 20,000 {BOUND} 40 prompts in a request"),
     ("/v1/completions", {"prompt": None, "prompt_embeds": ["AAAA"] * 9, "n": 2000}, "n", "9 prompts with n=2000"),
     ("/v1/completions", {"prompt": ["a"] * 16_385}, "prompt", "16,385 prompts with n=1 are 16,385 sequences"),
     ("/v1/completions", {"prompt": ["a"] * 16_385, "n": 2}, "prompt",
      f"16,385 prompts with n=2 are 32,770 {BOUND} 8,192 prompts in a request"),
     ("/v1/chat/completions", {"best_of": 16_385}, "best_of", "best_of must be at most 16384, got 16385"),
     ("/invocations", {"prompt": LISTED, "n": 16_384}, "n", "50 prompts with n=16384 are 819,200 sequences"),
     ("/invocations", {"prompt": LISTED, "n": 16_384, "pad": " " * 50_000}, "n", "50 prompts with n=16384"),
     ("/invocations", {"prompt": "a", "n": 16_385}, "n", "n must be at most 16384, got 16385")],
)  # fmt: skip
async def test_more_sequences_than_a_request_may_ask_for_reach_no_replica(path, fields, param, words):
    async with stack(answers()) as s:
        talk = await s.talk()
        chat = path.startswith("/v1/chat")
        given = json.loads(body_for(b"/v1/chat/completions" if chat else b"/v1/completions"))
        status, _, body = await talk.ask(post({**given, **fields}, path.encode()))
        error = json.loads(body)["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert error["message"].startswith(words) and s.metrics.replica_requests.total() == 0


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": LISTED, "n": 327}), ("/v1/completions", {"prompt": [1] * 50, "n": 16_384}),
     ("/v1/completions", {"prompt": ["a"], "n": 16_384}), ("/v1/completions", {"prompt": LISTED, "best_of": "x"}),
     ("/v1/embeddings", {"input": ["a"] * 20_000, "n": 16_384}), ("/v1/responses", {"n": 20_000, "best_of": 20_000}),
     ("/invocations", {"prompt": LISTED, "n": 327}), ("/invocations", {"messages": [], "n": None})],
)  # fmt: skip
async def test_as_many_sequences_as_a_request_may_ask_for_do(path, fields):
    async with stack(answers()) as s:
        talk = await s.talk()
        given = {"model": "m"} if path in ("/invocations", "/v1/embeddings") else json.loads(body_for(path.encode()))
        assert (await talk.ask(post({**given, "stream": False, **fields}, path.encode())))[0] == 200
        assert s.metrics.replica_requests.total() == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]"])
async def test_an_invocation_that_cannot_be_read_is_for_its_engine_to_judge(body):
    async with stack(answers()) as s:
        assert (await s.ask(post(body, b"/invocations")))[0] == 200 and s.metrics.replica_requests.total() == 1


async def test_an_error_event_for_ids_of_ours_is_no_word_to_the_client():
    """A request that was sent with token ids is said again as received, also where the refusal comes as an event."""
    refusing = streams(chunk(ERRORS[0][1]))
    async with stack(refusing) as s:
        (backend,) = s.proxy.backends.values()
        sent, prepare = [], s.proxy.models.routes.prepare

        def prepare_long(*request):
            prompt = prepare(*request)
            prompt.kind = "chat"
            return prompt

        def before_send(exchange, attempt, outgoing):
            sent.append(not attempt.without_ids)
            attempt.sent_ids = not attempt.without_ids

        s.proxy.models.routes.prepare = prepare_long
        s.proxy.handler.before_send[0] = before_send
        await s.ask(post(LONG))
        assert sent == [True, False] and s.metrics.retries.values == {("ids",): 1}


async def test_a_replica_found_slow_is_tried_again_within_seconds_while_others_are_used():
    async with stack(streams(chunk(TOKEN)), streams(chunk(TOKEN)), policy="least_time") as s:
        slow, quick = s.proxy.backends.values()
        slow.candidate.costs.ttft.value, now = 5.0, monotonic() + 1000
        talk, chosen = await s.talk(), []
        for number in range(100):  # four a second, that share nothing
            body = {"model": "m", "prompt": f"{number} " * 20, "stream": True}
            _, headers, _ = await talk.ask(post(body, b"/v1/completions"))
            chosen.append(headers["x-hitherto-replica"])
            await eventually(s.idle)
            now += 0.25
            s.proxy.sweep(now)
            if chosen[-1] == slow.id:
                break
        assert chosen[0] == quick.id and chosen[-1] == slow.id and len(chosen) > 8


CHAT, MESSAGES = b"/v1/chat/completions", b"/v1/messages"
MESSAGE_START = b'event: message_start\ndata: {"type":"message_start"}\n\n' + PINGS[2]


@pytest.mark.parametrize(("path", "pieces", "told"), [
    (CHAT, (chunk(DIED[:10]), chunk(DIED[10:])), b""),
    (CHAT, (chunk(DIED[:1]), chunk(DIED[1:])), b""),  # the first letter is a size as well
    (CHAT, (chunk(ROLE[:40]), chunk(ROLE[40:] + DIED)), b""),
    (CHAT, (chunk(PINGS[0] + ROLE[:40]), chunk(ROLE[40:] + DIED)), b""),
    (CHAT, (b"%x\r\n" % len(DIED), DIED + b"\r\n"), b""),
    (CHAT, (chunk(PINGS[0]), chunk(DIED)), PINGS[0]),
    (CHAT, (chunk(ROLE), chunk(DIED)), ROLE),
    (b"/v1/completions", (chunk(PINGS[1]), chunk(DIED)), PINGS[1]),
    (MESSAGES, (chunk(MESSAGE_START), chunk(DIED)), MESSAGE_START),
])  # fmt: skip
async def test_an_error_in_several_reads_is_tried_elsewhere(path, pieces, told):
    """Also behind what only announces an answer (`told` by the second replica, too): the first read is held back, so
    the client has nothing yet."""
    begun = asyncio.Event()

    async def next_read():
        """Wait until the piece is held back, or the replica was left."""
        await eventually(lambda: begun.is_set() or withheld() or not s.proxy.exchanges)
        begun.set()

    def withheld():
        return any(x.attempt is not None and x.attempt.withheld for x in s.proxy.exchanges)

    async with stack(streams(*pieces, pause=next_read), streams(chunk(told) * bool(told) + chunk(TOKEN))) as s:
        talk = await s.talk()
        bodies = [(await ask(s, path, talk))[2] for _ in range(2)]
        assert bodies == [told + TOKEN + DONE] * 2 and len(set(s.faults)) == 1


GIVEN_UP = b'data: {"choices":[{"index":0,"text":"","delta":{},"finish_reason":"abort"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
HALF = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"half"}}\n\n'
MESSAGE_GIVEN_UP = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":null,"stop_sequence":null},"usage":{}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


@pytest.mark.parametrize(
    ("path", "pieces", "fault"),
    [
        (b"/v1/completions", (TOKEN, GIVEN_UP), "aborted"),  # vLLM that stops ends what it has begun with this
        (MESSAGES, (MESSAGE_START + HALF, MESSAGE_GIVEN_UP), "aborted"),
        *((path, (TOKEN, DIED[:10], DIED[10:]), "error answer") for path in (CHAT, b"/v1/responses", MESSAGES)),
    ],
)
async def test_an_answer_that_fails_or_is_given_up_in_the_middle_is_no_complete_one(path, pieces, fault):
    seen = asyncio.Event()
    async with stack(streams(*map(chunk, pieces), pause=seen.wait)) as s:
        talk = await s.say(post(body_for(path), path))
        await talk.until(pieces[0])
        seen.set()
        assert pieces[-1] in await talk.until(b"\r\n0\r\n\r\n")
        await eventually(lambda: s.metrics.requests.total() == 1)
        assert s.metrics.requests.total(status="5xx") == 1 and s.faults == [fault]
        assert s.metrics.predictions.total() == 0


@pytest.mark.parametrize("junk", [b'data: {"status":"ok"}\n\n', b'data: {"tick":1}\n\n' * 20_000], ids=["one", "many"])
async def test_a_stream_with_no_event_of_an_api_counts_as_no_engines_and_teaches_nothing(junk):
    async with stack(streams(chunk(junk))) as s:
        (backend,) = s.proxy.backends.values()
        await ask(s, b"/v1/chat/completions")
        assert s.faults == ["foreign answer"]
        assert backend.candidate.costs.count == 0
        assert s.metrics.replica_ttft_seconds.count(backend.id) == s.metrics.ttft_seconds.count(()) == 0
        assert s.metrics.predictions.total() == 0
        assert s.metrics.requests.total(status="5xx") == 1


SILENT = [
    b"",
    *map(chunk, [PINGS[0], DONE, b"data:[DONE]\r\n\r\n", b"\n\n\n", b"data:\n\n"]),
    chunk(PINGS[0]) + chunk(DONE),
]


@pytest.mark.parametrize("says", SILENT)
async def test_streams_that_say_nothing_are_the_requests_where_all_engines_end_so(says):
    """None is taken for another server's, which would leave the others without replicas; no third is asked."""
    async with stack(*[streams(says, end=b"0\r\n\r\n")] * 3) as s:
        status, headers, body = await s.ask(post(body_for(b"/v1/chat/completions")))
        assert status == 502 and headers["x-should-retry"] == "false"
        assert b"two engines failed this request alike, so no third was asked; the last: replica 127.0.0.1:" in body
        assert b"answered 200 with a stream without an event" in body and b"no replica answered" not in body
        assert not s.faults and len(s.unconfirmed) == 2 and s.metrics.predictions.total() == 0
        assert sorted(s.metrics.upstream_errors.values.values()) == [1, 1]


async def test_the_only_replicas_stream_that_says_nothing_is_held_against_nobody():
    async with stack(streams(end=b"0\r\n\r\n")) as s:
        assert (await s.ask(post(body_for(b"/v1/chat/completions"))))[0] == 502
        assert not s.faults
        assert len(s.unconfirmed) == 1


async def test_comments_that_went_to_a_client_who_waited_are_no_other_servers():
    ends = asyncio.Event()
    waits = streams(chunk(b": ping\n\n"), end=b"0\r\n\r\n", pause=ends.wait)
    async with stack(waits, request_timeout=60.0) as s:
        talk = await s.say(post(body_for(b"/v1/chat/completions")))
        exchange = await s.exchange(lambda attempt: attempt.withheld)
        s.proxy.sweep(exchange.attempt.sent_at + 31)
        ends.set()
        body = (await talk.response())[2]
        assert body.startswith(b": ping\n\ndata: {") and b"a stream without an event" in body
        await eventually(lambda: s.metrics.requests.total(status="cut") == 1)
        assert s.faults == [] and s.unconfirmed == [exchange.tried[0].id], "whose fault it is nobody knows"
