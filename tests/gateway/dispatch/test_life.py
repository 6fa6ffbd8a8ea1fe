"""One request's life between real sockets: what passes, what is retried, what the client is told."""

import asyncio
import json
import random
import socket

import pytest

from gateway.wire.http import Limits
from gateway.wire.server import free_port

from ..wire.talk import eventually, read_request
from .stack import stack

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()


def post(body=BODY, path=b"/v1/chat/completions", extra=b""):
    return b"POST %b HTTP/1.1\r\nHost: client.example\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b" % (path, extra, len(body), body)


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'


def answers(body=b'{"ok":true}', status=b"200 OK", headers=b"", seen=None, close_after=False):
    """A replica that gives this answer to every request."""

    async def script(reader, writer):
        while True:
            request = await read_request(reader)
            if seen is not None:
                seen.append(request)
            writer.write(b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b" % (status, len(body), headers, body))
            if close_after:
                return

    return script


def streams(*pieces, end=chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", pause=None):
    async def script(reader, writer):
        while True:
            await read_request(reader)
            writer.write(SSE_HEAD)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if pause:
                    await pause()
            if end is None:
                return
            writer.write(end)

    return script


async def silent(reader, writer):
    await reader.read()


async def test_a_plain_answer_passes_and_says_where_it_came_from():
    seen = []
    async with stack(answers(seen=seen)) as s:
        talk = await s.talk()
        await talk.say(post(extra=b"Authorization: Bearer secret\r\nX-Custom: 1\r\nConnection: x-gone\r\nX-Gone: 1\r\n"))
        status, headers, body = await talk.response()
        assert (status, body) == (200, b'{"ok":true}')
        assert headers["x-hitherto-replica"] in s.dispatcher.backends
        assert headers["x-hitherto-cached-tokens"] == "0"
        assert headers["x-request-id"]
        head, sent = seen[0]
        assert sent == BODY
        assert b"authorization: Bearer secret\r\n" in head and b"x-custom: 1\r\n" in head
        assert b"x-gone" not in head and b"connection" not in head
        assert b"client.example" not in head and b"host: 127.0.0.1:" in head
        await eventually(s.idle)


async def test_the_clients_request_id_is_kept():
    seen = []
    async with stack(answers(seen=seen)) as s:
        talk = await s.talk()
        await talk.say(post(extra=b"X-Request-Id: mine-1\r\n"))
        assert (await talk.response())[1]["x-request-id"] == "mine-1"
        assert seen[0][0].count(b"x-request-id: mine-1\r\n") == 1


async def test_stream_bytes_pass_untouched_chunk_framing_included():
    pieces = [b"1;ext=1\r\nd\r\n", chunk(b"ata: 1\n\n"), chunk(EVENT) + b"5\r\nda", b"ta:\r\n", chunk(b" 2\n\n")]
    async with stack(streams(*pieces)) as s:
        talk = await s.talk()
        await talk.say(post())
        await talk.until(b"\r\n\r\n")
        raw = await talk.until(b"0\r\n\r\n")
        assert raw == b"".join(pieces) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        await eventually(s.idle)


async def test_connections_to_a_replica_are_kept_and_used_again():
    seen, connections = [], 0

    async def script(reader, writer):
        nonlocal connections
        connections += 1
        await answers(seen=seen)(reader, writer)

    async with stack(script) as s:
        talk = await s.talk()
        for _ in range(5):
            await talk.say(post())
            await talk.response()
        assert (connections, len(seen)) == (1, 5)


async def test_a_kept_connection_that_died_is_replaced_without_blaming_the_replica():
    async with stack(answers(close_after=True), retries=0) as s:
        talk = await s.talk()
        for _ in range(4):
            await talk.say(post())
            assert (await talk.response())[0] == 200
        assert s.faults == []


async def test_interim_responses_stay_between_replica_and_gateway():
    async def script(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read()

    async with stack(script) as s:
        talk = await s.talk()
        await talk.say(post())
        status, headers, body = await talk.response()
        assert (status, body) == (200, b"ok") and "link" not in headers


async def test_hop_by_hop_headers_of_the_replica_are_stripped():
    async with stack(answers(headers=b"Connection: keep-alive, X-Hop\r\nKeep-Alive: timeout=5\r\nX-Hop: 1\r\nX-End: 2\r\n")) as s:
        talk = await s.talk()
        await talk.say(post())
        _, headers, _ = await talk.response()
        assert headers["x-end"] == "2"
        assert not {"connection", "keep-alive", "x-hop"} & set(headers)


async def test_head_passes_without_a_body_and_the_connection_lives_on():
    async def script(reader, writer):
        while True:
            head, _ = await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + (b"" if head.startswith(b"HEAD") else b"hello"))

    async with stack(script) as s:
        talk = await s.talk()
        await talk.say(b"HEAD /thing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"content-length: 5" in (await talk.until(b"\r\n\r\n")).lower()
        await talk.say(b"GET /thing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await talk.response())[2] == b"hello"


async def test_http10_clients_get_a_body_without_chunks():
    async def script(reader, writer):
        head, _ = await read_request(reader)
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.0\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + EVENT)

    async with stack(script) as s:
        talk = await s.talk()
        await talk.say(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
        whole = await talk.rest()
        assert whole.endswith(b"\r\n\r\n" + EVENT)
        await eventually(s.idle)


async def test_chunked_request_bodies_arrive_with_their_length():
    seen = []
    async with stack(answers(seen=seen)) as s:
        talk = await s.talk()
        await talk.say(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(BODY[:7]) + chunk(BODY[7:]) + b"0\r\n\r\n")
        assert (await talk.response())[0] == 200
        head, body = seen[0]
        assert body == BODY and b"transfer-encoding" not in head


async def test_no_connection_moves_the_request_to_another_replica():
    async with stack(answers(), ports=[free_port()]) as s:
        talk = await s.talk()
        for _ in range(4):
            await talk.say(post())
            assert (await talk.response())[0] == 200
        assert "connect" in s.faults and set(s.faults) == {"connect"}


@pytest.mark.parametrize("status", [b"500 Internal Server Error", b"502 Bad Gateway", b"503 Service Unavailable"])
async def test_an_unwell_replica_is_passed_over(status):
    async with stack(answers(status=status), answers(b'{"fine":1}')) as s:
        talk = await s.talk()
        for _ in range(4):
            await talk.say(post())
            assert (await talk.response())[0::2] == (200, b'{"fine":1}')
        assert s.metrics.retries.total() >= 2
        await eventually(s.idle)


async def test_the_last_replicas_own_error_reaches_the_client():
    body = b'{"error":{"message":"full","code":503}}'
    async with stack(answers(body, b"503 Service Unavailable"), answers(body, b"503 Service Unavailable")) as s:
        talk = await s.talk()
        await talk.say(post())
        assert (await talk.response())[0::2] == (503, body)


async def test_a_4xx_is_the_clients_and_is_never_retried():
    async with stack(answers(b"{}", b"422 Unprocessable"), answers()) as s:
        talk = await s.talk()
        await talk.say(post())
        assert (await talk.response())[0] == 422
        assert s.faults == [] and s.metrics.retries.total() == 0


async def test_death_before_the_first_byte_is_retried_and_502_when_all_fail():
    async def dies(reader, writer):
        await read_request(reader)
        writer.write(SSE_HEAD)  # engines send the head before the prefill: still nothing has been answered
        await writer.drain()

    async with stack(dies, answers()) as s:
        talk = await s.talk()
        for _ in range(2):
            await talk.say(post())
            assert (await talk.response())[0] == 200
    async with stack(dies, dies, dies, dies, retries=2) as s:
        talk = await s.talk()
        await talk.say(post())
        status, _, body = await talk.response()
        error = json.loads(body)["error"]
        assert (status, error["code"], error["type"]) == (502, "replica_failed", "server_error")
        assert "after 3 attempt(s)" in error["message"]
        await eventually(s.idle)


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
        await talk.say(post(path=path))
        status, _, body = await talk.response()
        assert status == 200 and body.startswith(EVENT + EVENT)
        assert all(mark in body for mark in marks) and b"[DONE]" not in body
        assert await talk.rest() == b""
        await eventually(s.idle)


@pytest.mark.parametrize("torn", [b"ff\r\ndata: half", b"ff"])
async def test_death_inside_a_chunk_cuts_the_connection(torn):
    async with stack(streams(chunk(EVENT), torn, end=None)) as s:
        talk = await s.talk()
        await talk.say(post())
        raw = await talk.rest()
        assert EVENT in raw and not raw.endswith(b"0\r\n\r\n") and b"[DONE]" not in raw
        await eventually(s.idle)


async def test_death_inside_a_plain_body_cuts_the_connection():
    async def script(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()

    async with stack(script) as s:
        talk = await s.talk()
        await talk.say(post())
        assert not (await talk.rest()).endswith(b"}")
        await eventually(s.idle)


@pytest.mark.parametrize("garbage", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000])
async def test_a_replica_that_does_not_speak_http_is_passed_over(garbage):
    async def script(reader, writer):
        await read_request(reader)
        writer.write(garbage)
        await reader.read()

    async with stack(script, answers()) as s:
        talk = await s.talk()
        for _ in range(2):
            await talk.say(post())
            assert (await talk.response())[0] == 200


async def test_bytes_after_the_end_of_an_answer_never_reach_another_request():
    async def script(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await reader.read()

    async with stack(script) as s:
        talk = await s.talk()
        await talk.say(post())
        status, _, body = await talk.response()
        assert status == 502 and b"evil" not in body
        assert not any(backend.pool.idle for backend in s.dispatcher.backends.values())


async def test_no_first_byte_in_time_is_a_504():
    async with stack(silent, request_timeout=0.2) as s:
        talk = await s.talk()
        await talk.say(post())
        status, _, body = await talk.response()
        assert (status, json.loads(body)["error"]["code"]) == (504, "replica_timeout")
        assert s.faults == ["timeout"]
        await eventually(s.idle)


async def test_a_stream_that_stalls_is_ended_with_an_error_event():
    async with stack(streams(chunk(EVENT), pause=lambda: asyncio.sleep(30)), idle_timeout=0.2) as s:
        talk = await s.talk()
        await talk.say(post())
        _, _, body = await talk.response()
        assert b"no byte for 0.2 s" in body and b"[DONE]" not in body
        await eventually(s.idle)


@pytest.mark.parametrize("after", ["request", "first event"])
async def test_a_client_that_leaves_aborts_the_request_upstream(after):
    left = asyncio.Event()
    arrived = asyncio.Event()

    async def script(reader, writer):
        await read_request(reader)
        if after == "first event":
            writer.write(SSE_HEAD + chunk(EVENT))
        arrived.set()
        assert await reader.read() == b""
        left.set()

    async with stack(script) as s:
        talk = await s.talk()
        await talk.say(post())
        await arrived.wait()
        if after == "first event":
            await talk.until(EVENT)
        await talk.close()
        await asyncio.wait_for(left.wait(), 5)
        await eventually(s.idle)
        assert s.metrics.client_aborts.total() == 1


async def test_a_slow_reader_slows_the_replica_down():
    sent = 0

    async def script(reader, writer):
        nonlocal sent
        await read_request(reader)
        writer.write(SSE_HEAD)
        for _ in range(1000):
            writer.write(chunk(b"d" * 65536))
            await writer.drain()
            sent += 1
        writer.write(b"0\r\n\r\n")

    async with stack(script) as s:
        talk = await s.talk()
        await talk.say(post())
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 700  # kernel buffers hold some megabytes, 65 MB they do not
        assert len((await talk.response(30))[2]) == 1000 * 65536
        await eventually(s.idle)


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (post(b"{broken"), 400, None),
        (post(b"[]"), 400, None),
        (post(json.dumps({"model": "nope", "messages": []}).encode()), 404, "model_not_found"),
        (b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
        (b"TRACE /x HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
    ],
)
async def test_the_clients_own_faults_come_back_as_openai_errors(raw, status, code):
    async with stack(answers()) as s:
        talk = await s.talk()
        await talk.say(raw)
        got, headers, body = await talk.response()
        error = json.loads(body)["error"]
        assert got == status and error["message"] and error["type"] == "invalid_request_error"
        assert code is None or error["code"] == code
        assert headers["content-type"] == "application/json"
        await eventually(s.idle)
        await talk.say(post())  # and the connection is as good as before
        assert (await talk.response())[0] == 200


async def test_no_replica_is_a_503_with_retry_after():
    async with stack() as s:
        talk = await s.talk()
        await talk.say(post())
        status, headers, body = await talk.response()
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "no_replica_ready"


async def test_while_draining_new_work_gets_503_on_old_connections():
    async with stack(answers()) as s:
        talk = await s.talk()
        await talk.say(post())
        await talk.response()
        s.dispatcher.draining = True
        await talk.say(post())
        status, headers, _ = await talk.response()
        assert status == 503 and headers["retry-after"]


async def test_models_are_merged_over_replicas():
    async with stack(answers(), answers()) as s:
        first, second = s.dispatcher.backends.values()
        second.replica.models = {"m": None, "adapter": "m"}
        s.dispatcher.changed()
        talk = await s.talk()
        await talk.say(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        listed = json.loads((await talk.response())[2])["data"]
        assert [(one["id"], one["parent"]) for one in listed] == [("adapter", "m"), ("m", None)]


async def test_any_other_path_passes_by_load_alone():
    seen = []
    async with stack(answers(seen=seen)) as s:
        talk = await s.talk()
        await talk.say(b"GET /version?x=%20y HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers, _ = await talk.response()
        assert status == 200 and "x-hitherto-cached-tokens" not in headers
        assert seen[0][0].startswith(b"GET /version?x=%20y HTTP/1.1\r\n")


async def test_after_any_mix_of_lives_nothing_is_left():
    """Clients that leave, replicas that die at every point, retries: the ledger reads zero in the end."""
    rng = random.Random(3)

    async def chaos(reader, writer):
        while True:
            await read_request(reader)
            fate = rng.random()
            if fate < 0.1:
                return
            if fate < 0.2:
                writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
                continue
            writer.write(SSE_HEAD)
            if fate < 0.3:
                return
            for _ in range(rng.randrange(1, 6)):
                writer.write(chunk(EVENT))
                await writer.drain()
                await asyncio.sleep(0)
            if fate < 0.4:
                return
            if fate < 0.5:
                writer.write(b"ff\r\ntorn")
                await writer.drain()
                return
            writer.write(b"0\r\n\r\n")

    async def client(s):
        for _ in range(40):
            talk = await s.talk()
            await talk.say(post())
            if rng.random() < 0.3:
                if rng.random() < 0.5:
                    await talk.until(b"\r\n")
            else:
                try:
                    await talk.response()
                except (asyncio.IncompleteReadError, ConnectionError):
                    pass
            await talk.close()

    async with stack(chaos, chaos, chaos, ports=[free_port()]) as s:
        await asyncio.gather(*(client(s) for _ in range(25)), return_exceptions=False)
        await eventually(s.idle)
        assert s.metrics.requests.total() == 1000


LONG = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi " * 100}]}).encode()
USAGE = b'{"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}'


async def test_usage_is_found_though_what_ends_the_stream_comes_apart_from_it():
    end = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'  # as vLLM does: each its own write, often its own read
    pieces = [chunk(EVENT), chunk(b"data: " + USAGE + b"\n\n"), chunk(end)]
    async with stack(streams(*pieces, end=b"0\r\n\r\n", pause=lambda: asyncio.sleep(0.02))) as s:
        talk = await s.talk()
        await talk.say(post(LONG))
        await talk.until(b"0\r\n\r\n")
        await eventually(s.idle)
        assert s.metrics.reported_prompt_tokens.total() == 9


async def test_predictions_count_only_where_the_usage_speaks_of_the_same_prompt():
    async with stack(answers(USAGE)) as s:
        talk = await s.talk()
        for body, compared in ((b'{"prompt":"a"}', 1), (b'{"prompt":"a","n":2}', 1), (b'{"prompt":["a","b"]}', 1), (b'{"prompt":"a"}', 2)):
            await talk.say(post(body, path=b"/v1/completions"))
            assert (await talk.response())[0] == 200
            await eventually(s.idle)
            assert s.metrics.predictions.total() == compared


async def test_a_replica_removed_under_a_life_lets_it_end_and_leaves_no_trace():
    go = asyncio.Event()

    async def script(reader, writer):
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(USAGE) + USAGE[:10])
            await go.wait()
            writer.write(USAGE[10:])

    async with stack(script, answers()) as s:
        talk = await s.talk()
        await talk.say(post(LONG))
        await talk.until(b"\r\n\r\n")
        (life,) = s.dispatcher.lives
        gone = s.dispatcher.remove(life.backend.id)
        s.metrics.forget(gone.id)
        go.set()
        await talk.until(b"}}}")
        await eventually(s.idle)
        assert not gone.pool.idle
        assert gone.id not in str(s.metrics.replica_requests.values)
        await talk.say(post())
        assert (await talk.response())[0] == 200


async def test_a_replica_removed_while_it_is_being_connected_to_is_left_for_another():
    with socket.socket() as deaf:  # its backlog is full: connecting to it takes for ever
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        async with stack(answers(), ports=[deaf.getsockname()[1]]) as s:
            talks = [await s.talk() for _ in range(2)]
            for talk in talks:
                await talk.say(post())
            await eventually(lambda: len(s.dispatcher.lives) == 1)
            (life,) = s.dispatcher.lives
            s.dispatcher.remove(life.backend.id)
            assert [(await talk.response())[0] for talk in talks] == [200, 200]
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize("padding", [0, 100_000], ids=["at once", "in a thread"])
async def test_a_bug_in_preparing_routes_the_request_by_load(padding, monkeypatch, caplog):
    def fails(*args):
        raise ZeroDivisionError("a bug")

    async with stack(answers()) as s:
        monkeypatch.setattr(s.dispatcher.pipeline, "prepare", fails)
        talk = await s.talk()
        await talk.say(post() + post(BODY[:-1] + b',"pad":"' + b"x" * padding + b'"}'))
        assert [(await talk.response())[0] for _ in range(2)] == [200, 200]
        assert s.metrics.prompt_failures.total() == 2 and "ZeroDivisionError: a bug" in caplog.text


async def test_a_client_that_does_not_read_is_dropped_and_the_replica_not_blamed():
    async def script(reader, writer):
        await read_request(reader)
        writer.write(SSE_HEAD)
        for _ in range(400):
            writer.write(chunk(b"d" * 65536))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async with stack(script, idle_timeout=0.3) as s:
        talk = await s.talk()
        await talk.say(post())
        await eventually(lambda: s.metrics.client_aborts.total() == 1)
        await eventually(s.idle)
        assert s.faults == []


async def test_an_early_answer_to_a_large_body_does_not_poison_the_connection():
    asked = 0

    async def script(reader, writer):
        nonlocal asked
        asked += 1
        if asked > 1:
            return await answers()(reader, writer)
        await reader.readuntil(b"\r\n\r\n")
        reader._transport.pause_reading()
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await asyncio.sleep(30)

    async with stack(script) as s:
        talk = await s.talk()
        await talk.say(post(b"x" * 30_000_000, path=b"/other"))
        assert (await talk.response())[0] == 413
        await talk.say(post())
        assert (await talk.response())[0] == 200
        assert s.faults == []


async def test_a_5xx_that_reaches_the_client_counts_against_the_replica():
    async with stack(answers(b"{}", b"500 Internal Server Error")) as s:
        talk = await s.talk()
        await talk.say(post())
        assert (await talk.response())[0] == 500
        assert s.faults == ["status 500"]


async def test_a_slow_upload_does_not_use_up_the_replicas_time():
    async def script(reader, writer):
        await read_request(reader)
        await asyncio.sleep(0.3)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read()

    async with stack(script, request_timeout=0.8) as s:
        talk = await s.talk()
        raw = post()
        for at in range(8):
            await talk.say(raw[at * 10 : (at + 1) * 10])
            await asyncio.sleep(0.1)
        await talk.say(raw[80:])
        assert (await talk.response())[0] == 200
        assert s.faults == []


async def test_names_that_clients_make_up_are_not_kept():
    async with stack(answers()) as s:
        talk = await s.talk()
        for i in range(5):
            await talk.say(post(json.dumps({"model": f"{i}" + "x" * 100_000, "messages": []}).encode()))
            status, _, body = await talk.response()
            assert status == 404 and len(body) < 1000
        assert set(s.dispatcher._serving) <= {None, "m"}


async def test_errors_of_the_wire_have_the_shape_of_the_api_that_was_asked():
    async with stack(answers(), limits=Limits(body_bytes=10)) as s:
        talk = await s.talk()
        await talk.say(post(path=b"/v1/messages"))
        status, _, body = await talk.response()
        assert status == 413 and json.loads(body) == {"type": "error", "error": {"type": "request_too_large", "message": json.loads(body)["error"]["message"]}}


@pytest.mark.parametrize(("line", "allow"), [(b"GET /v1/chat/completions", "POST, OPTIONS"), (b"POST /v1/models", "GET, HEAD"), (b"TRACE /x", "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT")])
async def test_405_says_what_would_do(line, allow):
    async with stack(answers()) as s:
        talk = await s.talk()
        await talk.say(line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        status, headers, _ = await talk.response()
        assert (status, headers["allow"]) == (405, allow)


async def test_blocks_in_a_slower_tier_reach_the_policy_for_that_request_only():
    async with stack(answers(), answers()) as s:
        dispatcher = s.dispatcher
        slow, _ = dispatcher.backends.values()
        dispatcher.map.observed(slow.slot, True)
        prompt = dispatcher.pipeline.prepare("/v1/chat/completions", LONG)
        keys = list(range(1, len(prompt.hashes) + 1))
        dispatcher.map.store(slow.slot, prompt.hashes[:2], keys[:2])
        dispatcher.map.store(slow.slot, prompt.hashes, keys, "cpu")
        _, _, candidates = dispatcher.weigh(prompt)
        size = dispatcher.pipeline.block_size
        assert (candidates[0].overlap, candidates[0].lower) == (2 * size, (("cpu", (len(keys) - 2) * size),))
        assert candidates[1].lower == ()
        _, _, candidates = dispatcher.weigh(dispatcher.pipeline.prepare("/v1/chat/completions", LONG.replace(b"hi ", b"ho ")))
        assert candidates[0].lower == ()
