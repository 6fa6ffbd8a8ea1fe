"""Requests whose two legs run at the same time, through a gateway process and simulated engines that wait for each
other: what they answer, and what becomes of the other engine's part when one is killed, refuses or is left."""

import asyncio
import signal

import httpx
import pytest

from .running import counted, running
from .test_legs import TEXT, asked, words

LONG = "A long way down, with cupboards and maps on its walls. " * 400


def url_of(engine, role):
    return f"{engine.url}#role={role},transfer=mooncake,bootstrap={engine.port}"


class Engines:
    """A pair, a prefiller that takes seconds, and one of each side that is killed."""

    def __init__(self, start_engine):
        wire, slow = ("--kv-connector", "mooncake"), ("--speedup", "0.2")
        self.prefiller, self.decoder, self.slow, self.prefiller_that_dies, self.decoder_that_dies = self.all = (
            start_engine(*wire),
            start_engine(*wire),
            start_engine(*wire, *slow),
            start_engine(*wire, *slow),
            start_engine(*wire),
        )


@pytest.fixture(scope="module")
def engines(start_engine):
    started = Engines(start_engine)
    for engine in started.all:
        engine.wait()
    return started


@pytest.fixture(scope="module")
def single(start_engine):
    """Takes whole requests."""
    return start_engine().wait()


def flags_of(prefillers, decoders):
    urls = [url_of(one, "prefill") for one in prefillers] + [url_of(one, "decode") for one in decoders]
    return "--replica-url", *urls, "--policy", "round_robin"


async def rooms_open(*engines):
    found = 0
    for engine in engines:
        async with httpx.AsyncClient(base_url=engine.url) as client:
            found += (await client.get("/kv")).json()["open"]
    return found


async def nothing_is_left(gateway, *engines):
    """No load is counted anywhere, and no engine waits for another one."""
    async with asyncio.timeout(10):
        while await gateway.counted("hitherto_reservations") or await rooms_open(*engines):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages"])
async def test_two_legs_say_what_one_engine_says(engines, single, api):
    prefiller, decoder = engines.prefiller, engines.decoder
    async with running(*flags_of([prefiller], [decoder])) as gateway:
        await gateway.ready_for_legs(2)
        async with httpx.AsyncClient(base_url=single.url) as alone:
            for number in range(3):
                path, body = asked(api, f"{api} {number}. " + TEXT * 20, False)
                answer = await gateway.client.post(path, json=body)
                assert words(answer) == words(await alone.post(path, json=body))
                assert answer.headers["x-hitherto-replica"] == f"127.0.0.1:{decoder.port}"
        path, body = asked(api, f"{api}, streamed. " + TEXT * 20, True)
        streamed = await gateway.client.post(path, json=body)
        assert streamed.status_code == 200 and "broke off" not in streamed.text
        await nothing_is_left(gateway, decoder)  # a first leg's answer may come after the second one's
        page = (await gateway.admin.get("/metrics")).text
        for leg in ("prefill", "decode"):
            assert counted(page, "hitherto_legs_total", leg=leg, outcome="complete") == 4
        assert counted(page, "hitherto_predictions_total") == 4, "what the prefiller found is compared"


async def test_a_bootstrap_server_that_nobody_reaches_is_said_with_its_remedy(engines):
    prefiller, decoder = engines.prefiller, engines.decoder
    urls = f"{prefiller.url}#role=prefill,transfer=mooncake,bootstrap=1", url_of(decoder, "decode")
    async with running("--replica-url", *urls, "--policy", "round_robin") as gateway:
        status = await gateway.ready_for_legs(2)
        (problems,) = [" ".join(one["problems"]) for one in status["replicas"] if one["role"] == "prefill"]
        assert ":1/query cannot be read" in problems and "#bootstrap=PORT" in problems
        path, body = asked("chat", "Whole. " + TEXT * 20, False)
        assert (await gateway.client.post(path, json=body)).status_code == 200
        assert await gateway.counted("hitherto_leg_choices_total", choice="apart") == 0


async def is_loaded(engine, requests):
    async with httpx.AsyncClient(base_url=engine.url) as client, asyncio.timeout(30):
        while (await client.get("/load")).json()["server_load"] != requests:
            await asyncio.sleep(0.01)


async def is_asked_again(engine, gateway):
    """An engine that refused with 503 is asked last for a second."""
    async with httpx.AsyncClient(base_url=engine.url) as client, asyncio.timeout(30):

        async def answered() -> float:
            return counted((await client.get("/metrics")).text, "vllm:request_success_total")

        before, number = await answered(), 0
        while await answered() == before:
            number += 1
            await all_well(gateway, f"until it is asked again {number}")


async def all_well(gateway, what):
    for number in range(4):
        path, body = asked("chat", f"{what} {number}. " + TEXT * 20, number % 2 == 0)
        answer = await gateway.client.post(path, json=body)
        assert answer.status_code == 200 and "broke off" not in answer.text, answer.text


async def in_trouble(engine, gateway, what, *left, faults=("refuse", "error_500", "error_503")):
    """An engine that fails in each way that ends before the answer begins: no request is lost, nothing is left."""
    async with httpx.AsyncClient(base_url=engine.url) as client:
        for fault in faults:
            await client.post("/faults", json={fault: 1})
            await all_well(gateway, f"{what} {fault}")
            await nothing_is_left(gateway, *left)


async def test_a_prefiller_that_fails_or_is_killed_while_it_computes_loses_no_request(engines):
    prefiller, decoder, dies = engines.prefiller, engines.decoder, engines.prefiller_that_dies
    async with running(*flags_of([dies, prefiller], [decoder])) as gateway:
        await gateway.ready_for_legs(3)
        await in_trouble(dies, gateway, "of its prefiller,", prefiller, dies, faults=("refuse", "error_503"))
        await is_asked_again(dies, gateway)
        asking = []
        for stream in (True, False):  # each prefiller gets one
            path, body = asked("chat", f"{stream}: killed. " + LONG, stream)
            asking.append(asyncio.ensure_future(gateway.client.post(path, json=body)))
        await is_loaded(dies, 1)
        dies.process.kill()
        for answer in await asyncio.gather(*asking):
            assert answer.status_code == 200 and "broke off" not in answer.text, answer.text
        await all_well(gateway, "after it")
        await nothing_is_left(gateway, prefiller)


async def test_a_prefiller_that_answers_500_loses_no_request(engines):
    """The pair is left out for a while."""
    prefiller, other, decoder = engines.prefiller, engines.slow, engines.decoder
    async with running(*flags_of([prefiller, other], [decoder])) as gateway:
        await gateway.ready_for_legs(3)
        await in_trouble(prefiller, gateway, "of its prefiller,", prefiller, other, faults=("error_500",))


async def test_a_decoder_that_fails_or_is_killed_before_its_first_byte_loses_no_request(engines):
    slow, decoder, dies = engines.slow, engines.decoder, engines.decoder_that_dies
    async with running(*flags_of([slow], [dies, decoder])) as gateway:
        await gateway.ready_for_legs(3)
        # a prompt is kept for a while for a decoder that never comes; after a 500 the pair would be left out
        await in_trouble(dies, gateway, "of its decoder,", faults=("refuse", "error_503"))
        asking = []
        for number in range(2):  # each decoder gets one
            path, body = asked("chat", f"{number}: killed. " + LONG, True)
            asking.append(asyncio.ensure_future(gateway.client.post(path, json=body)))
        await is_loaded(slow, 2)
        dies.process.kill()
        for answer in await asyncio.gather(*asking):
            assert answer.status_code == 200 and "broke off" not in answer.text, answer.text
            assert answer.headers["x-hitherto-replica"] == f"127.0.0.1:{decoder.port}"
        await nothing_is_left(gateway)


async def test_a_client_that_leaves_is_left_by_both_engines(engines):
    slow, decoder = engines.slow, engines.decoder
    before = await rooms_open(slow)
    async with running(*flags_of([slow], [decoder])) as gateway:
        await gateway.ready_for_legs(2)
        path, body = asked("chat", "left. " + LONG, True)
        asking = asyncio.ensure_future(gateway.client.post(path, json=body))
        await is_loaded(slow, 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for engine in (slow, decoder):
            await is_loaded(engine, 0)
        await nothing_is_left(gateway)
        assert await rooms_open(slow) == before
        assert await gateway.counted("hitherto_legs_total", outcome="abandoned") == 2


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
async def test_an_engine_that_stops_without_a_word_is_left(engines, stopped):
    slow, decoder = engines.slow, engines.decoder
    async with running(*flags_of([slow, engines.prefiller], [decoder])) as gateway:
        await gateway.ready_for_legs(3)
        asked_of = [asked("chat", f"{stopped}, {number}: stopped. " + LONG, True) for number in range(2)]
        asking = asyncio.gather(*[gateway.client.post(path, json=body) for path, body in asked_of])
        await is_loaded(slow, 1)
        halted = slow if stopped == "prefill" else decoder
        halted.process.send_signal(signal.SIGSTOP)
        try:
            if stopped == "decode":  # there is no other: it goes on when that does
                await gateway.until(lambda status: any(one["state"] != "ready" for one in status["replicas"]))
                halted.process.send_signal(signal.SIGCONT)
            for answer in await asking:  # each prefiller got one
                assert answer.status_code == 200 and "broke off" not in answer.text, answer.text
        finally:
            halted.process.send_signal(signal.SIGCONT)
        await nothing_is_left(gateway)


async def test_two_gateways_count_both_legs_in_one_ledger(engines, start_redis):
    prefiller, decoder = engines.prefiller, engines.decoder
    server = start_redis()
    flags = (*flags_of([prefiller], [decoder]), "--redis-url", server.url)
    async with running(*flags) as one, running(*flags) as other:
        for gateway in (one, other):
            await gateway.ready_for_legs(2)
            await gateway.until(lambda status: status["map"]["redis"]["ledger_joined"], 20)
        asked_of = [
            gateway.client.post(path, json=body)
            for number in range(6)
            for gateway in (one, other)
            for path, body in [asked("chat", f"Shared {number}, {gateway is one}. " + TEXT * 20, number % 2 == 0)]
        ]
        assert {answer.status_code for answer in await asyncio.gather(*asked_of)} == {200}
        for gateway in (one, other):
            assert await gateway.counted("hitherto_legs_total", leg="prefill", outcome="complete") == 6
            await nothing_is_left(gateway)
        with server.client() as client:
            async with asyncio.timeout(10):
                while client.hgetall("hitherto:1:default:{pool}:load"):
                    await asyncio.sleep(0.02)
