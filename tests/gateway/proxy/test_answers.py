"""Answers that are errors behind a status 200, or no engine's: what they teach, whom they count against, what a client
gets."""

import asyncio
import json
from time import monotonic

import pytest

from gateway.proxy.answers import Sight, begins, error_status, foreign_head, keeps_alive, look
from replicas import State

from ..http.talk import eventually, free_port, read_request
from .replies import ANSWER, LONG, answers, chunk, post, reply, streams
from .stack import stack

DONE = b"data: [DONE]\n\n"
TOKEN = b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
DIED = b'data: {"error":{"message":"died","type":"InternalServerError","code":500}}\n\n'
# As real engines write them; (format, event, status it amounts to).
ERRORS = [
    (b"/v1/completions", b'data: {"error": {"message": "Token id 99999999 is out of vocabulary", "type": "BadRequestError", '
                         b'"param": null, "code": 400}}\n\n', 400),
    (b"/v1/chat/completions", b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "param": null, "code": 500}}\n\n', 500),
    (b"/v1/chat/completions", b'data: {"object":"error","message":"too bad","type":"BadRequestError","param":null,"code":400}\n\n', 400),
    (b"/v1/chat/completions", b'data: {"error":{"message":"the model says \\"code\\": 400","type":"server_error"}}\n\n', 500),
    (b"/v1/responses", b'event: error\ndata: {"type":"error","code":"server_error","message":"died","param":null,"sequence_number":2}\n\n', 500),
    (b"/v1/responses", b'event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed",'
                       b'"error":{"code":"invalid_prompt","message":"x"}}}\n\n', 400),
    (b"/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n', 500),
    (b"/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error","message":"x"}}\n\n', 400),
]  # fmt: skip
NAMES = [f"{path.decode().rpartition('/')[2]}-{status}-{at}" for at, (path, _, status) in enumerate(ERRORS)]


@pytest.mark.parametrize(("path", "event", "status"), ERRORS, ids=NAMES)
def test_an_error_is_found_in_every_format_first_and_last_whatever_the_framing(path, event, status):
    for framed in (event, chunk(event), b"40;ext=1\r\n" + event):
        assert error_status(framed, True) == status
        assert error_status(chunk(TOKEN) + framed + chunk(DONE) + b"0\r\n\r\n", True) == status
    assert error_status(chunk(json.dumps({"content": event.decode()}).encode()), True) == 0  # only quoted


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"text":"{\\"error\\": {"}]}',
        b'{"id":"resp_1","status":"completed","error":null}',
        b"",
        b'{"error":null}',
    ],
)
def test_a_good_answer_is_no_error(body):
    assert error_status(body, False) == 0 and error_status(b"data: " + body + b"\n\n" + DONE, True) == 0


def test_an_error_object_with_status_200_is_an_error():
    assert error_status(b'{"error":{"message":"x","type":"BadRequestError","code":400}}', False) == 400
    assert error_status(b'2f\r\n{ "object": "error", "message": "x", "code": 503}', False) == 503
    assert error_status(b'{"error": "no idea"}', False) == 500


def test_what_no_engine_writes_is_told_by_its_type():
    assert (
        foreign_head(200, b"text/html")
        and foreign_head(404, b"text/html; charset=utf-8")
        and foreign_head(302, b"text/plain")
    )
    assert (
        not foreign_head(200, b"application/json; charset=utf-8")
        and not foreign_head(502, b"text/html")
        and not foreign_head(200, b"")
    )


ANSWERS = {
    "chat": b'{"id":"1","choices":[]}', "completions": b'{ "choices" : []}',
    "responses": b'{"id":"r","output":[]}', "messages": b'{"type":"message","content":[]}',
    "embeddings": b'{"object":"list","data":[{"object":"embedding","embedding":[0.1]}]}', "tokenize": b'{"count":1,"tokens":[1]}', "detokenize": b'{"any":1}',
}  # fmt: skip
JUNK = [
    b"{}",
    b'{"ok":true}',
    b'{"status":"ok"}',
    b'{"error":null}',
    b'"ok"',
    b"ok",
    b"[]",
    b"<html>",
    b"  <html>",
    b"6\r\n<html>\r\n",
    b"",
    b"0\r\n\r\n",
    b"2\r\n{}\r\n0\r\n\r\n",
]


def sight(label, data, streams=False, whole=True, content_type=b"application/json"):
    """As a request takes it."""
    return Sight.ANSWER if begins(label, data, streams) else look(label, data, streams, content_type, whole)


@pytest.mark.parametrize("label", ANSWERS)
def test_an_answer_has_its_apis_shape(label):
    for framed in (ANSWERS[label], chunk(ANSWERS[label]), b" \n" + ANSWERS[label], b'{"error":{"message":"x"}}'):
        assert sight(label, framed) is Sight.ANSWER
    assert sight(label, b'{"choices":[]}') is Sight.ANSWER, "engines give one API's answers for another's"
    assert sight(label, b"\x00\x01{}", content_type=b"application/octet-stream") is Sight.ANSWER
    if label != "detokenize":  # whose answers have no name in common
        for junk in JUNK:
            assert sight(label, junk) is Sight.FOREIGN, junk


def test_an_object_whose_members_are_still_to_come_is_waited_for():
    for part in (b"", b"1f", b"1f\r\n", b"{", b'{"id":"1","mod', b'{"status":"ok"'):
        assert sight("chat", part, whole=False) is Sight.EARLY, part
    assert sight("chat", b'{"instructions":"' + b"x" * 2**18, whole=False) is Sight.ANSWER, "not for ever"
    assert (
        sight("chat", b"ok", content_type=b"") is Sight.ANSWER
        and sight("chat", b"<html>", content_type=b"") is Sight.FOREIGN
    )


STREAM = b"text/event-stream"
ROLE = b'data: {"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
PINGS = [b": ping\n\n", b":\n\n", b'event: ping\ndata: {"type": "ping"}\n\n']


@pytest.mark.parametrize("frame", [bytes, chunk], ids=["plain", "chunked"])
def test_a_stream_begins_with_something_of_the_answer(frame):
    def seen(*events, whole=False, label="chat"):
        return sight(label, b"".join(map(frame, events)), True, whole, STREAM)

    assert (
        seen(TOKEN)
        is seen(ROLE, TOKEN)
        is seen(PINGS[0], TOKEN)
        is seen(DIED)
        is seen(ROLE, DIED)
        is seen(b'data: {"choices":[')
        is Sight.ANSWER
    )
    assert {seen(ping) for ping in PINGS} | {
        seen(ROLE),
        seen(PINGS[0], ROLE),
        seen(b'data: {"ok":1}\n\n'),
        seen(b"da"),
        seen(DIED[:30]),
        seen(ROLE, DIED[:30]),
    } == {Sight.EARLY}
    assert seen(ROLE, whole=True) is Sight.ANSWER, "whatever it means, it is all there is"
    assert {seen(*events, whole=True) for events in ([PINGS[0]], [b'data: {"ok":1}\n\n'], [])} == {Sight.FOREIGN}
    assert {seen(first) for first in (DONE, b"<html>\n\n", b"error: what\n\n", b"deadbeef!\n\n")} == {Sight.FOREIGN}
    assert seen(PINGS[0] * 50_000) is Sight.BLIND, "not for ever"
    assert all(map(keeps_alive, map(frame, PINGS))) and not keeps_alive(frame(ROLE))


@pytest.mark.parametrize("label", ["chat", "completions", "responses", "messages"])
def test_a_message_with_a_role_and_a_text_is_a_first_token(label):
    for delta in (
        b'{"role":"assistant","content":"x"}',
        b'{"content":"\\"role\\""}',
        b'{"role":"assistant","content":"","reasoning":"x"}',
        b'{"role":"assistant","tool_calls":[{"id":"1"}]}',
    ):
        assert sight(label, b'data: {"choices":[{"delta":%b}]}\n\n' % delta, True, False, STREAM) is Sight.ANSWER


def test_what_comes_before_the_first_token_of_a_response():
    created = b'event: response.created\ndata: {"response":{"instructions":"\\nevent: response.output_text.delta"}}\n\n'
    progress = b"event: response.in_progress\ndata: {}\n\n"
    item = b'event: response.output_item.added\ndata: {"type":"response.output_item.added"}\n\n'
    started = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    for early in (
        created,
        created + progress,
        chunk(created) + chunk(progress),
        created[:50],
        created.replace(b'"}}', b"x" * 100_000 + b'"}}'),
    ):
        assert sight("responses", early, True, False, STREAM) is Sight.EARLY
    assert sight("responses", created + progress + item, True, False, STREAM) is Sight.ANSWER
    assert (
        sight("messages", started, True, False, STREAM)
        is sight("messages", started + PINGS[2], True, False, STREAM)
        is Sight.EARLY
    )
    assert (
        sight(
            "messages",
            started + b'event: content_block_start\ndata: {"type":"content_block_start"}\n\n',
            True,
            False,
            STREAM,
        )
        is Sight.ANSWER
    )


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
    await talk.say(post(body_for(path), path))
    answer = await talk.response()
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
        assert (
            backend.candidate.costs.count == 0
            and s.metrics.ttft.count(backend.id) == 0
            and s.metrics.predictions.total() == 0
        )
        assert backend.intake.finished == 0, "nothing was computed, so no event must come"
        prompt = s.proxy.models.pipelines[0].prepare(path.decode(), body_for(path))
        assert s.proxy.router.map.match(prompt.hashes, 0.0).held[backend.slot] == 0
        kind = f"{status // 100}xx"
        assert (
            s.metrics.requests.total(status=kind) == 1
            and s.metrics.replica_requests.total(replica=backend.id, status=kind) == 1
        )
        assert s.faults == [] and s.unconfirmed == s.metrics.upstream_errors.total(kind="error answer") * [
            backend.id
        ] == (status >= 500) * [backend.id]


@pytest.mark.parametrize(("path", "event", "status"), ERRORS, ids=NAMES)
async def test_a_stream_that_fails_after_its_first_token_counts_as_failed_too(path, event, status):
    seen = asyncio.Event()
    async with stack(streams(chunk(TOKEN), chunk(event), pause=seen.wait)) as s:
        (backend,) = s.proxy.backends.values()
        backend.intake = Intake()
        talk = await s.talk()
        await talk.say(post(body_for(path), path))
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


async def test_an_error_object_with_status_200_is_treated_alike():
    for code, faults in ((400, set()), (500, {"error answer"})):
        error = json.dumps({"error": {"message": "x", "code": code}}).encode()
        async with stack(answers(error), answers()) as s:
            talk = await s.talk()
            for _ in range(2):
                await talk.say(post())
                assert (await talk.response())[0] == 200
            await eventually(lambda: s.metrics.requests.total() == 2)
            assert set(s.faults) == faults and len(s.faults) == s.metrics.retries.total()
            assert s.metrics.requests.total(status="4xx") == (code == 400)


HTML = b"<html><body>It works!</body></html>"


@pytest.mark.parametrize(
    ("head", "body"),
    [(b"200 OK\r\nContent-Type: text/html", HTML), (b"200 OK", HTML), (b"200 OK\r\nContent-Type: application/json", b'"ok"'), (b"200 OK", b""),
     (b"200 OK\r\nContent-Type: application/json", b'{"status":"ok"}'), (b"200 OK\r\nContent-Type: application/json", b"{}"),
     (b"200 OK\r\nContent-Type: application/json", b'{"ok":true}'), (b"200 OK\r\nContent-Type: text/event-stream", b"error: no such page\n\n"),
     (b"200 OK\r\nContent-Type: application/json", b'{"object":"list","data":[{"id":"m","object":"model","created":1}]}'),
     (b"404 Not Found\r\nContent-Type: text/html", HTML), (b"405 Not Allowed\r\nContent-Type: text/html", HTML),
     (b"302 Found\r\nContent-Type: text/html", b"")],
)  # fmt: skip
async def test_what_no_engine_wrote_reaches_no_client_and_counts_as_a_failure(head, body):
    async def other(reader, writer):
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body))

    async with stack(other, answers()) as s:
        talk = await s.talk()
        for _ in range(2):
            await talk.say(post())
            assert (await talk.response())[0::2] == (200, ANSWER)
        assert set(s.faults) == {"foreign answer"} and s.metrics.upstream_errors.total() == len(s.faults)
        await eventually(s.idle)
    async with stack(other) as s:
        talk = await s.talk()
        await talk.say(post())
        status, _, got = await talk.response()
        assert status == 502 and b"no answer of an inference engine" in got
        await eventually(s.idle)


async def test_what_a_client_asks_of_other_paths_may_have_any_shape():
    async with stack(answers(b"<html>", b"200 OK", b"X-Kind: any\r\n")) as s:
        talk = await s.talk()
        await talk.say(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await talk.response())[0::2] == (200, b"<html>") and s.faults == []


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
    async def dies(reader, writer):
        await read_request(reader)
        asked.append(1)

    asked = []
    async with stack(dies, dies, dies, dies, retries=5) as s:
        talk = await s.talk()
        await talk.say(post())
        status, headers, body = await talk.response()
        error = json.loads(body)["error"]
        assert (status, error["code"], len(asked)) == (502, "replicas_lost", 2)
        assert headers["x-should-retry"] == "false", "clients of OpenAI and Anthropic retry a 502 by themselves"
        await eventually(s.idle)


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
            await talk.say(post())
            assert (await talk.response())[0] == 200
        await talk.say(post())
        status, _, body = await talk.response()
        assert (status, json.loads(body)["error"]["code"]) == (502, "replicas_lost")
        assert s.faults == ["connect"] * 2 and s.metrics.retries.values == {("reconnect",): 2, ("connect",): 1}
        await eventually(s.idle)


async def test_a_degraded_replica_is_tried_before_a_502():
    async with stack(answers(), ports=[free_port()]) as s:
        gone, ill = s.proxy.backends.values()
        ill.replica.state = State.DEGRADED
        s.proxy.changed()
        talk = await s.talk()
        for _ in range(2):
            await talk.say(post())
            assert (await talk.response())[0::2] == (200, ANSWER)
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
        await talk.say(post(json.dumps(given).encode(), path.encode()))
        assert (await talk.response())[0] == 200
        await talk.say(post(json.dumps({**given, **fields}).encode(), path.encode()))
        status, _, body = await talk.response()
        said = json.loads(body)
        assert (
            status == 400
            and said["error"]["message"].startswith(words)
            and (said.get("type") == "error") == path.endswith("messages")
        )
        assert s.metrics.replica_requests.total() == 1


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

        def body(attempt, prompt, body, first):
            sent.append(first)
            attempt.sent_ids = first
            return body

        s.proxy.models.routes.prepare = prepare_long
        s.proxy.forwarding.body = body
        talk = await s.talk()
        await talk.say(post(LONG))
        await talk.response()
        assert sent == [True, False] and s.metrics.retries.values == {("ids",): 1}


async def test_a_replica_found_slow_is_tried_again_within_seconds_while_others_are_used():
    async with stack(streams(chunk(TOKEN)), streams(chunk(TOKEN)), policy="least_time") as s:
        slow, quick = s.proxy.backends.values()
        slow.candidate.costs.ttft.value, now = 5.0, monotonic() + 1000
        talk, chosen = await s.talk(), []
        for number in range(100):  # four a second, that share nothing
            await talk.say(
                post(
                    json.dumps({"model": "m", "prompt": f"{number} " * 20, "stream": True}).encode(), b"/v1/completions"
                )
            )
            chosen.append((await talk.response())[1]["x-hitherto-replica"])
            await eventually(s.idle)
            now += 0.25
            s.proxy.sweep(now)
            if chosen[-1] == slow.id:
                break
        assert chosen[0] == quick.id and chosen[-1] == slow.id and len(chosen) > 8


@pytest.mark.parametrize(("name", "pieces"), [
    ("an error event in two chunks", (chunk(DIED[:10]), chunk(DIED[10:]))),
    ("a chunk's size in a packet of its own", (b"%x\r\n" % len(DIED), DIED + b"\r\n")),
    ("an error that is not the first member", (chunk(b'data: {"id":"1","error":{"message":"died","code":500}}\n\n'),)),
    ("a failed response by its type alone", (chunk(b'data: {"sequence_number":3,"type":"response.failed","response":{"error":{"code":"server_error"}}}\n\n'),)),
    ("only the end", ()),
])  # fmt: skip
async def test_a_stream_that_fails_in_any_shape_is_tried_elsewhere(name, pieces):
    begun = asyncio.Event()

    async def next_read():
        await eventually(
            lambda: (
                begun.is_set()
                or any(x.attempt is not None and x.attempt.withheld for x in s.proxy.exchanges)
                or not s.proxy.exchanges
            )
        )
        begun.set()

    async with stack(streams(*pieces, pause=next_read if len(pieces) > 1 else None), streams(chunk(TOKEN))) as s:
        talk = await s.talk()
        bodies = [(await ask(s, b"/v1/chat/completions", talk))[2] for _ in range(2)]
        assert bodies == [TOKEN + DONE] * 2 and len(set(s.faults)) == 1


@pytest.mark.parametrize(("path", "first"), [
    (b"/v1/chat/completions", PINGS[0]), (b"/v1/chat/completions", ROLE), (b"/v1/completions", PINGS[1]),
    (b"/v1/messages", b'event: message_start\ndata: {"type":"message_start"}\n\n' + PINGS[2]),
])  # fmt: skip
async def test_an_error_behind_what_only_announces_an_answer_is_tried_elsewhere(path, first):
    """Each in a read of its own: the first is held back, so the client has nothing yet."""

    async def until_it_is_held_back():
        await eventually(
            lambda: (
                any(x.attempt is not None and x.attempt.withheld for x in s.proxy.exchanges) or not s.proxy.exchanges
            )
        )

    async with stack(
        streams(chunk(first), chunk(DIED), pause=until_it_is_held_back), streams(chunk(first), chunk(TOKEN))
    ) as s:
        talk = await s.talk()
        bodies = [(await ask(s, path, talk))[2] for _ in range(2)]
        assert bodies == [first + TOKEN + DONE] * 2 and len(set(s.faults)) == 1


async def test_pings_reach_a_client_that_waits_for_long_and_are_no_first_token():
    go_on = asyncio.Event()
    async with stack(streams(chunk(PINGS[0]), chunk(TOKEN), pause=go_on.wait), request_timeout=600.0) as s:
        (backend,) = s.proxy.backends.values()
        talk = await s.talk()
        await talk.say(post(body_for(b"/v1/chat/completions")))
        await eventually(lambda: any(x.attempt is not None and x.attempt.withheld for x in s.proxy.exchanges))
        (exchange,) = s.proxy.exchanges
        s.proxy.sweep(exchange.attempt.sent_at + 29)
        assert exchange.unanswered
        s.proxy.sweep(exchange.attempt.sent_at + 31)
        assert PINGS[0] in await talk.until(PINGS[0])
        go_on.set()
        assert TOKEN in await talk.until(b"\r\n0\r\n\r\n")
        await eventually(lambda: s.metrics.requests.total(status="2xx") == 1)
        assert s.faults == [] and backend.candidate.costs.count == 0 and s.metrics.ttft.count(backend.id) == 0
        await eventually(s.idle)


async def test_an_endless_stream_of_junk_teaches_nothing():
    junk = chunk(b'data: {"tick":1}\n\n' * 20_000)
    async with stack(streams(junk)) as s:
        (backend,) = s.proxy.backends.values()
        await ask(s, b"/v1/chat/completions")
        assert (
            s.faults == ["foreign answer"]
            and backend.candidate.costs.count == 0
            and s.metrics.ttft.count(backend.id) == 0
        )


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_that_the_engine_gave_up_is_no_complete_one(streamed):
    """vLLM that stops ends what it has begun with this."""
    last = b'{"choices":[{"index":0,"text":"","delta":{},"finish_reason":"abort"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}'
    seen = asyncio.Event()
    script = streams(chunk(TOKEN), chunk(b"data: " + last + b"\n\n"), pause=seen.wait) if streamed else answers(last)
    async with stack(script) as s:
        talk = await s.talk()
        await talk.say(post(body_for(b"/v1/completions"), b"/v1/completions"))
        seen.set()
        assert last in (await talk.response())[2]
        await eventually(lambda: s.metrics.requests.total() == 1)
        assert (
            s.metrics.requests.total(status="5xx") == 1
            and s.faults == ["aborted"]
            and s.metrics.predictions.total() == 0
        )


async def test_an_empty_stream_is_no_answer():
    async with stack(streams(end=b"0\r\n\r\n"), streams(chunk(TOKEN))) as s:
        talk = await s.talk()
        assert [(await ask(s, b"/v1/chat/completions", talk))[2] for _ in range(2)] == [TOKEN + DONE] * 2
        assert set(s.faults) == {"foreign answer"}


@pytest.mark.parametrize("junk", [b": ping\n\n", b'data: {"status":"ok"}\n\n'])
async def test_a_stream_without_an_event_of_the_api_counts_as_no_engines(junk):
    async with stack(streams(chunk(junk))) as s:
        await ask(s, b"/v1/chat/completions")
        assert (
            s.faults == ["foreign answer"]
            and s.metrics.predictions.total() == 0
            and s.metrics.requests.total(status="5xx") == 1
        )


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/responses", b"/v1/messages"])
async def test_an_error_that_is_split_after_the_first_token_counts(path):
    seen = asyncio.Event()
    async with stack(streams(chunk(TOKEN), chunk(DIED[:10]), chunk(DIED[10:]), pause=seen.wait)) as s:
        talk = await s.talk()
        await talk.say(post(body_for(path), path))
        await talk.until(TOKEN)
        seen.set()
        await talk.until(b"\r\n0\r\n\r\n")
        await eventually(lambda: s.metrics.requests.total() > 0)
        assert s.faults == ["error answer"]


def test_text_about_errors_is_none():
    said = json.dumps({"choices": [{"delta": {"content": '"error": {"code": 500}'}}], "error": None}).encode()
    assert error_status(b"data: " + said + b"\n\n", True) == 0
    item = json.dumps(
        {"type": "response.completed", "response": {"output": [{"type": "mcp_call", "error": "no such tool"}]}}
    ).encode()
    assert error_status(b"data: " + item + b"\n\n", True) == 0
