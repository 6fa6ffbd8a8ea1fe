"""One exchange between real sockets, where all goes well: what passes and how it is told."""

import asyncio
import gzip
import json
import re

import pytest

from gateway.http.messages import Limits
from gateway.prompt.pipeline import Pipeline
from replicas import State
from replicas.simulated.model import sim_model_dir

from ..http.talk import eventually, read_request
from .replies import ANSWER, BODY, ENDS, EVENT, LONG, NEXT, SSE_HEAD, USAGE, answers, chunk, post, reply, says, streams
from .stack import stack

MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_a_plain_answer_passes_and_says_where_it_came_from():
    seen = []
    async with stack(answers(seen=seen), cached_tokens_header=True) as s:
        status, headers, body = await s.ask(
            post(extra=b"Authorization: Bearer secret\r\nX-Custom: 1\r\nConnection: x-gone\r\nX-Gone: 1\r\n")
        )
        assert (status, body) == (200, ANSWER)
        assert headers["x-hitherto-replica"] in s.proxy.backends
        assert headers["x-hitherto-cached-tokens"] == "0"
        assert headers["x-request-id"]
        head, sent = seen[0]
        assert sent == BODY
        assert b"authorization: Bearer secret\r\n" in head and b"x-custom: 1\r\n" in head
        assert b"x-gone" not in head and b"connection" not in head
        assert b"client.example" not in head and b"host: 127.0.0.1:" in head


@pytest.mark.parametrize("body", [BODY, LONG], ids=["short", "long"])
async def test_a_stranger_is_not_told_whether_a_prompt_was_asked_before(body):
    async with stack(answers()) as s:
        talk, told = await s.talk(), []
        for _ in range(2):
            _, headers, _ = await talk.ask(post(body))
            told.append({name: value for name, value in headers.items() if name != "x-request-id"})
        assert told[0] == told[1] and "x-hitherto-replica" in told[0] and "x-hitherto-cached-tokens" not in told[0]


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (b"X-Request-Id: mine-1\r\n", "mine-1"),
        (b"X-Request-Id:\r\n", None),
        (b"Connection: X-Request-Id\r\nX-Request-Id: mine-1\r\n", "mine-1"),
        (b"Connection: X-Request-Id\r\n", None),
    ],
    ids=["a client's", "empty", "a client's that Connection names", "only named"],
)
async def test_a_request_id_is_the_clients_or_made_here_and_reaches_the_engine_once(given, own):
    seen = []
    async with stack(answers(seen=seen)) as s:
        _, headers, _ = await s.ask(post(extra=given))
    assert re.findall(rb"(?i)x-request-id: *(.*)\r", seen[0][0]) == [headers["x-request-id"].encode()]
    assert headers["x-request-id"] == (own or headers["x-request-id"]) != ""
    assert b"connection" not in seen[0][0].lower()


async def test_stream_bytes_pass_untouched_chunk_framing_included():
    pieces = [b"1;ext=1\r\nd\r\n", chunk(b"ata: 1\n\n"), chunk(EVENT) + b"5\r\nda", b"ta:\r\n", chunk(b" 2\n\n")]
    async with stack(streams(*pieces)) as s:
        talk = await s.say(post())
        await talk.until(b"\r\n\r\n")
        raw = await talk.until(b"0\r\n\r\n")
        assert raw == b"".join(pieces) + ENDS


async def test_connections_to_a_replica_are_kept_and_used_again():
    seen, connections = [], 0

    async def script(reader, writer):
        nonlocal connections
        connections += 1
        await answers(seen=seen)(reader, writer)

    async with stack(script) as s:
        talk = await s.talk()
        for _ in range(5):
            await talk.ask(post())
        assert (connections, len(seen)) == (1, 5)


async def test_interim_responses_and_hop_by_hop_headers_stay_between_replica_and_gateway():
    hops = b"Connection: keep-alive, X-Hop\r\nKeep-Alive: timeout=5\r\nX-Hop: 1\r\nX-End: 2\r\n"
    async with stack(says(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + reply(headers=hops))) as s:
        status, headers, body = await s.ask(post())
        assert (status, body, headers["x-end"]) == (200, ANSWER, "2")
        assert not {"link", "connection", "keep-alive", "x-hop"} & set(headers)


async def test_head_passes_without_a_body_and_the_connection_lives_on():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    async with stack(says(head, NEXT, head + b"hello")) as s:
        talk = await s.say(b"HEAD /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"content-length: 5" in (await talk.until(b"\r\n\r\n")).lower()
        assert (await talk.ask(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"))[2] == b"hello"


async def test_chunked_request_bodies_arrive_with_their_length():
    seen = []
    async with stack(answers(seen=seen)) as s:
        request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await s.ask(request + chunk(BODY[:7]) + chunk(BODY[7:]) + b"0\r\n\r\n"))[0] == 200
        head, body = seen[0]
        assert body == BODY and b"transfer-encoding" not in head


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (post(b"{broken"), 400, None),
        (post(gzip.compress(BODY), extra=b"Content-Encoding: gzip\r\n"), 415, "unsupported_media_type"),
        (post(b"[]"), 400, None),
        (post({"model": "nope", "messages": []}), 404, "model_not_found"),
        (b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n", 405, "POST, OPTIONS"),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 405, "GET, HEAD, OPTIONS"),
        (post(path=b"/v1/models"), 405, "GET, HEAD, OPTIONS"),
        (b"TRACE /version HTTP/1.1\r\nHost: x\r\n\r\n", 405, "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"),
    ],
)
async def test_the_clients_own_faults_come_back_as_openai_errors(raw, status, code):
    """A 405 says which methods would do."""
    async with stack(answers()) as s:
        talk = await s.talk()
        got, headers, body = await talk.ask(raw)
        error = json.loads(body)["error"]
        assert got == status and error["message"] and error["type"] == "invalid_request_error"
        if status == 405:
            assert headers["allow"] == code and error["code"] == "method_not_allowed"
        else:
            assert code is None or error["code"] == code
        assert headers["content-type"] == "application/json"
        await eventually(s.idle)
        await talk.say(post())  # and the connection is as good as before
        assert (await talk.response())[0] == 200


async def test_the_place_of_a_bad_byte_is_its_own():
    body = b'{"model": "m", "messages": [{"role": "user", "content": "' + "grün ".encode() * 20 + b'\xff"}]}'
    async with stack(answers()) as s:
        _, _, got = await s.ask(post(body))
        where = body.index(b"\xff")
        assert json.loads(got)["error"]["message"] == f"the body is not valid JSON: byte {where} is not utf-8"


@pytest.mark.parametrize("said", [b"identity", b"Identity", b"", b" ", b"identity, IDENTITY", b"identity\r\nContent-Encoding:"])  # fmt: skip
async def test_a_body_without_a_coding_says_so_in_vain(said):
    async with stack(answers()) as s:
        talk = await s.talk()
        for path in (b"/v1/chat/completions", b"/v1/messages"):
            assert (await talk.ask(post(path=path, extra=b"Content-Encoding: %b\r\n" % said)))[0] == 200


@pytest.mark.parametrize("said", [b"GZIP", b"identity, br", b"identity\r\nContent-Encoding: zstd"])
async def test_a_coding_is_named_wherever_it_stands(said):
    async with stack(answers()) as s:
        status, headers, body = await s.ask(post(extra=b"Content-Encoding: %b\r\n" % said))
        assert (status, headers["accept-encoding"]) == (415, "identity")
        assert repr(said.decode().split()[-1].lower()) in json.loads(body)["error"]["message"]


async def test_a_request_that_is_refused_is_no_answer_in_the_time_that_answers_take():
    async with stack(answers()) as s:
        (backend,) = s.proxy.backends.values()
        talk = await s.talk()
        for state, expected in ((State.STOPPED, 503), (State.READY, 200)):
            s.becomes(backend.replica, state)
            assert (await talk.ask(post()))[0] == expected
            await eventually(s.idle)
        assert sum(s.metrics.requests.values.values()) == 2
        assert sum(s.metrics.request_seconds.count(key) for key in s.metrics.request_seconds.values) == 1


async def test_models_of_replicas_that_want_a_key_are_told_to_those_who_bring_it():
    seen = []
    async with stack(answers(b'{"data":[{"id":"theirs"}]}', seen=seen)) as s:
        (backend,) = s.proxy.backends.values()
        backend.replica.models = {}
        s.proxy.changed()
        status, _, body = await s.ask(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n\r\n")
        assert (status, body) == (200, b'{"data":[{"id":"theirs"}]}')
        assert b"authorization: Bearer k" in seen[0][0]


async def test_models_are_merged_over_replicas():
    async with stack(answers(), answers()) as s:
        first, second = s.proxy.backends.values()
        second.replica.models = {"m": None, "adapter": "m"}
        s.proxy.changed()
        listed = json.loads((await s.ask(MODELS))[2])["data"]
        assert [(one["id"], one["parent"]) for one in listed] == [("adapter", "m"), ("m", None)]


async def test_each_served_model_and_adapter_is_told_by_its_name():
    async with stack(answers()) as s:
        (backend,) = s.proxy.backends.values()
        backend.replica.models = {"org/m": None, "my adapter": "org/m"}
        s.proxy.changed()
        talk = await s.talk()
        for path, name in ((b"org/m", "org/m"), (b"org%2Fm?x=y", "org/m"), (b"my%20adapter", "my adapter")):
            status, headers, body = await talk.ask(b"GET /v1/models/%b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
            told = json.loads(body)
            assert (status, told["id"], told["object"]) == (200, name, "model")
            assert headers["content-type"] == "application/json"
            assert told in json.loads((await talk.ask(MODELS))[2])["data"]
        for method, path, expected in (
            (b"GET", b"org", (404, "model_not_found")),
            (b"GET", b"%ff%00", (404, "model_not_found")),
            (b"DELETE", b"org/m", (405, "method_not_allowed")),
            (b"POST", b"org/m", (405, "method_not_allowed")),
        ):
            status, _, body = await talk.ask(
                b"%b /v1/models/%b HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % (method, path)
            )
            assert (status, json.loads(body)["error"]["code"]) == expected
        assert s.idle()


@pytest.mark.parametrize(("state", "code"), [(State.STARTING, "no_replica_ready"), (State.READY, "model_not_found")])
async def test_a_model_is_not_told_of_by_replicas_that_are_not_ready_or_want_a_key(state, code):
    seen = []
    async with stack(answers(seen=seen)) as s:
        (backend,) = s.proxy.backends.values()
        backend.replica.models, backend.replica.state = {}, state
        s.proxy.changed()
        status, _, body = await s.ask(b"GET /v1/models/m HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status, json.loads(body)["error"]["code"]) == (503 if state is State.STARTING else 404, code)
        assert ("API key" in json.loads(body)["error"]["message"]) == (state is State.READY)
        if state is State.STARTING:
            status, headers, body = await s.ask(MODELS)
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["error"]["message"].startswith("no replica is ready")
        assert not seen


async def test_what_has_no_prompt_passes_by_load_alone():
    seen = []
    async with stack(answers(seen=seen)) as s:
        status, headers, _ = await s.ask(b"GET /version?x=%20y HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status == 200 and "x-hitherto-cached-tokens" not in headers
        assert seen[0][0].startswith(b"GET /version?x=%20y HTTP/1.1\r\n")


async def test_usage_is_found_though_what_ends_the_stream_comes_apart_from_it():
    # As vLLM does: each its own write, often its own read
    end = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    pieces = [chunk(EVENT), chunk(b"data: " + USAGE + b"\n\n"), chunk(end)]
    async with stack(streams(*pieces, end=b"0\r\n\r\n", pause=lambda: asyncio.sleep(0.02))) as s:
        talk = await s.say(post(LONG))
        await talk.until(b"0\r\n\r\n")
        await eventually(s.idle)
        assert s.metrics.reported_prompt_tokens.total() == 9


async def test_predictions_count_only_where_the_usage_speaks_of_the_same_prompt():
    async with stack(answers(USAGE)) as s:
        talk = await s.talk()
        for body, compared in (
            (b'{"prompt":"a"}', 1),
            (b'{"prompt":"a","n":2}', 2),
            (b'{"prompt":["a","b"]}', 2),
            (b'{"prompt":"a"}', 3),
        ):
            assert (await talk.ask(post(body, path=b"/v1/completions")))[0] == 200
            await eventually(s.idle)
            assert s.metrics.predictions.total() == compared


async def test_names_that_clients_make_up_are_not_kept():
    async with stack(answers()) as s:
        talk = await s.talk()
        for i in range(5):
            status, _, body = await talk.ask(post({"model": f"{i}" + "x" * 100_000, "messages": []}))
            assert status == 404 and len(body) < 1000
        assert set(s.proxy.eligible._ready) <= {None, "m"}


async def test_a_request_there_is_no_room_for_is_refused_in_the_shape_of_its_api():
    async with stack(answers(), limits=Limits(requests_bytes=1000)) as s:
        status, headers, body = await s.ask(post(path=b"/v1/messages", extra=b"X-Request-Id: mine-1\r\n"))
        assert status == 503 and json.loads(body)["type"] == "error"
        assert headers["x-request-id"] == "mine-1" and headers["retry-after"] == "1"


@pytest.mark.parametrize("target", [b"/v1/messages", b"http://gateway.example/v1/messages"])
async def test_errors_of_the_wire_have_the_shape_of_the_api_that_was_asked(target):
    async with stack(answers(), limits=Limits(body_bytes=10)) as s:
        status, _, body = await s.ask(post(path=target))
        assert status == 413 and json.loads(body) == {
            "type": "error",
            "error": {"type": "request_too_large", "message": json.loads(body)["error"]["message"]},
        }


async def test_blocks_in_a_slower_tier_reach_the_policy_for_that_request_only():
    async with stack(answers(), answers()) as s:
        proxy = s.proxy
        slow, _ = proxy.backends.values()
        proxy.router.map.observed(slow.slot, True)
        prompt = proxy.models.pipelines[0].prepare("/v1/chat/completions", LONG)
        keys = list(range(1, len(prompt.hashes) + 1))
        proxy.router.map.store(slow.slot, prompt.hashes[:2], keys[:2])
        proxy.router.map.store(slow.slot, prompt.hashes, keys, "cpu")

        def candidates_for(prompt):
            demand, targets = proxy.placing.demand(prompt, 0.0), proxy.eligible.targets(prompt)
            return proxy.router.evaluate(demand, targets, 0.0).candidates

        candidates = candidates_for(prompt)
        size = proxy.models.pipelines[0].block_size
        assert (candidates[0].overlap, candidates[0].lower) == (2 * size, (("cpu", (len(keys) - 2) * size),))
        assert candidates[1].lower == ()
        other = proxy.models.pipelines[0].prepare("/v1/chat/completions", LONG.replace(b"hi ", b"ho "))
        assert candidates_for(other)[0].lower == ()


async def test_a_replica_that_counts_other_tokens_is_told_of(caplog):
    pipeline = Pipeline(sim_model_dir(), "m", 16)
    async with stack(answers(USAGE), pipeline=pipeline) as s:  # counts 9, whatever it is sent
        talk = await s.talk()
        for prompt, found in (([1] * 9, 0), ([1] * 8, 1), ([[1], [2]], 1), ([1] * 10, 2), ([1] * 9, 2)):
            assert (await talk.ask(post({"prompt": prompt}, path=b"/v1/completions")))[0] == 200
            await eventually(s.idle)
            assert s.metrics.prompt_mismatches.total() == found
    told = [record.message for record in caplog.records if "counted" in record.message]
    assert len(told) == 1
    assert "counted 9 prompt tokens where the gateway made 8" in told[0]
    assert "--chat-template" in told[0]


async def test_what_has_come_of_a_stream_is_context_of_its_replica_as_far_as_the_sweep_saw():
    go_on = asyncio.Queue()

    async def stream(reader, writer):
        await read_request(reader)
        writer.write(SSE_HEAD)
        while piece := await go_on.get():
            writer.write(piece)

    async with stack(stream) as s:
        s.server._sweeper.cancel()  # all sweeps are the test's own
        talk = await s.say(post())
        (load,) = (backend.candidate.load for backend in s.proxy.backends.values())
        for came in range(1, 6):
            go_on.put_nowait(chunk(EVENT))
            exchange = await s.exchange(lambda attempt, came=came: attempt.pieces == came)
            assert load.context_tokens == exchange.prompt.tokens + came - 1
            s.proxy.sweep(asyncio.get_running_loop().time())
            assert load.context_tokens == exchange.prompt.tokens + came
        go_on.put_nowait(ENDS)
        assert (await talk.response())[0] == 200
