"""One exchange between real sockets, where all goes well: what passes and how it is told."""

import asyncio
import gzip
import json
import re

import pytest

from gateway.http.messages import Limits
from gateway.prompt.pipeline import Pipeline
from gateway.proxy import placing
from replicas import Replica, State
from replicas.simulated.model import sim_model_dir

from ..http.talk import eventually, read_request
from .replies import ANSWER, BODY, EVENT, LONG, SSE_HEAD, USAGE, answers, chunk, post, says, streams
from .stack import backend_for, stack


async def test_a_plain_answer_passes_and_says_where_it_came_from():
    seen = []
    async with stack(answers(seen=seen), cached_tokens_header=True) as s:
        talk = await s.talk()
        await talk.say(
            post(extra=b"Authorization: Bearer secret\r\nX-Custom: 1\r\nConnection: x-gone\r\nX-Gone: 1\r\n")
        )
        status, headers, body = await talk.response()
        assert (status, body) == (200, ANSWER)
        assert headers["x-hitherto-replica"] in s.proxy.backends
        assert headers["x-hitherto-cached-tokens"] == "0"
        assert headers["x-request-id"]
        head, sent = seen[0]
        assert sent == BODY
        assert b"authorization: Bearer secret\r\n" in head and b"x-custom: 1\r\n" in head
        assert b"x-gone" not in head and b"connection" not in head
        assert b"client.example" not in head and b"host: 127.0.0.1:" in head
        await eventually(s.idle)


@pytest.mark.parametrize("body", [BODY, LONG], ids=["short", "long"])
async def test_a_stranger_is_not_told_whether_a_prompt_was_asked_before(body):
    async with stack(answers()) as s:
        talk, told = await s.talk(), []
        for _ in range(2):
            await talk.say(post(body))
            _, headers, _ = await talk.response()
            told.append({name: value for name, value in headers.items() if name != "x-request-id"})
        assert told[0] == told[1] and "x-hitherto-replica" in told[0] and "x-hitherto-cached-tokens" not in told[0]


async def test_the_clients_request_id_is_kept():
    seen = []
    async with stack(answers(seen=seen)) as s:
        talk = await s.talk()
        await talk.say(post(extra=b"X-Request-Id: mine-1\r\n"))
        assert (await talk.response())[1]["x-request-id"] == "mine-1"
        assert seen[0][0].count(b"x-request-id: mine-1\r\n") == 1


async def test_an_empty_request_id_is_none():
    seen = []
    async with stack(answers(seen=seen)) as s:
        talk = await s.talk()
        await talk.say(post(extra=b"X-Request-Id:\r\n"))
        _, headers, _ = await talk.response()
    assert re.findall(rb"(?i)x-request-id: *(.*)\r", seen[0][0]) == [headers["x-request-id"].encode()]
    assert headers["x-request-id"]


@pytest.mark.parametrize("named", [b"X-Request-Id: mine-1\r\n", b""], ids=["the client's", "the gateway's"])
async def test_an_id_that_connection_names_reaches_the_engine_as_the_gateways_own(named):
    seen = []
    async with stack(answers(seen=seen)) as s:
        talk = await s.talk()
        await talk.say(post(extra=b"Connection: X-Request-Id\r\n" + named))
        _, headers, _ = await talk.response()
    assert re.findall(rb"(?i)x-request-id: *(.*)\r", seen[0][0]) == [headers["x-request-id"].encode()]
    assert headers["x-request-id"] == "mine-1" or not named
    assert b"connection" not in seen[0][0].lower()


async def test_a_model_whose_only_replica_is_away_is_not_unknown():
    async with stack(answers(), answers()) as s:
        other, away = s.proxy.backends.values()
        away.replica.models = {"away": None}
        s.proxy.changed()
        away.replica.state, away.replica.models = State.FAILED, {}
        s.proxy.changed()
        talk = await s.talk()
        for model, status in (("away", 503), ("none", 404)):
            await talk.say(post(BODY.replace(b'"m"', b'"%b"' % model.encode())))
            assert (await talk.response())[0] == status
        s.proxy.remove(away.id)
        await talk.say(post(BODY.replace(b'"m"', b'"away"')))
        assert (await talk.response())[0] == 404 and s.proxy.eligible.names == other.replica.models


async def test_a_model_that_only_a_degraded_replica_serves_is_listed_with_its_adapters():
    """Its prompts go there, so an adapter's blocks have to be told from the model's own."""
    async with stack(answers(), answers()) as s:
        ready, degraded = (one.replica for one in s.proxy.backends.values())
        ready.models = {"m": None, "both": None}
        degraded.models = {"other": None, "red": "other", "both": "other"}
        degraded.state = State.DEGRADED
        s.proxy.changed()
        talk = await s.talk()
        await talk.say(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        _, _, told = await talk.response()
        listed = {one["id"]: one["parent"] for one in json.loads(told)["data"]}
        assert listed == {"m": None, "both": None, "other": None, "red": "other"}
        assert s.proxy.eligible.adapters == {"red"}
        await talk.say(post(BODY.replace(b'"m"', b'"red"')))
        status, headers, _ = await talk.response()
        assert (status, headers["x-hitherto-replica"]) == (200, degraded.id)


async def test_a_model_whose_pod_went_is_waited_for_for_a_while(monkeypatch):
    async with stack(answers(), answers(), answers()) as s:
        _, first, second = (one.replica for one in s.proxy.backends.values())
        first.models, second.models = {"away": None, "red": "away"}, {"removed": None}
        s.proxy.changed()
        first.models = {}  # its engine went first
        s.proxy.changed()
        s.proxy.eligible.expect_back([first])
        for replica in (first, second):
            s.proxy.remove(replica.id)
        said = r"no replica of 'away' is ready \(a pod of it went \d+ s ago\)"
        assert all(
            status == 503 and re.fullmatch(said, why) and later == "1"
            for status, why, later in await refusals(s, b"away")
        )
        talk = await s.talk()
        for model, status in ((b"red", 503), (b"away", 503), (b"removed", 404)):
            await talk.say(post(b'{"model":"%b","query":"x","documents":["y"]}' % model, b"/v1/rerank"))
            assert (await talk.response())[0] == status, model
        monkeypatch.setattr(placing, "EXPECTED_SECONDS", 0.0)
        assert {status for status, *_ in await refusals(s, b"away")} == {404}


async def test_a_pod_that_went_is_waited_for_though_an_operator_removed_another_of_its_model():
    """In a rollout the next pod is found a place first, and the operator spoke of the other replica alone."""
    async with stack(answers(), answers(), answers()) as s:
        _, pod, broken = (one.replica for one in s.proxy.backends.values())
        pod.models = broken.models = {"away": None}
        s.proxy.changed()
        s.proxy.eligible.expect_back([pod])
        for replica in (pod, broken):
            s.proxy.remove(replica.id)
        assert {status for status, *_ in await refusals(s, b"away")} == {503}


async def test_a_model_is_missed_from_when_its_last_pod_goes_until_a_replica_serves_it(monkeypatch):
    monkeypatch.setattr(placing, "EXPECTED_SECONDS", 0.0)
    async with stack(answers(), answers(), answers()) as s:
        eligible, (_, first, last) = s.proxy.eligible, (one.replica for one in s.proxy.backends.values())
        first.models = last.models = {"away": None}
        s.proxy.changed()
        eligible.expect_back([first])
        s.proxy.remove(first.id)
        assert not eligible.missing(), "another replica serves it"
        last.state = State.FAILED
        s.proxy.changed()
        assert not eligible.missing(), "another replica served it"
        last.state = State.READY
        eligible.expect_back([last])
        last.state = State.DRAINING
        s.proxy.changed()
        assert not eligible.missing(), "a replica that leaves still answers"
        s.proxy.remove(last.id)
        assert eligible.missing() == ["away"] == [*eligible.names_waited_for()["gone"]]
        last = backend_for(s.proxy, last.port, ("away",)).replica
        s.proxy.changed()
        assert not eligible.missing()
        s.proxy.remove(last.id)
        assert not eligible.missing(), "an operator removed it"


async def test_another_process_waits_for_the_models_that_this_one_waits_for(monkeypatch):
    async with stack(answers(), answers(), answers()) as s:
        _, gone, drained = (one.replica for one in s.proxy.backends.values())
        gone.models, drained.models = {"gone": None}, {"drained": None}
        s.proxy.changed()
        s.proxy.eligible.expect_back([gone])
        s.proxy.remove(gone.id)
        drained.state = State.STOPPED
        told = json.loads(json.dumps(s.proxy.eligible.names_waited_for()))
    replicas = {drained.id: away(drained.port, State.STOPPED)}
    async with stack(answers(), replicas=replicas) as s:
        eligible = s.proxy.eligible
        eligible.wait_for_gone(told["gone"], told["unserved"])
        assert eligible.missing() == ["gone"]
        eligible.served_before(drained.id, told["served"][drained.id])
        s.proxy.changed()
        for model, waited_for in ((b"gone", r"a pod of it went \d+ s ago"), (b"drained", f"{drained.id} is stopped")):
            for status, said, _ in await refusals(s, model):
                assert status == 503 and re.search(waited_for, said)
        assert {status for status, *_ in await refusals(s, b"none")} == {404}
        replicas.clear()  # an operator has removed it
        monkeypatch.setattr(placing, "EXPECTED_SECONDS", 0.0)
        for model in (b"gone", b"drained"):
            assert {status for status, *_ in await refusals(s, model)} == {404}
        assert eligible.gone() == {}


async def test_of_pods_that_went_the_latest_names_are_kept(monkeypatch):
    monkeypatch.setattr(placing, "MOST_LEFT", 2)
    async with stack(answers()) as s:
        for model in ("one", "two", "one", "three"):
            s.proxy.eligible.expect_back([away(9, models={}, required_model=model)])
        found = {model: {status for status, *_ in await refusals(s, model)} for model in (b"one", b"two", b"three")}
        assert found == {b"one": {503}, b"two": {404}, b"three": {503}}


def away(port: int, state: State = State.FAILED, **facts) -> Replica:
    name = f"127.0.0.1:{port}"
    return Replica(name, f"http://{name}", "127.0.0.1", port, state=state, reason="nothing listens there", **facts)


async def refusals(s, model: bytes) -> set[tuple[int, str, str | None]]:
    """How a request for this model is refused in each API, and where its description is asked for."""
    talk, found = await s.talk(), set()
    chat, text = b'{"model":"%b","messages":[{"role":"user","content":"x"}]}', b'{"model":"%b","input":"x"}'
    for path, body in (
        (b"/v1/chat/completions", chat),
        (b"/v1/completions", b'{"model":"%b","prompt":"x"}'),
        (b"/v1/responses", text),
        (b"/v1/messages", chat[:-1] + b',"max_tokens":1}'),
        (b"/v1/embeddings", text),
        (b"/v1/models/" + model, None),
    ):
        await talk.say(post(body % model, path) if body else b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
        status, headers, told = await talk.response()
        found.add((status, json.loads(told)["error"]["message"], headers.get("retry-after")))
    return found


async def test_a_model_is_not_unknown_while_a_replica_has_not_told_what_it_serves():
    replicas = {}
    async with stack(answers(), replicas=replicas) as s:
        served_here = "(served here: m)"
        for state in (State.STARTING, State.WARMING, State.FAILED):
            replicas["late"] = away(9, state)
            told = f"these have not told their models yet: 127.0.0.1:9 is {state}: nothing listens there"
            assert await refusals(s, b"late") == {
                (503, f"no replica is known to serve 'late' {served_here}, but {told}", "1")
            }
        for state in (State.DRAINING, State.STOPPED):  # on purpose: nobody waits for it
            replicas["late"] = away(9, state)
            ((status, message, again),) = await refusals(s, b"late")
            assert (status, again) == (404, None) and message == "the model 'late' does not exist; served here: m"
        replicas["late"] = away(9, State.WARMING, models={"another": None}, required_model="late")
        ((status, message, _),) = await refusals(s, b"none")  # it has told
        assert status == 404
        del replicas["late"]
        s.proxy.eligible.unlisted = lambda: "the pods are not known: not asked yet"
        ((status, message, _),) = await refusals(s, b"late")
        assert status == 503 and message.endswith("told their models yet: the pods are not known: not asked yet")


async def test_what_is_only_passed_on_reaches_no_engine_while_another_may_serve_its_model():
    replicas, seen = {}, []
    async with stack(answers(seen=seen), replicas=replicas) as s:
        talk = await s.talk()

        async def rerank() -> int:
            await talk.say(post(b'{"model":"late","query":"x","documents":["y"]}', b"/v1/rerank"))
            return (await talk.response())[0]

        assert await rerank() == 404, "as of a prompt that is read"
        replicas["late"] = away(9)
        assert await rerank() == 503
        del replicas["late"]
        s.proxy.eligible.unlisted = lambda: "the pods are not known: not asked yet"
        assert await rerank() == 503 and not seen


async def test_a_model_that_a_replica_has_to_serve_is_not_unknown():
    asked = []

    async def ask():
        asked.append(True)

    replicas = {"named": away(9, required_model="named"), "other": away(10, required_model="other")}
    async with stack(answers(), replicas=replicas, ask_models=ask) as s:
        ready = s.proxy.eligible.names
        said = "no replica of 'named' is ready (127.0.0.1:9 is failed: nothing listens there)"
        assert await refusals(s, b"named") == {(503, said, "1")}
        assert not asked and ready == {"m": None}, "what is certain needs no question"
        replicas["named"].state, replicas["named"].models = State.WARMING, {"another": None}
        assert {status for status, *_ in await refusals(s, b"named")} == {503}
        del replicas["other"]
        replicas["named"].models = {}
        for state in (State.DRAINING, State.STOPPED):  # on purpose, and it has never served it
            replicas["named"].state = state
            assert {(status, again) for status, _, again in await refusals(s, b"named")} == {(404, None)}


async def test_a_replica_that_tells_no_names_may_serve_any_while_it_is_away():
    replicas = {}
    async with stack(answers(), replicas=replicas) as s:
        known = backend_for(s.proxy, 9).replica
        locked = backend_for(s.proxy, 10, models=()).replica
        replicas |= {known.id: known, locked.id: locked}
        known.state = locked.state = State.FAILED
        known.models = {}
        s.proxy.changed()
        ((status, message, _),) = await refusals(s, b"any")
        assert status == 503 and "127.0.0.1:10 is failed" in message and "127.0.0.1:9 " not in message


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


async def test_interim_responses_stay_between_replica_and_gateway():
    async with stack(
        says(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    ) as s:
        talk = await s.talk()
        await talk.say(post())
        status, headers, body = await talk.response()
        assert (status, body) == (200, b"ok") and "link" not in headers


async def test_hop_by_hop_headers_of_the_replica_are_stripped():
    async with stack(
        answers(headers=b"Connection: keep-alive, X-Hop\r\nKeep-Alive: timeout=5\r\nX-Hop: 1\r\nX-End: 2\r\n")
    ) as s:
        talk = await s.talk()
        await talk.say(post())
        _, headers, _ = await talk.response()
        assert headers["x-end"] == "2"
        assert not {"connection", "keep-alive", "x-hop"} & set(headers)


async def test_head_passes_without_a_body_and_the_connection_lives_on():
    async def script(reader, writer):
        while True:
            head, _ = await read_request(reader)
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + (b"" if head.startswith(b"HEAD") else b"hello")
            )

    async with stack(script) as s:
        talk = await s.talk()
        await talk.say(b"HEAD /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"content-length: 5" in (await talk.until(b"\r\n\r\n")).lower()
        await talk.say(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
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
        await talk.say(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + chunk(BODY[:7])
            + chunk(BODY[7:])
            + b"0\r\n\r\n"
        )
        assert (await talk.response())[0] == 200
        head, body = seen[0]
        assert body == BODY and b"transfer-encoding" not in head


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (post(b"{broken"), 400, None),
        (post(gzip.compress(BODY), extra=b"Content-Encoding: gzip\r\n"), 415, "unsupported_media_type"),
        (post(b"[]"), 400, None),
        (post(json.dumps({"model": "nope", "messages": []}).encode()), 404, "model_not_found"),
        (b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
        (b"TRACE /version HTTP/1.1\r\nHost: x\r\n\r\n", 405, "method_not_allowed"),
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


async def test_the_place_of_a_bad_byte_is_its_own():
    body = b'{"model": "m", "messages": [{"role": "user", "content": "' + "grün ".encode() * 20 + b'\xff"}]}'
    async with stack(answers()) as s:
        talk = await s.talk()
        await talk.say(post(body))
        _, _, got = await talk.response()
        where = body.index(b"\xff")
        assert json.loads(got)["error"]["message"] == f"the body is not valid JSON: byte {where} is not utf-8"


async def test_a_body_without_a_coding_says_so_in_vain():
    async with stack(answers()) as s:
        talk = await s.talk()
        await talk.say(post(extra=b"Content-Encoding: identity\r\n"))
        assert (await talk.response())[0] == 200


async def test_a_model_is_told_of_its_own_replicas_alone():
    async with stack() as s:
        own, other = backend_for(s.proxy, 9, ("m",)), backend_for(s.proxy, 10, ("n",))
        own.replica.state, own.replica.reason = State.FAILED, "exit code 1"
        s.proxy.eligible._replicas = {one.id: one.replica for one in (own, other)}
        s.proxy.changed()
        talk = await s.talk()
        await talk.say(post(json.dumps({"model": "m", "messages": []}).encode()))
        status, _, body = await talk.response()
        message = json.loads(body)["error"]["message"]
        assert status == 503 and message == f"no replica of 'm' is ready ({own.id} is failed: exit code 1)"
        assert other.id not in message


async def test_models_are_asked_for_in_vain_until_a_replica_is_ready():
    async with stack(answers(), ports=()) as s:
        (backend,) = s.proxy.backends.values()
        backend.replica.state = State.STARTING
        s.proxy.changed()
        talk = await s.talk()
        await talk.say(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers, body = await talk.response()
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["message"].startswith("no replica is ready")


async def test_a_request_that_is_refused_is_no_answer_in_the_time_that_answers_take():
    async with stack(answers()) as s:
        (backend,) = s.proxy.backends.values()
        talk = await s.talk()
        for state, expected in ((State.STOPPED, 503), (State.READY, 200)):
            backend.replica.state = state
            s.proxy.changed()
            await talk.say(post())
            assert (await talk.response())[0] == expected
            await eventually(s.idle)
        assert sum(s.metrics.requests.values.values()) == 2
        assert sum(s.metrics.request_seconds.count(key) for key in s.metrics.request_seconds.series) == 1


async def test_models_of_replicas_that_want_a_key_are_told_to_those_who_bring_it():
    seen = []
    async with stack(answers(b'{"data":[{"id":"theirs"}]}', seen=seen)) as s:
        (backend,) = s.proxy.backends.values()
        backend.replica.models = {}
        s.proxy.changed()
        talk = await s.talk()
        await talk.say(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n\r\n")
        status, _, body = await talk.response()
        assert (status, body) == (200, b'{"data":[{"id":"theirs"}]}')
        assert b"authorization: Bearer k" in seen[0][0]


async def test_models_are_merged_over_replicas():
    async with stack(answers(), answers()) as s:
        first, second = s.proxy.backends.values()
        second.replica.models = {"m": None, "adapter": "m"}
        s.proxy.changed()
        talk = await s.talk()
        await talk.say(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        listed = json.loads((await talk.response())[2])["data"]
        assert [(one["id"], one["parent"]) for one in listed] == [("adapter", "m"), ("m", None)]


async def test_each_served_model_and_adapter_is_told_by_its_name():
    async with stack(answers()) as s:
        (backend,) = s.proxy.backends.values()
        backend.replica.models = {"org/m": None, "my adapter": "org/m"}
        s.proxy.changed()
        talk = await s.talk()
        for path, name in ((b"org/m", "org/m"), (b"org%2Fm?x=y", "org/m"), (b"my%20adapter", "my adapter")):
            await talk.say(b"GET /v1/models/%b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
            status, headers, body = await talk.response()
            told = json.loads(body)
            assert (status, told["id"], told["object"]) == (200, name, "model")
            assert headers["content-type"] == "application/json"
            await talk.say(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert told in json.loads((await talk.response())[2])["data"]
        for method, path, expected in (
            (b"GET", b"org", (404, "model_not_found")),
            (b"GET", b"%ff%00", (404, "model_not_found")),
            (b"DELETE", b"org/m", (405, "method_not_allowed")),
            (b"POST", b"org/m", (405, "method_not_allowed")),
        ):
            await talk.say(b"%b /v1/models/%b HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % (method, path))
            status, _, body = await talk.response()
            assert (status, json.loads(body)["error"]["code"]) == expected
        assert s.idle()


@pytest.mark.parametrize(("state", "code"), [(State.STARTING, "no_replica_ready"), (State.READY, "model_not_found")])
async def test_a_model_is_not_told_of_by_replicas_that_are_not_ready_or_want_a_key(state, code):
    seen = []
    async with stack(answers(seen=seen)) as s:
        (backend,) = s.proxy.backends.values()
        backend.replica.models, backend.replica.state = {}, state
        s.proxy.changed()
        talk = await s.talk()
        await talk.say(b"GET /v1/models/m HTTP/1.1\r\nHost: x\r\n\r\n")
        status, _, body = await talk.response()
        assert (status, json.loads(body)["error"]["code"]) == (503 if state is State.STARTING else 404, code)
        assert ("API key" in json.loads(body)["error"]["message"]) == (state is State.READY)
        assert not seen


async def test_what_has_no_prompt_passes_by_load_alone():
    seen = []
    async with stack(answers(seen=seen)) as s:
        talk = await s.talk()
        await talk.say(b"GET /version?x=%20y HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers, _ = await talk.response()
        assert status == 200 and "x-hitherto-cached-tokens" not in headers
        assert seen[0][0].startswith(b"GET /version?x=%20y HTTP/1.1\r\n")


async def test_usage_is_found_though_what_ends_the_stream_comes_apart_from_it():
    # As vLLM does: each its own write, often its own read
    end = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
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
        for body, compared in (
            (b'{"prompt":"a"}', 1),
            (b'{"prompt":"a","n":2}', 2),
            (b'{"prompt":["a","b"]}', 2),
            (b'{"prompt":"a"}', 3),
        ):
            await talk.say(post(body, path=b"/v1/completions"))
            assert (await talk.response())[0] == 200
            await eventually(s.idle)
            assert s.metrics.predictions.total() == compared


async def test_names_that_clients_make_up_are_not_kept():
    async with stack(answers()) as s:
        talk = await s.talk()
        for i in range(5):
            await talk.say(post(json.dumps({"model": f"{i}" + "x" * 100_000, "messages": []}).encode()))
            status, _, body = await talk.response()
            assert status == 404 and len(body) < 1000
        assert set(s.proxy.eligible._ready) <= {None, "m"}


async def test_a_request_there_is_no_room_for_is_refused_in_the_shape_of_its_api():
    async with stack(answers(), limits=Limits(requests_bytes=1000)) as s:
        talk = await s.talk()
        await talk.say(post(path=b"/v1/messages", extra=b"X-Request-Id: mine-1\r\n"))
        status, headers, body = await talk.response()
        assert status == 503 and json.loads(body)["type"] == "error"
        assert headers["x-request-id"] == "mine-1" and headers["retry-after"] == "1"


@pytest.mark.parametrize("target", [b"/v1/messages", b"http://gateway.example/v1/messages"])
async def test_errors_of_the_wire_have_the_shape_of_the_api_that_was_asked(target):
    async with stack(answers(), limits=Limits(body_bytes=10)) as s:
        talk = await s.talk()
        await talk.say(post(path=target))
        status, _, body = await talk.response()
        assert status == 413 and json.loads(body) == {
            "type": "error",
            "error": {"type": "request_too_large", "message": json.loads(body)["error"]["message"]},
        }


@pytest.mark.parametrize(
    ("line", "allow"),
    [
        (b"GET /v1/chat/completions", "POST, OPTIONS"),
        (b"POST /v1/models", "GET, HEAD"),
        (b"TRACE /version", "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"),
    ],
)
async def test_405_says_what_would_do(line, allow):
    async with stack(answers()) as s:
        talk = await s.talk()
        await talk.say(line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        status, headers, _ = await talk.response()
        assert (status, headers["allow"]) == (405, allow)


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
            return proxy.router.evaluate(
                proxy.placing.demand(prompt, 0.0), proxy.eligible.targets(prompt), 0.0
            ).candidates

        candidates = candidates_for(prompt)
        size = proxy.models.pipelines[0].block_size
        assert (candidates[0].overlap, candidates[0].lower) == (2 * size, (("cpu", (len(keys) - 2) * size),))
        assert candidates[1].lower == ()
        candidates = candidates_for(
            proxy.models.pipelines[0].prepare("/v1/chat/completions", LONG.replace(b"hi ", b"ho "))
        )
        assert candidates[0].lower == ()


async def test_a_replica_that_counts_other_tokens_is_told_of(caplog):
    pipeline = Pipeline(sim_model_dir(), "m", 16)
    async with stack(answers(USAGE), pipeline=pipeline) as s:  # counts 9, whatever it is sent
        talk = await s.talk()
        for prompt, found in (([1] * 9, 0), ([1] * 8, 1), ([[1], [2]], 1), ([1] * 10, 2), ([1] * 9, 2)):
            await talk.say(post(json.dumps({"prompt": prompt}).encode(), path=b"/v1/completions"))
            assert (await talk.response())[0] == 200
            await eventually(s.idle)
            assert s.metrics.prompt_mismatches.total() == found
    told = [record.message for record in caplog.records if "counted" in record.message]
    assert (
        len(told) == 1
        and "counted 9 prompt tokens where the gateway made 8" in told[0]
        and "--chat-template" in told[0]
    )


async def test_what_has_come_of_a_stream_is_context_of_its_replica_as_far_as_the_sweep_saw():
    go_on = asyncio.Queue()

    async def stream(reader, writer):
        await read_request(reader)
        writer.write(SSE_HEAD)
        while piece := await go_on.get():
            writer.write(piece)

    async with stack(stream) as s:
        talk = await s.talk()
        await talk.say(post())
        (load,) = (backend.candidate.load for backend in s.proxy.backends.values())
        for came in range(1, 6):
            go_on.put_nowait(chunk(EVENT))
            await eventually(lambda: any(x.attempt is not None and x.attempt.pieces == came for x in s.proxy.exchanges))
            (exchange,) = s.proxy.exchanges
            assert load.context_tokens == exchange.prompt.tokens + came - 1
            s.proxy.sweep(asyncio.get_running_loop().time())
            assert load.context_tokens == exchange.prompt.tokens + came
        go_on.put_nowait(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        assert (await talk.response())[0] == 200
        await eventually(s.idle)
