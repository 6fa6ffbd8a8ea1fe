"""A real gateway before engines that fail while they answer, and before what is no engine any more."""

import asyncio
import itertools
import json
import re
import resource
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from .http.talk import Talker, read_request
from .running import running

BODY = {"model": "sim", "max_tokens": 4, "stream": True}


async def ask(gateway, number: int, path: str = "/v1/completions") -> tuple[int, str, str]:
    given = {"prompt": f"{number} says what nobody else does. " * 8}
    if path.endswith("messages"):
        given = {"messages": [{"role": "user", "content": given["prompt"]}]}
    elif path.endswith("responses"):
        given = {"input": given["prompt"]}
    answer = await gateway.client.post(path, json={**BODY, **given})
    return answer.status_code, answer.headers.get("x-hitherto-replica", ""), answer.text


async def faults(gateway, engine, **what) -> None:
    (await gateway.client.post(f"{engine.url}/faults", json=what)).raise_for_status()


def replica(status: dict, engine) -> dict:
    return next(one for one in status["replicas"] if one["url"] == engine.url)


@pytest.fixture(scope="module")
def engines(start_engine):
    started = [start_engine(), start_engine()]
    return [engine.wait() for engine in started]


@asynccontextmanager
async def before(engines):
    async with httpx.AsyncClient() as client:
        for engine in engines:
            (await client.post(f"{engine.url}/faults", json={"error_stream": 0})).raise_for_status()
    async with running(
        "--replica-url", *(engine.url for engine in engines), "--model", "sim", "--allow-path", "/faults"
    ) as gateway:
        await gateway.ready(len(engines))
        yield gateway


async def until_all_are_asked(gateway, engines, first: int) -> None:
    """By requests that share nothing with any other."""
    seen: set[str] = set()
    async with asyncio.timeout(40):
        for number in itertools.count(first):
            seen.add((await ask(gateway, number))[1])
            if len(seen) == len(engines):
                return


async def test_an_engine_that_fails_every_stream_is_left_alone_and_tried_again_when_it_works(engines):
    bad, good = engines
    async with before(engines) as gateway:
        await faults(gateway, bad, error_stream=10**9)

        async def ask_all(numbers) -> None:
            for number in numbers:
                path = ("/v1/completions", "/v1/messages", "/v1/responses")[number % 3]
                status, where, text = await ask(gateway, number, path)
                assert status == 200 and where == good.url.removeprefix("http://")
                assert "Internal server error" not in text

        async with asyncio.timeout(40):
            numbers = itertools.count()
            while not replica(await gateway.status(), bad)["errors"]:  # until it was asked at all
                await ask_all([next(numbers)])
        await ask_all(itertools.islice(numbers, 40))
        status = await gateway.status()
        assert replica(status, bad)["errors"] < 15, (
            "it was asked a few times, and then left alone: degraded after three, or passed over"
        )
        assert status["totals"]["errors"] == 0 and replica(status, bad)["events"] != "unobserved"
        await faults(gateway, bad, error_stream=0)
        await gateway.until(lambda status: replica(status, bad)["state"] == "ready", 40)
        await until_all_are_asked(gateway, engines, 1000)


async def test_the_clients_own_faults_move_no_traffic_and_are_no_successes(engines):
    """Found with vLLM 0.32: after 40 of these one of two equal engines got all requests, and the other none for 440."""
    async with before(engines) as gateway:
        for number in range(30):
            answer = await gateway.client.post("/v1/completions", json={**BODY, "prompt": [99_999_999 + number] * 40})
            assert answer.status_code == 200 and "out of vocabulary" in answer.text
        status = await gateway.status()
        assert {one["state"] for one in status["replicas"]} == {"ready"} and {
            one["errors"] for one in status["replicas"]
        } == {0}
        page = (await gateway.admin.get("/metrics")).text
        assert 'hitherto_requests_total{path="completions",status="4xx"} 30.0' in page
        assert 'hitherto_requests_total{path="completions",status="2xx"} 0.0' in page
        counts = re.findall(r"^hitherto_(?:replica_)?ttft_seconds_count(?:{.*})? (.*)$", page, re.MULTILINE)
        assert counts and set(counts) == {"0.0"}
        await until_all_are_asked(gateway, engines, 2000)
        status = await gateway.status()
        assert {one["events"] for one in status["replicas"]} <= {"live", "connecting", "off"}


class Fussy:
    """An engine that fails each request with a chat template, as vLLM does where the template raises; or all
    requests."""

    def __init__(self):
        self.asked, self.broken = 0, False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head, body = await read_request(reader)
                status, answer = self.answer(head.split()[1], body)
                writer.write(
                    b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                    % (status, len(answer), answer)
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, path: bytes, body: bytes) -> tuple[int, bytes]:
        if path.startswith(b"/v1/") and path != b"/v1/models":
            self.asked += b"max_tokens" in body and b"chat_template" in body
            if self.broken or b"chat_template" in body:
                return (
                    500,
                    b'{"error":{"message":"No filter named \'x\' found.","type":"InternalServerError","code":500}}',
                )
            return 200, b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"text":"hi"}]}'
        return {b"/health": (200, b""), b"/v1/models": (200, b'{"data":[{"id":"m"}]}')}.get(path, (404, b"{}"))


@asynccontextmanager
async def fussy(count: int, *args: str):
    """A gateway before so many of them."""
    engines = [Fussy() for _ in range(count)]
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(await asyncio.start_server(one.serve, "127.0.0.1", 0)) for one in engines
        ]
        urls = [f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in servers]
        gateway = await stack.enter_async_context(running("--replica-url", *urls, *args))
        await gateway.ready(count)
        yield gateway, engines


BAD = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "chat_template": "{{ 1 | x }}"}


async def test_a_request_that_every_engine_fails_degrades_none():
    """Three such requests degraded all replicas."""
    async with fussy(2) as (gateway, engines):
        for _ in range(12):
            answer = await gateway.client.post("/v1/chat/completions", json=BAD)
            assert (
                answer.status_code == 500
                and "No filter named" in answer.text
                and answer.headers["x-should-retry"] == "false"
            )
            assert {one["state"] for one in (await gateway.status())["replicas"]} == {"ready"}
        assert sum(one.asked for one in engines) == 24, "each was asked once about each"
        status = await gateway.status()
        assert status["totals"]["errors"] == 12 and {one["errors"] for one in status["replicas"]} == {0}


async def test_the_only_engine_is_asked_before_it_is_called_ill():
    async with fussy(1, "--workers", "2") as (gateway, (engine,)):
        for _ in range(12):
            assert (await gateway.client.post("/v1/chat/completions", json=BAD)).status_code == 500
            assert (await gateway.status())["replicas"][0]["state"] == "ready"
        engine.broken = True
        good = {key: value for key, value in BAD.items() if key != "chat_template"}

        async def is_degraded() -> bool:
            assert (await gateway.client.post("/v1/chat/completions", json=good)).status_code == 500
            return (await gateway.status())["replicas"][0]["state"] == "degraded"

        async with asyncio.timeout(20):
            while not await is_degraded():
                pass
        assert "requests fail (5xx)" in (await gateway.status())["replicas"][0]["reason"]
        engine.broken = False
        assert (await gateway.client.post("/v1/chat/completions", json=good)).status_code == 200, (
            "the only one is never left out"
        )
        await gateway.until(lambda status: status["replicas"][0]["state"] == "ready", 10)


HTML = b"<html>It works!</html>"


async def other_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says 200 to everything."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            low = head.lower()
            at = low.find(b"content-length:")
            await reader.readexactly(int(low[at + 15 : low.index(b"\r\n", at)]) if at >= 0 else 0)
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%b" % (len(HTML), HTML)
            )
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def test_what_takes_the_place_of_an_engine_answers_no_client(engines):
    gone, stays = engines
    async with before(engines) as gateway:
        for number in range(10):
            assert (await ask(gateway, number))[0] == 200
        gone.process.kill()
        gone.process.wait()
        server = await asyncio.start_server(other_server, "127.0.0.1", gone.port)
        async with server:
            for number in range(60):
                status, where, text = await ask(gateway, number)
                assert status == 200 and "<html>" not in text and where == stays.url.removeprefix("http://")
            status = await gateway.until(lambda status: replica(status, gone)["state"] == "warming", 10)
            told = replica(status, gone)
            assert "something else than the engine answers there" in told["reason"]
            assert told["events"] == "off" and told["models"] == [], "nothing of the engine that is gone"
            asked = replica(status, gone)["errors"]
            for number in range(20):
                await ask(gateway, number)
            assert replica(await gateway.status(), gone)["errors"] == asked, "nothing is sent there any more"


class Impostor(Fussy):
    """An engine that answers in the API's form, and notes what it was asked."""

    def __init__(self, model: bytes = b"other"):
        super().__init__()
        self.model, self.paths = model, []

    def answer(self, path: bytes, body: bytes) -> tuple[int, bytes]:
        self.paths.append(path.decode())
        if path == b"/v1/models":
            return 200, b'{"data":[{"id":"%b"}]}' % self.model
        return super().answer(path, body)


@pytest.mark.parametrize("warm", [True, False], ids=["connections are kept", "nothing was asked yet"])
async def test_another_engine_in_the_place_of_one_gets_no_request_before_it_was_asked_who_it_is(start_engine, warm):
    """At once after the other has gone, while the gateway has looked at that a moment ago."""
    gone, stays = [start_engine().wait() for _ in range(2)]
    async with before([gone, stays]) as gateway:
        for number in range(10 * warm):
            await ask(gateway, number)
        gone.process.kill()
        gone.process.wait()
        impostor = Impostor()
        async with await asyncio.start_server(impostor.serve, "127.0.0.1", gone.port):
            for number in range(5):  # five together, five times
                answers = await asyncio.gather(*(ask(gateway, 10 + 5 * number + one) for one in range(5)))
                assert {status for status, _, _ in answers} == {200}
                assert {where for _, where, _ in answers} == {stays.url.removeprefix("http://")}
            assert not [path for path in impostor.paths if "completions" in path]
            status = await gateway.until(lambda status: replica(status, gone)["models"] == ["other"], 10)
            assert replica(status, gone)["errors"] <= 1, "a connection that broke under a request, if any"


async def test_the_only_engine_started_anew_answers_and_nothing_is_promised_of_the_last_ones_cache(start_engine):
    engine = start_engine().wait()
    async with before([engine]) as gateway:
        for _ in range(3):
            assert (await ask(gateway, 1))[0] == 200
        engine.process.kill()
        engine.process.wait()
        anew = start_engine("--port", str(engine.port)).wait()
        assert anew.port == engine.port
        body = {**BODY, "prompt": f"{1} says what nobody else does. " * 8}
        async with asyncio.timeout(30):
            # A machine that is busy may take so long to start it that a probe finds nobody there.
            while (answer := await gateway.client.post("/v1/completions", json=body)).status_code == 503:
                assert "no replica of 'sim' is ready" in answer.text
        assert answer.status_code == 200 and answer.headers["x-hitherto-cached-tokens"] == "0"
        assert (await gateway.status())["replicas"][0]["errors"] == 0


async def test_a_gateway_out_of_descriptors_says_what_is_short_and_keeps_its_replicas(start_engine):
    started = [start_engine(), start_engine()]
    async with before([engine.wait() for engine in started]) as gateway:
        body = json.dumps({**BODY, "prompt": "It says what nobody else does. "}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client = await Talker.to(gateway.client.base_url.port)
        await client.say(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        await client.until(b"100 Continue\r\n\r\n", 20)  # an idle connection would give way
        soft, hard = resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (3, hard))
        await client.say(body)
        status, _, text = await client.response(20)
        assert status == 503 and b"gateway_full" in text and b"Too many open files" in text
        await client.close()
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        told = await gateway.status()
        assert {one["state"] for one in told["replicas"]} == {"ready"}
        assert "no descriptors left" in told["background_failures"]["connections to replicas"]["last"]
        assert (await ask(gateway, 1))[0] == 200
