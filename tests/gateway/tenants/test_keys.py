"""Who is let in, what those see who are not, and what the engines get of the keys."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import socket

import pytest

from gateway.tenants.keys import CLIENT_KEYS, Keys
from replicas import Replica

from ..http.talk import eventually, free_port, read_request
from ..proxy.replies import BODY, EVENT, SSE_HEAD, answers, chunk, post, silent
from ..proxy.stack import stack

KEYS = {"one": "sk-one-0123456789", "two": "sk-two-0123456789"}


def entry(name: str, **fields) -> str:
    return "- " + json.dumps({"name": name, "sha256": hashlib.sha256(KEYS[name].encode()).hexdigest(), **fields})


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("\n".join([entry("one"), entry("two", models=["m2"], **{"class": "free"})]))
    return file


def bearer(name: str) -> bytes:
    return b"Authorization: Bearer %b\r\n" % KEYS[name].encode()


def get(path: bytes, extra=b"") -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: client.example\r\n%b\r\n" % (path, extra)


@pytest.mark.parametrize(
    "header",
    [
        bearer("one"),
        b"authorization: bearer %b\r\n" % KEYS["one"].encode(),
        b"X-Api-Key: %b\r\n" % KEYS["one"].encode(),
    ],
)
async def test_who_brings_a_key_is_answered(file, header):
    seen = []
    async with stack(answers(seen=seen), keys=Keys(file)) as s:
        assert (await s.ask(post(extra=header)))[0] == 200


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Authorization: Bearer sk-one-012345678\r\n",
        b"Authorization: Bearer \r\n",
        b"Authorization: %b\r\n" % KEYS["one"].encode(),
        b"Authorization: Basic %b\r\n" % KEYS["one"].encode(),
        b"x-api-key: \xff\xfe\r\n",
        # the first one counts, as it does at an engine
        b"Authorization: Bearer wrong\r\nx-api-key: %b\r\n" % KEYS["one"].encode(),
        b"x-api-key: %b\r\n" % hashlib.sha256(KEYS["one"].encode()).hexdigest().encode(),
    ],
)
async def test_who_brings_none_is_told_so_in_the_format_of_its_api(file, header, caplog):
    seen = []
    async with stack(answers(seen=seen), keys=Keys(file)) as s:
        for raw in (post(extra=header), get(b"/v1/models", header), get(b"/version", header)):
            status, headers, body = await s.ask(raw)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        status, _, body = await s.ask(post(path=b"/v1/messages", extra=header))
        assert status == 401
        assert json.loads(body)["error"]["type"] == "authentication_error" and json.loads(body)["type"] == "error"
        assert s.metrics.rejections.values["401",] == 4
        assert seen == [] and s.idle()
        assert KEYS["one"][:12] not in caplog.text


async def test_health_and_what_browsers_ask_first_need_no_key(file):
    async with stack(answers(), keys=Keys(file)) as s:
        assert (await s.ask(get(b"/health")))[0] == 200
        options = b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: h\r\nOrigin: http://page\r\n\r\n"
        assert (await s.ask(options))[0] == 200


async def test_keys_differ_in_what_they_may_use(file):
    seen = []
    async with stack(answers(seen=seen), keys=Keys(file), allow_paths=("/mine",)) as s:
        for backend in s.proxy.backends.values():
            backend.replica.models = {"m": None, "m2": None}
            s.proxy.changed()
        asked = {model: json.dumps({"model": model, "prompt": "x"}).encode() for model in ("m", "m2", "m3")}
        for path in (b"/v1/completions", b"/v1/rerank"):
            assert (await s.ask(post(asked["m"], path, bearer("one"))))[0] == 200
            assert (await s.ask(post(asked["m2"], path, bearer("two"))))[0] == 200
            for model in ("m", "m3"):
                status, _, body = await s.ask(post(asked[model], path, bearer("two")))
                error = json.loads(body)["error"]
                assert (status, error["code"], error["param"]) == (403, "model_not_allowed", "model")
                assert "m2" in error["message"]
            assert (await s.ask(post(b'{"prompt": "x"}', path, bearer("two"))))[0] == 403
        put = [post(asked[model], b"/mine", bearer("two")).replace(b"POST", b"PUT", 1) for model in ("m", "m2")]
        assert [(await s.ask(one))[0] for one in put] == [403, 200]
        chat = json.dumps({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}).encode()
        status, _, body = await s.ask(post(chat, b"/v1/messages", bearer("two")))
        assert status == 403 and json.loads(body)["error"]["type"] == "permission_error"
        listed = {name: json.loads((await s.ask(get(b"/v1/models", bearer(name))))[2])["data"] for name in KEYS}
        assert [one["id"] for one in listed["one"]] == ["m", "m2"]
        assert [one["id"] for one in listed["two"]] == ["m2"]
        asked = [await s.ask(get(b"/v1/models/" + name, bearer("two"))) for name in (b"m2", b"m", b"no")]
        assert [status for status, _, _ in asked] == [200, 403, 403]
        assert s.metrics.rejections.values["403",] == 10
        assert len(seen) == 5 and s.idle()


async def dies(reader, writer):
    await read_request(reader)


async def breaks_off(reader, writer):
    await read_request(reader)
    writer.write(SSE_HEAD + chunk(EVENT))
    await writer.drain()


LAST = "the last: replica 127"
FAULTS = {  # what happens, what all are told of it, and what else is known
    "nobody listens": ({"ports": 2, "retries": 5}, "no replica is left after 2 attempt(s)", LAST),
    "no attempt is left": ({"ports": 2, "retries": 0}, "no replica answered after 1 attempt(s)", LAST),
    "two die": ({"scripts": [dies, dies, dies]}, "so no other is tried", LAST),
    "too late": (
        {"scripts": [silent], "request_timeout": 0.2},
        "sent no byte of an answer within 0.2 s",
        "replica 127",
    ),
    "breaks off": ({"scripts": [breaks_off]}, "the answer broke off", "closed by the replica"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_replicas_that_fail_are_named_to_no_tenant_but_to_operators_and_where_there_are_no_keys(file, name):
    """Theirs are addresses of a network that is not the tenants', and the reason may have an address as well."""
    options, message, more = FAULTS[name]
    given = {**options, "ports": [free_port() for _ in range(options.get("ports", 0))]}
    scripts, errors, told = given.pop("scripts", ()), [], {}
    file.write_text("\n".join([entry("one"), entry("two", models=["m"], cache_salt="0123456789abcdef")]))
    body = BODY.replace(b"{", b'{"stream": true,', 1) if breaks_off in scripts else BODY
    for who, keys in (("one", Keys(file)), ("two", Keys(file)), ("", None)):
        async with stack(*scripts, keys=keys, **given) as s:
            s.proxy.settling.on_end.append(lambda exchange, outcome, usage: errors.append(str(exchange.error)))
            told[who] = (await s.ask(post(body, extra=bearer(who) if who else b"")))[2].decode()
    for text in told.values():
        assert message in text
    assert "127.0.0.1" in told[""]
    for who in ("one", "two"):
        assert "127.0.0.1" not in told[who] and "the last" not in told[who]
    assert len(errors) == 3 and all(more in error for error in errors)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/messages"])
async def test_a_key_for_some_models_is_told_of_no_others(file, path):
    replicas = {}
    async with stack(answers(), keys=Keys(file), replicas=replicas) as s:
        (backend,) = s.proxy.backends.values()
        backend.replica.models = {"m": None, "m3": None}
        s.proxy.changed()
        body = {"model": "m2", "prompt": "x", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        for who, served in (("two", "none"), ("one", "m, m3")):
            replicas.clear()
            status, _, told = await s.ask(post(json.dumps(body).encode(), path, bearer(who)))
            message = json.loads(told)["error"]["message"]
            assert (status, message) == (404, f"the model 'm2' does not exist; served here: {served}")
            replicas["late"] = Replica("127.0.0.1:9", "http://127.0.0.1:9", "127.0.0.1", 9, reason="not there")
            for raw in (post(json.dumps(body).encode(), path, bearer(who)), get(b"/v1/models/m2", bearer(who))):
                status, _, told = await s.ask(raw)
                message = json.loads(told)["error"]["message"]
                assert status == 503 and f"(served here: {served})" in message and "127.0.0.1" not in message


@pytest.mark.parametrize("engine_key", [None, "the-engines-own"])
async def test_engines_get_their_own_key_and_never_a_clients(file, engine_key):
    seen = []
    async with stack(answers(seen=seen), keys=Keys(file)) as s:
        for backend in s.proxy.backends.values():
            backend.replica.key, backend.hidden = engine_key, CLIENT_KEYS
            backend.follow_incarnation()
        both = bearer("one") + b"x-api-key: %b\r\n" % KEYS["one"].encode()
        assert (await s.ask(post(extra=both)))[0] == 200
    head = seen[0][0].lower()
    assert KEYS["one"].encode() not in head and b"x-api-key" not in head
    assert (b"authorization: bearer the-engines-own" in head) == (engine_key is not None)
    assert head.count(b"authorization:") == (engine_key is not None)


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 60000000", b"Content-Length: 5000", b"Transfer-Encoding: chunked"]
)
async def test_a_stranger_may_not_make_the_gateway_hold_a_large_body(file, framing):
    head = b"POST %b HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n%b%b\r\n\r\n"
    keys = Keys(file)
    async with stack(answers(), keys=keys) as s:
        s.server.clients.head_fault = keys.head_fault
        for path, kind in (
            (b"/v1/chat/completions", "invalid_request_error"),
            (b"/v1/messages", "authentication_error"),
        ):
            talk = await s.talk()
            await talk.say(head % (path, b"Authorization: Bearer wrong\r\n", framing))  # and not a byte of the body
            status, headers, body = await talk.response()
            assert (status, headers["www-authenticate"], headers["connection"]) == (401, "Bearer", "close")
            assert json.loads(body)["error"]["type"] == kind
        assert s.server.held == 0
        talk = await s.talk()
        await talk.say(head % (b"/v1/chat/completions", bearer("one"), framing))
        assert await talk.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"


@contextlib.contextmanager
def deaf(port):
    """A client that reads nothing."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", port))
        one.setblocking(False)
        yield one


HEALTH, UNKNOWN = get(b"/health"), post(extra=b"Authorization: Bearer wrong\r\n")


@pytest.mark.parametrize("request_", [HEALTH, UNKNOWN], ids=["open", "401"])
async def test_of_what_strangers_send_ahead_nothing_is_held(file, request_):
    """All at once: as much of it as a read takes would wait where one of many clients waits for others' turns."""
    async with stack(answers(), keys=Keys(file)) as s, contextlib.AsyncExitStack() as clients:
        most = 0
        for _ in range(20):
            one = clients.enter_context(deaf(s.port))
            with contextlib.suppress(BlockingIOError):
                one.send(request_ * (200_000 // len(request_)))
        await eventually(lambda: len(s.server.connections) == 20)

        def all_closing():
            nonlocal most
            most = max(most, s.server.held)
            return all(one.closing for one in s.server.connections)

        await eventually(all_closing)
        assert s.server.held == 0 and most < 20 * 16_384


@pytest.mark.parametrize("request_", [HEALTH, UNKNOWN], ids=["open", "401"])
async def test_a_stranger_that_reads_no_answers_gets_no_more_of_them(file, request_):
    async with stack(answers(), keys=Keys(file)) as s:
        with deaf(s.port) as one:
            await eventually(lambda: s.server.connections)
            (connection,) = s.server.connections
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

            def closing():
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    one.send(request_ * 20)
                return connection.closing

            await eventually(closing)
            assert s.server.held == 0


async def test_who_has_a_key_may_send_ahead_and_a_stranger_a_few_requests(file):
    async with stack(answers(), keys=Keys(file)) as s:
        talk, many = await s.talk(), 2000
        for _ in range(3):
            await talk.say(HEALTH * 2 + UNKNOWN)
            assert [(await talk.response())[0] for _ in range(3)] == [200, 200, 401]
        sent = asyncio.ensure_future(talk.say(get(b"/v1/models", bearer("one")) * many))
        assert [(await talk.response())[0] for _ in range(many)] == [200] * many
        await sent
        await talk.say(UNKNOWN * 100)
        assert {(await talk.response())[0] for _ in range(10)} == {401}


async def followed(keys: Keys, seconds=5.0):
    """Until the next reading of the file, whatever came of it."""
    problem, loaded = keys.problem, keys._loaded
    await eventually(lambda: (keys.problem, keys._loaded) != (problem, loaded), seconds)


async def test_the_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(file, caplog):
    keys = Keys(file)
    following = asyncio.create_task(keys.follow())
    try:
        async with stack(answers(), keys=keys) as s:
            talk = await s.talk()

            async def status(name):
                return (await talk.ask(post(extra=bearer(name))))[0]

            assert await status("one") == 200
            with caplog.at_level(logging.ERROR):
                file.write_text(entry("two") + "\n- {name: broken")
                await followed(keys)
            assert await status("one") == 200  # on the same connection, whose head is remembered
            assert ":2: not YAML" in keys.status()["problem"] and "the keys known so far stay" in caplog.text
            file.unlink()
            await followed(keys)
            assert await status("one") == 200 and "No such file" in keys.status()["problem"]
            new = file.with_suffix(".new")
            new.write_text(entry("two"))
            os.replace(new, file)  # as editors and Kubernetes do
            await followed(keys)
            assert keys.status()["problem"] == "" and keys.status()["tenants"] == 1
            assert await status("one") == 401
            assert await status("two") == 200
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
