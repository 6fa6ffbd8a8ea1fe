"""Requests that go wrong before their client has a byte: what is retried, what the client is told, that nothing is left
behind."""

import asyncio
import errno
import json
import os
import socket
import time
from types import SimpleNamespace

import pytest

from gateway.datapath import _access
from gateway.proxy import preparation
from policies.costs import Costs
from replicas import State

from ..http.talk import eventually, free_port, read_request
from .replies import (
    ANSWER,
    BODY,
    ENDS,
    EVENT,
    LONG,
    NEXT,
    SSE_HEAD,
    USAGE,
    answers,
    chunk,
    post,
    reply,
    says,
    silent,
    streams,
)
from .stack import stack


async def test_a_kept_connection_that_died_is_replaced_without_blaming_the_replica():
    async with stack(answers(close_after=True), retries=0) as s:
        await s.answered(4, post())
        assert s.faults == []


def raw(head, body=b""):
    """A replica that gives this answer to every request."""

    async def script(reader, writer):
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body))

    return script


HTML, JSON = b"<html><body>It works!</body></html>", b"200 OK\r\nContent-Type: application/json"
NO = b'{"error": "no"}'
ABORT = b'{"choices":[{"text":"half","finish_reason":"abort"}]}'
ERROR = b'data: {"id":"1","error":{"message":"died","code":500}}\n\n'
FAILED = b'data: {"sequence_number":3,"type":"response.failed","response":{"error":{"code":"server_error"}}}\n\n'
ANNOUNCED = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
UNFRAMED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
# A replica; what it is blamed for where another one answers; what a client gets where it is the only one, if that is
# said here: its status, and words of its body.
UNWELL = {
    "500": (answers(b"{}", b"500 No"), "status 500", 500, b"{}"),
    "502": (answers(b"{}", b"502 Bad Gateway"), "status 502", 502, b"{}"),
    "503": (answers(b"{}", b"503 Service Unavailable"), "status 503", 503, b"{}"),
    "401": (answers(NO, b"401 Unauthorized"), "status 401", 401, NO),
    "403": (answers(NO, b"403 Forbidden"), "status 403", 403, NO),
    "404": (answers(NO, b"404 Not Found"), "status 404", 404, NO),
    "429": (answers(NO, b"429 Too Many Requests"), "status 429", 429, NO),
    "204": (raw(b"204 No Content"), "foreign answer", 502, b"answered 204 with no content type, which"),
    "206": (answers(b"{}", b"206 Partial Content"), "foreign answer", 502, b"no answer of an inference engine"),
    "302": (raw(b"302 Found\r\nContent-Type: text/html"), "foreign answer", 502, b"answered 302 with text/html, which"),
    "404 in HTML": (raw(b"404 Not Found\r\nContent-Type: text/html", HTML), "foreign answer", 502, b"no answer of an"),
    "405 in HTML": (raw(b"405 Not Allowed\r\nContent-Type: text/html", HTML), "foreign answer", 502, b"no answer of an"),
    "empty JSON": (raw(JSON), "foreign answer", 502, b"answered 200 with an empty body, which"),
    "empty": (raw(b"200 OK"), "foreign answer", 502, b"no answer of an"),
    "HTML": (raw(b"200 OK\r\nContent-Type: text/html", HTML), "foreign answer", 502, b"no answer of an"),
    "HTML without a type": (raw(b"200 OK", HTML), "foreign answer", 502, b"no answer of an"),
    "a string": (raw(JSON, b'"ok"'), "foreign answer", 502, b"no answer of an"),
    "no members": (raw(JSON, b"{}"), "foreign answer", 502, b"no answer of an"),
    "a status": (raw(JSON, b'{"status":"ok"}'), "foreign answer", 502, b"no answer of an"),
    "ok": (raw(JSON, b'{"ok":true}'), "foreign answer", 502, b"no answer of an"),
    "models": (raw(JSON, b'{"object":"list","data":[{"id":"m","object":"model","created":1}]}'), "foreign answer", 502, b"no answer of an"),
    "no event": (raw(b"200 OK\r\nContent-Type: text/event-stream", b"error: no\n\n"), "foreign answer", 502, b"no answer of an"),
    "no HTTP": (says(b"SSH-2.0-OpenSSH\r\n"), "protocol", 502, b""),
    "two lengths": (says(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"), "protocol", 502, b""),
    "a long head": (says(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000), "protocol", 502, b""),
    # engines send the head before the prefill: still nothing has been answered
    "dies behind its head": (says(SSE_HEAD, then_hangs=False), "closed", 502, b""),
    "dies behind a role": (says(UNFRAMED + ANNOUNCED, then_hangs=False), "closed", None, b""),
    # vLLM's way when it stops: 200, and the text so far
    "aborts": (answers(ABORT), "aborted", 503, b"abort"),
    "aborts a stream": (streams(chunk(b"data: " + ABORT + b"\n\n")), "aborted", 503, b"abort"),
    "an error behind 200": (answers(b'{"error":{"message":"x","code":500}}'), "error answer", None, b""),
    "an error that is not the first member": (streams(chunk(ERROR)), "error answer", None, b""),
    "a failed response by its type alone": (streams(chunk(FAILED)), "error answer", None, b""),
    "only the end": (streams(), "error answer", None, b""),
}  # fmt: skip


@pytest.mark.parametrize("unwell", UNWELL)
async def test_a_replica_that_fails_a_request_is_passed_over_and_held_to_account_where_another_answers(unwell):
    """Refusing takes no time, so such a replica would look idle and get everything."""
    script, fault, status, words = UNWELL[unwell]
    quoting = b'{"choices":[{"text":"\\"finish_reason\\":\\"abort\\"","finish_reason":"stop"}]}'
    async with stack(script, answers(quoting)) as s:
        bad = next(iter(s.proxy.backends))
        await s.answered(4, post(), quoting)
        await eventually(s.idle)
        # what is full is asked last for a second
        assert s.metrics.retries.total() >= (1 if status in (429, 503) else 2)
        assert s.faults and set(s.faults) == {fault} and s.metrics.upstream_errors.total(replica=bad) == len(s.faults)
        assert not s.unconfirmed or fault.startswith(("status 5", "error"))
    if status:
        async with stack(script) as s:
            got, headers, body = await s.ask(post())
            assert got == status and words in body and "x-should-retry" not in headers


PASSED_ON = {
    "503": (b'{"error":{"message":"full","code":503}}', 2),
    "422": (b"{}", 1),
    "500": (b'{"error":{"message":"no tool named \\"message\\":\\"cannot schedule new futures after shutdown"}}', 1),
    "401": (NO, 3),
    "403": (NO, 3),
}


@pytest.mark.parametrize("status", PASSED_ON)
async def test_what_all_replicas_refuse_alike_reaches_the_client_and_is_held_against_none(status):
    """One that only quotes what stopping engines say, too."""
    body, engines = PASSED_ON[status]
    async with stack(*[answers(body, f"{status} No".encode())] * engines) as s:
        for _ in range(6):
            assert (await s.ask(post()))[0::2] == (int(status), body)
        await eventually(s.idle)
        assert not s.faults and (not s.unconfirmed or status == "500")
        assert s.metrics.retries.total() <= 6 * (engines - 1)
        assert s.metrics.rejections.total(reason="engines_unauthorized") == 6 * (status in ("401", "403"))


async def test_a_4xx_is_the_clients_and_is_never_retried():
    async with stack(answers(b"{}", b"422 Unprocessable"), answers()) as s:
        assert (await s.ask(post()))[0] == 422
        assert s.faults == [] and s.metrics.retries.total() == 0


async def test_no_connection_moves_the_request_to_another_replica():
    async with stack(answers(), ports=[free_port()]) as s:
        await s.answered(4, post())
        assert set(s.faults) == {"connect"}


STOPPING = b'{"error":{"message":"cannot schedule new futures after shutdown","type":"InternalServerError","param":null,"code":500}}'
DEAD = b'{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","code":500}}'
GIVEN_UP = {
    "a stream": (b"/v1/completions", streams(chunk(b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n'))),
    "an answer": (b"/v1/completions", answers(b'{"choices":[{"text":"","finish_reason":"abort"}]}')),
    "a chat": (b"/v1/chat/completions", answers(b'{"choices":[{"message":{"content":""},"finish_reason":"abort"}]}')),
    "a response": (b"/v1/responses", answers(b'{"object":"response","status":"cancelled","output":[]}')),
    "an error": (b"/v1/chat/completions", answers(STOPPING, b"500 Internal Server Error")),
    "a response's error": (b"/v1/responses", answers(STOPPING, b"500 Internal Server Error")),
    "an error of a dead core": (b"/v1/chat/completions", answers(DEAD, b"500 Internal Server Error")),
    "a message's error of a dead core": (b"/v1/messages", answers(DEAD, b"500 Internal Server Error")),
    "a message's error": (b"/v1/messages", answers(STOPPING, b"500 Internal Server Error")),
}


@pytest.mark.parametrize(("path", "script"), GIVEN_UP.values(), ids=GIVEN_UP)
@pytest.mark.parametrize("engines", [1, 2])
async def test_where_every_engine_is_being_stopped_clients_are_told_to_come_again(path, script, engines):
    """vLLM's way: an empty 200, or with --shutdown-timeout a 500 in Python's words. No client has anything."""
    async with stack(*[script] * engines) as s:
        status, headers, body = await s.ask(post(path=path))
        assert status == 503 and headers["retry-after"] == "1" and "x-should-retry" not in headers
        assert b"abort" in body and "aborted" in s.faults
        await eventually(lambda: s.metrics.requests.total(status="5xx") == 1)


PATHS = "chat/completions completions responses messages embeddings rerank".split()
ASKS = {"model": "m", "prompt": "a", "input": "a", "messages": [], "query": "a", "documents": []}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("engines", "attempts"), [(1, 1), (2, 2), (4, 3)])
async def test_where_the_ports_of_all_engines_just_closed_clients_are_told_to_come_again(
    path, stream, engines, attempts
):
    """The replicas are ready as far as anybody has noticed."""
    async with stack(ports=[free_port() for _ in range(engines)]) as s:
        status, headers, body = await s.ask(post({**ASKS, "stream": stream}, path=f"/v1/{path}".encode()))
        assert status == 503 and headers["retry-after"] == "1" and "x-should-retry" not in headers
        error, is_message = json.loads(body)["error"], path == "messages"
        assert error["type"] == ("overloaded_error" if is_message else "server_error")
        assert is_message or error["code"] == "no_replica_ready"
        assert f"after {attempts} attempt(s)" in error["message"]


STREAMED = BODY[:-1] + b', "stream": true}'


class Ending:
    """An engine whose streams go on. It answers one request, reads the next one on that connection, closes the
    connection and listens no more."""

    async def __aenter__(self):
        self.goes_on = asyncio.Event()
        self.server = await asyncio.start_server(self.script, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def script(self, reader, writer):
        _, body = await read_request(reader)
        if body == STREAMED:
            writer.write(SSE_HEAD + chunk(EVENT))
            await self.goes_on.wait()
            writer.write(ENDS)
        else:
            writer.write(reply())
            await read_request(reader)
            self.server.close()
        writer.close()


async def test_the_only_engine_that_closes_its_port_and_then_a_kept_connection_is_away():
    async with Ending() as engine, stack(ports=[engine.port]) as s:
        talk = await s.talk()
        for expected in (200, 503):
            status, headers, _ = await talk.ask(post())
            assert status == expected
        assert headers["retry-after"] == "1" and s.metrics.retries.total(reason="reconnect") == 1


async def test_engines_that_close_their_ports_and_go_on_with_streams_did_not_go_down_with_what_they_refuse():
    """Two that went down with a request would be the last that it gets."""
    async with Ending() as one, Ending() as other, stack(ports=[one.port, other.port]) as s:
        talkers = []
        for body in (STREAMED, STREAMED, BODY, BODY):
            talkers.append(talk := await s.talk())
            await talk.say(post(body))
            await (talk.until(EVENT) if body is STREAMED else talk.response())
        status, headers, body = await talk.ask(post())
        assert status == 503 and headers["retry-after"] == "1" and "x-should-retry" not in headers, body
        assert s.faults == ["connect", "connect"] and s.metrics.retries.total(reason="reconnect") == 2
        for engine in (one, other):
            engine.goes_on.set()
        for talk in talkers[:2]:
            assert b"[DONE]" in await talk.until(b"0\r\n\r\n")


@pytest.mark.parametrize("padding", [0, 100_000], ids=["at once", "in a thread"])
async def test_a_bug_in_looking_for_the_model_ends_the_request_with_an_answer(padding, monkeypatch, caplog):
    async with stack(answers()) as s:
        monkeypatch.setattr(preparation, "named_model", lambda *_: 1 / 0)
        status, _, _ = await s.ask(post(b"{}" + b" " * padding, path=b"/v1/rerank"))
        assert status == 500 and "ZeroDivisionError" in caplog.text


async def test_a_request_stays_where_it_is_only_waited_for():
    async with stack(silent, answers(), ends_idle=False) as s:
        await s.say(post())
        exchange = await s.exchange()
        s.proxy.sweep(exchange.attempt.sent_at + 4.9)
        assert s.metrics.retries.total() == 0 and s.faults == []


@pytest.mark.parametrize("evil", [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", b"evil", b"\r\n"])
@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 2\r\n\r\nok",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"Content-Length: 2\r\nConnection: close\r\n\r\nok",
    ],
)
async def test_bytes_after_the_end_of_an_answer_never_reach_another_request(framing, evil):
    async with stack(says(b"HTTP/1.1 200 OK\r\n" + framing + evil)) as s:
        status, _, body = await s.ask(post())
        # of chunks it can't be told where the last one ends, so such an answer counts as broken
        broken = status == 502 and framing.startswith(b"Transfer") and b"evil" not in body
        assert broken or (status, body) == (200, b"ok")
        await eventually(s.idle)
        assert not any(backend.pool.idle for backend in s.proxy.backends.values())


async def test_no_first_byte_in_time_is_a_504():
    async with stack(silent, request_timeout=0.2) as s:
        status, _, body = await s.ask(post())
        assert (status, json.loads(body)["error"]["code"]) == (504, "replica_timeout")
        assert s.faults == ["timeout"]


async def test_what_is_refused_without_asking_a_replica_is_counted_by_its_reason():
    async with stack(answers()) as s:
        talk = await s.talk()
        for request, reason in (
            (post(path=b"/sleep"), "path_not_allowed"),
            (post(b'{"model": "other", "prompt": "x"}', b"/v1/completions"), "model_not_found"),
            (post().replace(b"POST", b"PUT", 1), "405"),
            (post(b"no JSON"), "400"),
        ):
            status, _, _ = await talk.ask(request)
            assert 400 <= status < 500 and s.metrics.rejections.values == {(reason,): 1}, request
            s.metrics.rejections.values.clear()
        assert (await talk.ask(post()))[0] == 200 and not s.metrics.rejections.values
        for backend in s.proxy.backends.values():
            backend.replica.state = State.FAILED
        s.proxy.changed()
        status, headers, body = await talk.ask(post())
        assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "1", "no_replica_ready")
        assert s.metrics.rejections.values == {("no_replica_ready",): 1}


async def test_while_draining_new_work_gets_503_on_old_connections_and_health_says_so():
    async with stack(answers()) as s:
        talk = await s.talk()
        await talk.ask(post())
        s.proxy.drain()
        status, headers, _ = await talk.ask(post())
        assert status == 503 and headers["retry-after"]
        status, headers, body = await s.ask(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
        assert "x-hitherto" in " ".join(headers), "by it another gateway knows this one"


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages"])
async def test_an_upload_that_a_stop_comes_before_is_answered_in_its_clients_format(path):
    async with stack(answers()) as s:
        talk = await s.say(post(path=path)[:-5])
        await eventually(lambda: s.server.held)
        s.proxy.drain()
        await s.server.drain(0)
        ended = asyncio.ensure_future(s.server.end())
        status, headers, body = await talk.response()
        error = json.loads(body)["error"]
        assert (status, headers["retry-after"]) == (503, "1") and "shutting down" in error["message"]
        assert error.get("code") == ("shutting_down" if path == b"/v1/chat/completions" else None)
        assert error["type"] == ("server_error" if path == b"/v1/chat/completions" else "overloaded_error")
        assert s.metrics.rejections.values == {("shutting_down",): 1}
        await talk.close()
        assert await ended == 0


async def test_a_replica_removed_under_a_request_lets_it_end_and_leaves_no_trace():
    go = asyncio.Event()

    async with stack(says(reply(USAGE)[:-10], go, reply(USAGE)[-10:]), answers()) as s:
        talk = await s.say(post(LONG))
        await talk.until(b"\r\n\r\n")
        (exchange,) = s.proxy.exchanges
        gone = s.proxy.remove(exchange.attempt.backend.id)
        s.metrics.forget(gone.id)
        go.set()
        await talk.until(b"}}}")
        await eventually(s.idle)
        assert not gone.pool.idle
        assert gone.id not in str(s.metrics.replica_requests.values)
        assert (await talk.ask(post()))[0] == 200


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
            await eventually(lambda: len(s.proxy.exchanges) == 1)
            (exchange,) = s.proxy.exchanges
            s.proxy.remove(exchange.attempt.backend.id)
            assert [(await talk.response())[0] for talk in talks] == [200, 200]
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize("padding", [0, 100_000], ids=["at once", "in a thread"])
async def test_a_bug_in_preparing_routes_a_request_by_load_among_the_replicas_of_its_model(
    padding, monkeypatch, caplog
):
    async with stack(answers(), answers()) as s:
        other, own = s.proxy.backends.values()
        other.replica.models = {"other": None}
        s.proxy.changed()
        monkeypatch.setattr(s.proxy.models.routes, "prepare", lambda *_: 1 / 0)
        talk = await s.talk()
        for _ in range(3):
            status, headers, _ = await talk.ask(post(BODY[:-1] + b',"pad":"' + b"x" * padding + b'"}'))
            assert (status, headers["x-hitherto-replica"]) == (200, own.id)
        assert s.metrics.prompt_failures.total() == 3 and "ZeroDivisionError" in caplog.text
        assert (await talk.ask(post(BODY.replace(b'"m"', b'"nobody"') + b" " * padding)))[0] == 404


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
        assert (await talk.ask(post(b"x" * 30_000_000, path=b"/v1/audio/transcriptions")))[0] == 413
        assert (await talk.ask(post()))[0] == 200
        assert s.faults == []


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
        assert (await talk.ask(raw[80:]))[0] == 200
        assert s.faults == []


@pytest.mark.parametrize("number", [b"9" * 4300, b'"%b"' % (b"9" * 4301), b"1e308"])
async def test_a_number_that_no_engine_could_hold_is_refused_before_a_replica_is_asked(number):
    seen = []
    async with stack(answers(seen=seen)) as s:
        talk = await s.talk()
        for path in (b"/v1/chat/completions", b"/v1/messages"):
            status, _, body = await talk.ask(post(BODY[:-1] + b', "max_tokens": %b}' % number, path))
            error = json.loads(body)
            assert status == 400 and "64 bits" in error["error"]["message"]
            assert (error.get("type") == "error") is (path == b"/v1/messages")
        assert not seen and not s.faults


def fails(*_):
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("bug", ["learning", "a listener"])
async def test_every_end_is_told_to_all_whatever_fails_at_it(monkeypatch, bug):
    """Limits and logs count on that."""

    told = []
    async with stack(answers()) as s:
        listeners = (lambda exchange, outcome, usage: told.append(outcome),)
        monkeypatch.setattr(s.proxy.settling, "on_end", [fails, *listeners] if bug == "a listener" else listeners)
        if bug == "learning":
            monkeypatch.setattr(s.proxy.settling, "_settle", fails)
        assert (await s.ask(post()))[0] == 200
        await eventually(lambda: told == ["complete"] and s.idle())
        assert s.metrics.requests.total() == 1


@pytest.mark.parametrize("head", [SSE_HEAD, SSE_HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 1000")])
async def test_a_bug_while_an_answer_is_under_way_writes_no_second_one_into_it(monkeypatch, caplog, head):
    monkeypatch.setattr("gateway.proxy.failures.actions.ends_with_event", fails)
    async with stack(says(head + chunk(EVENT), then_hangs=False)) as s:
        talk = await s.say(post())
        assert (await talk.rest()).partition(b"\r\n\r\n")[2] == chunk(EVENT)
        assert "an answer that was under way made the gateway fail" in caplog.text


async def test_a_bug_behind_the_end_of_an_answer_leaves_the_next_one_alone(caplog):
    ends, goes_on = asyncio.Event(), asyncio.Event()
    async with stack(says(ends, reply(), NEXT, goes_on, reply())) as s:
        talk = await s.say(post())
        await eventually(lambda: s.proxy.exchanges)
        (first,) = s.proxy.exchanges
        ends.set()
        await talk.response()
        await eventually(s.idle)
        await talk.say(post())
        await eventually(lambda: s.proxy.exchanges)
        first.run_isolated(fails)
        goes_on.set()
        assert (await talk.response())[2] == ANSWER and "a bug" in caplog.text


async def test_what_takes_long_because_the_event_loop_was_held_up_teaches_nothing(monkeypatch):
    first, second, taught = asyncio.Event(), asyncio.Event(), []

    stream = SSE_HEAD + chunk(EVENT) + ENDS
    async with stack(says(first, stream, NEXT, second, stream)) as s:
        monkeypatch.setattr(Costs, "observe_ttft", lambda self, *seen: taught.append(seen))
        talk = await s.say(post(LONG))
        await s.exchange()
        time.sleep(0.9)
        await eventually(lambda: s.proxy.pulse.ended > 0)
        first.set()
        assert (await talk.response())[0] == 200 and not taught
        await talk.say(post(LONG))
        second.set()
        assert (await talk.response())[0] == 200 and len(taught) == 1
        assert not s.faults


async def test_a_connection_to_where_a_replica_was_carries_no_request_any_more():
    async with stack(answers()) as s:
        (backend,) = s.proxy.backends.values()
        before, opening = backend.pool, []
        before.connect = lambda *asked: opening.append(asked)
        talk = await s.say(post())
        await eventually(lambda: opening)
        backend.replica.address = "localhost"
        backend.follow_incarnation()
        type(before).connect(before, *opening[0])
        assert (await talk.response())[0] == 200
        await eventually(lambda: backend.pool.idle)


async def test_answers_are_told_of_before_a_failure_those_of_siblings_too():
    """A failure is compared with what an engine's other ranks and its siblings answered before it. Before a probe
    counts, those of its replica alone are told of."""
    async with stack(answers(), answers()) as s:
        told, (one, other), settling = [], s.proxy.backends.values(), s.proxy.settling
        settling.on_traffic = lambda *given: told.append(given)
        await s.answered(4, post())
        settling.tell(one, "closed")
        assert told == [(one.id, None, 2), (other.id, None, 2), (one.id, "closed", 1)]
        told.clear()
        await s.answered(2, post())
        settling.tell_answers(one.id)
        assert told == [(one.id, None, 1)]
        settling.tell_answers("unknown")
        settling.tell_answers()
        assert told[1:] == [(other.id, None, 1)]


async def test_a_bug_that_shows_once_the_shared_ledger_has_decided_ends_the_request_with_an_answer(caplog):
    class Shared:
        joined = True

        def decide(self, evaluation, answer):
            asyncio.get_running_loop().call_soon(answer, None)

    async with stack(answers(), request_timeout=60.0) as s:
        s.proxy.placing.shared, s.proxy.router.placed = Shared(), fails
        assert (await s.ask(post()))[0] == 500 and "a bug" in caplog.text


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
async def test_a_gateway_without_descriptors_says_so_and_blames_no_replica(number, monkeypatch):
    async def create_connection(*_, **__):
        raise OSError(number, os.strerror(number))

    async with stack(answers(), answers()) as s:
        talk = await s.talk()
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", create_connection)
        status, headers, body = await talk.ask(post())
        error = json.loads(body)["error"]
        assert (status, error["code"], headers["retry-after"]) == (503, "gateway_full", "1")
        assert "the gateway itself cannot open connections" in error["message"]
        assert s.faults == ["own"] and s.metrics.retries.total() == s.metrics.upstream_errors.total() == 0
        await eventually(s.idle)
        monkeypatch.undo()
        assert (await talk.ask(post()))[0] == 200


async def test_a_replica_that_cannot_be_looked_at_for_want_of_descriptors_is_not_blamed():
    async with stack(answers()) as s:
        (backend,) = s.proxy.backends.values()

        async def prove(_):
            backend.replica.fault, backend.replica.reason = "own", "the gateway itself cannot open connections"
            return False

        backend.prove, backend.replica.proof = prove, SimpleNamespace(is_closing=lambda: True)
        assert b"gateway_full" in (await s.ask(post()))[2] and s.faults == ["own"]


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"])
async def test_a_stream_that_the_gateways_own_end_cuts_is_told_so_and_blames_no_replica(path, caplog):
    caplog.set_level("INFO", "hitherto.access")
    event = {b"/v1/chat/completions": EVENT}.get(path, b'data: {"type":"content_block_delta","delta":{"text":"x"}}\n\n')
    never = asyncio.Event()
    async with stack(streams(chunk(event), pause=never.wait), on_end=[_access]) as s:
        (backend,) = s.proxy.backends.values()
        talk = await s.say(post(path=path, extra=b"X-Request-Id: mine\r\n"))
        await talk.until(chunk(event))
        assert s.proxy.requests_at({backend.id}) == ["mine"] and s.proxy.requests_at({"another"}) == []
        s.proxy.drain()
        assert (s.proxy.refuse_unanswered(), s.proxy.end_streams()) == (0, 1)
        told = await talk.until(b"0\r\n\r\n")
        assert b"the answer broke off: the gateway is shutting down" in told and b"[DONE]" not in told
        error = json.loads(told.rpartition(b"data: ")[2].partition(b"\n")[0])["error"]
        assert error.get("code") == (None if path == b"/v1/messages" else "shutting_down")
        assert error["type"] == ("overloaded_error" if path == b"/v1/messages" else "server_error"), "as of the 503"
        assert _access_line(caplog) == ("cut", "shutting_down", "the gateway is shutting down")
        assert s.faults == [] and s.metrics.upstream_errors.total() == 0 and s.metrics.requests.total(status="cut") == 1
        assert await s.server.end() == 0 and s.idle()


@pytest.mark.parametrize("begun", [False, True])
async def test_an_answer_in_one_piece_that_the_gateways_own_end_cuts_or_refuses_has_the_reason_in_its_line(
    begun, caplog
):
    caplog.set_level("INFO", "hitherto.access")
    asked, never = asyncio.Event(), asyncio.Event()

    async with stack(says(reply()[:-1] if begun else b"", asked.set, never), on_end=[_access]) as s:
        talk = await s.say(post())
        await asyncio.wait_for(asked.wait(), 5)
        if begun:
            await talk.until(ANSWER[:-1])
        s.proxy.drain()
        assert (s.proxy.refuse_unanswered(), s.proxy.end_streams()) == (int(not begun), 0)
        assert await s.server.end() == int(begun) and s.idle()
        outcome, reason, error = _access_line(caplog)
        assert (outcome, reason) == ("cut" if begun else "refused", "shutting_down") and "shutting down" in error


async def test_the_line_of_a_request_that_was_moved_names_the_replicas_that_failed_it(caplog):
    caplog.set_level("INFO", "hitherto.access")

    async with stack(says(b"", then_hangs=False), answers(), on_end=[_access]) as s:
        first, second = s.proxy.backends
        talk = await s.talk()
        while not any(getattr(one, "fields", {}).get("moved_from") for one in caplog.records):
            caplog.clear()
            assert (await talk.ask(post()))[0] == 200
        (record,) = [one for one in caplog.records if one.name == "hitherto.access"]
        assert record.fields["replica"] == second and record.fields["moved_from"].startswith(f"{first}: ")


def _access_line(caplog) -> tuple[str, str | None, str | None]:
    (record,) = [one for one in caplog.records if one.name == "hitherto.access"]
    return record.fields["outcome"], record.fields["reason"], record.fields["error"]
