"""A real gateway before engines that fail while they answer, and before what is no engine any more."""

import asyncio
import itertools
from contextlib import asynccontextmanager

import httpx
import pytest

from .http.talk import read_request
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


class Impostor:
    """An engine of another model that answers in the API's form, and notes what it was asked."""

    def __init__(self):
        self.paths = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = {b"/health": b"", b"/v1/models": b'{"data":[{"id":"other"}]}'}
        try:
            while True:
                path = (await read_request(reader))[0].split()[1]
                self.paths.append(path.decode())
                answer = answers.get(path, b'{"choices":[{"index":0,"text":"hi"}]}')
                head = b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                writer.write(head % len(answer) + answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


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
            assert "/v1/completions" not in impostor.paths  # chats are the gateway's own, which compare tokens
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
