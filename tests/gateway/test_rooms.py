"""Requests whose two legs run at the same time, through a gateway process and simulated engines that wait for each
other: what they answer, and what becomes of the other engine's part when one is killed, refuses or is left."""

import asyncio
import re
import signal

import httpx
import pytest

from .running import counted, running
from .test_legs import TEXT, asked, words

APIS = {"sglang": ("chat", "completions"), "mooncake": ("chat", "completions", "responses", "messages")}
CASES = [(wire, api) for wire, apis in APIS.items() for api in apis]
SIDES = {"sglang": ("sglang-prefill", "sglang-decode"), "mooncake": ("mooncake", "mooncake")}
LONG = "A long way down, with cupboards and maps on its walls. " * 400


def url_of(engine, role, wire):
    return f"{engine.url}#role={role},transfer={wire},bootstrap={engine.port}"


class Engines:
    """Of one wire: a pair, a prefiller that takes seconds, and one of each side that is killed."""

    def __init__(self, start_engine, wire):
        first, second = SIDES[wire]
        self.prefiller, self.decoder, self.slow, self.prefiller_that_dies, self.decoder_that_dies = self.all = (
            start_engine("--kv-connector", first),
            start_engine("--kv-connector", second),
            start_engine("--kv-connector", first, "--speedup", "0.2"),
            start_engine("--kv-connector", first, "--speedup", "0.2"),
            start_engine("--kv-connector", second),
        )


@pytest.fixture(scope="module")
def engines(start_engine):
    started = {wire: Engines(start_engine, wire) for wire in SIDES}
    for one in started.values():
        for engine in one.all:
            engine.wait()
    return started


@pytest.fixture(scope="module")
def single(start_engine):
    """Takes whole requests."""
    return start_engine().wait()


def flags_of(wire, prefillers, decoders):
    urls = [url_of(one, "prefill", wire) for one in prefillers] + [url_of(one, "decode", wire) for one in decoders]
    return "--replica-url", *urls, "--policy", "round_robin"


async def rooms_open(*engines):
    found = 0
    for engine in engines:
        async with httpx.AsyncClient(base_url=engine.url) as client:
            found += (await client.get("/rooms")).json()["open"]
    return found


async def nothing_is_left(gateway, *engines):
    """No load is counted anywhere, and no engine waits for another one."""
    async with asyncio.timeout(10):
        while await gateway.counted("hitherto_reservations") or await rooms_open(*engines):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("wire, api", CASES)
async def test_two_legs_say_what_one_engine_says(engines, single, wire, api):
    prefiller, decoder = engines[wire].prefiller, engines[wire].decoder
    async with running(*flags_of(wire, [prefiller], [decoder])) as gateway:
        await gateway.ready_for_legs(2)
        async with httpx.AsyncClient(base_url=single.url) as alone:
            for number in range(3):
                path, body = asked(api, f"{wire}, {api} {number}. " + TEXT * 20, False)
                answer = await gateway.client.post(path, json=body)
                assert words(answer) == words(await alone.post(path, json=body))
                assert answer.headers["x-hitherto-replica"] == f"127.0.0.1:{decoder.port}"
        path, body = asked(api, f"{wire}, {api}, streamed. " + TEXT * 20, True)
        streamed = await gateway.client.post(path, json=body)
        assert streamed.status_code == 200 and "broke off" not in streamed.text
        await nothing_is_left(gateway, decoder)  # a first leg's answer may come after the second one's
        page = (await gateway.admin.get("/metrics")).text
        for leg in ("prefill", "decode"):
            assert counted(page, "hitherto_legs_total", leg=leg, outcome="complete") == 4
        assert counted(page, "hitherto_predictions_total") == 4, "what the prefiller found is compared"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_usage_has_the_tokens_that_the_prefiller_found_cached(engines, stream):
    prefiller, decoder = engines["sglang"].prefiller, engines["sglang"].decoder
    async with running(*flags_of("sglang", [prefiller], [decoder])) as gateway:
        await gateway.ready_for_legs(2)
        path, body = asked("chat", f"{stream}: said before. " + TEXT * 20, stream)
        if stream:
            body["stream_options"] = {"include_usage": True}
        for _ in range(2):
            answer = await gateway.client.post(path, json=body)
            assert answer.status_code == 200
        [told] = {int(number) for number in re.findall(r'"cached_tokens":\s*(\d+)', answer.text)}
        found = await gateway.counted("hitherto_reported_cached_tokens_total", replica=f"127.0.0.1:{prefiller.port}")
        assert told == found > 300


async def test_several_choices_and_short_prompts_go_through_rooms_too(engines):
    prefiller, decoder = engines["sglang"].prefiller, engines["sglang"].decoder
    async with running(*flags_of("sglang", [prefiller], [decoder])) as gateway:
        await gateway.ready_for_legs(2)
        answer = await gateway.chat([{"role": "user", "content": "Hi."}], n=3)
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 3
        assert await gateway.counted("hitherto_legs_total", leg="decode", outcome="complete") == 1
        refused = await gateway.client.post("/v1/messages", json=asked("messages", "Hi.", False)[1])
        assert refused.status_code == 400 and "/v1/chat/completions" in refused.text
        wrong = await gateway.chat([{"role": "user", "content": "Hi."}], max_tokens=0)
        assert wrong.status_code == 400 and "max_tokens" in wrong.text
        await nothing_is_left(gateway, prefiller, decoder)


async def test_an_engine_that_speaks_so_tells_where_it_is_met(start_engine):
    flags = ("--speaks", "sglang")
    prefiller = start_engine("--kv-connector", "sglang-prefill", *flags)
    decoder = start_engine("--kv-connector", "sglang-decode", *flags)
    urls = f"{prefiller.wait().url}#role=prefill", f"{decoder.wait().url}#role=decode"
    async with running("--replica-url", *urls, "--policy", "round_robin") as gateway:
        await gateway.ready_for_legs(2)
        for stream in (False, True):
            path, body = asked("chat", f"{stream}, {TEXT * 20}", stream)
            assert (await gateway.client.post(path, json=body)).status_code == 200
        assert await gateway.counted("hitherto_legs_total", leg="prefill", outcome="complete") == 2
        await nothing_is_left(gateway, prefiller, decoder)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_the_mode_that_an_engine_was_started_in_is_its_role(start_engine, workers):
    """Also where its URL says another one, of which it would refuse every request."""
    flags = ("--speaks", "sglang")
    prefiller = start_engine("--kv-connector", "sglang-prefill", *flags).wait()
    decoder = start_engine("--kv-connector", "sglang-decode", *flags).wait()
    for said in ("", "#role=prefill"):
        async with running("--replica-url", prefiller.url, decoder.url + said, "--workers", workers) as gateway:
            status = await gateway.ready_for_legs(2)
            told = {one["url"]: (one["role"], " ".join(one["problems"])) for one in status["replicas"]}
            assert (told[prefiller.url][0], told[decoder.url][0]) == ("prefill", "decode")
            assert "started for" not in told[prefiller.url][1]
            assert ("started for role=decode and is given as role=prefill" in told[decoder.url][1]) == bool(said)
            path, body = asked("chat", f"Modes {workers} {said}. " + TEXT * 20, False)
            answer = await gateway.client.post(path, json=body)
            assert answer.status_code == 200 and answer.headers["x-hitherto-replica"] == f"127.0.0.1:{decoder.port}"
            assert await gateway.counted("hitherto_legs_total", leg="prefill", outcome="complete") == 1
            await nothing_is_left(gateway, prefiller, decoder)


async def test_a_bootstrap_server_that_nobody_reaches_is_said_with_its_remedy(engines):
    prefiller, decoder = engines["mooncake"].prefiller, engines["mooncake"].decoder
    urls = f"{prefiller.url}#role=prefill,transfer=mooncake,bootstrap=1", url_of(decoder, "decode", "mooncake")
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


@pytest.mark.parametrize("wire", SIDES)
async def test_a_prefiller_that_fails_or_is_killed_while_it_computes_loses_no_request(engines, wire):
    prefiller, decoder, dies = engines[wire].prefiller, engines[wire].decoder, engines[wire].prefiller_that_dies
    async with running(*flags_of(wire, [dies, prefiller], [decoder])) as gateway:
        await gateway.ready_for_legs(3)
        await in_trouble(dies, gateway, f"{wire}, of its prefiller,", prefiller, dies, faults=("refuse", "error_503"))
        asking = []
        for stream in (True, False):  # each prefiller gets one
            path, body = asked("chat", f"{wire}, {stream}: killed. " + LONG, stream)
            asking.append(asyncio.ensure_future(gateway.client.post(path, json=body)))
        await is_loaded(dies, 1)
        dies.process.kill()
        for answer in await asyncio.gather(*asking):
            assert answer.status_code == 200 and "broke off" not in answer.text, answer.text
        await all_well(gateway, "after it")
        await nothing_is_left(gateway, prefiller)


@pytest.mark.parametrize("wire", SIDES)
async def test_a_prefiller_that_answers_500_loses_no_request(engines, wire):
    """The pair is left out for a while."""
    prefiller, other, decoder = engines[wire].prefiller, engines[wire].slow, engines[wire].decoder
    async with running(*flags_of(wire, [prefiller, other], [decoder])) as gateway:
        await gateway.ready_for_legs(3)
        await in_trouble(prefiller, gateway, f"{wire}, of its prefiller,", prefiller, other, faults=("error_500",))


@pytest.mark.parametrize("wire", SIDES)
async def test_a_decoder_that_fails_or_is_killed_before_its_first_byte_loses_no_request(engines, wire):
    slow, decoder, dies = engines[wire].slow, engines[wire].decoder, engines[wire].decoder_that_dies
    async with running(*flags_of(wire, [slow], [dies, decoder])) as gateway:
        await gateway.ready_for_legs(3)
        if wire == "sglang":
            await in_trouble(dies, gateway, f"{wire}, of its decoder,", slow)
        else:  # a prompt is kept for a while for a decoder that never comes; after a 500 the pair would be left out
            await in_trouble(dies, gateway, f"{wire}, of its decoder,", faults=("refuse", "error_503"))
        asking = []
        for number in range(2):  # each decoder gets one
            path, body = asked("chat", f"{wire}, {number}: killed. " + LONG, True)
            asking.append(asyncio.ensure_future(gateway.client.post(path, json=body)))
        await is_loaded(slow, 2)
        dies.process.kill()
        for answer in await asyncio.gather(*asking):
            assert answer.status_code == 200 and "broke off" not in answer.text, answer.text
            assert answer.headers["x-hitherto-replica"] == f"127.0.0.1:{decoder.port}"
        await nothing_is_left(gateway, *([slow] if wire == "sglang" else []))


@pytest.mark.parametrize("wire", SIDES)
async def test_a_client_that_leaves_is_left_by_both_engines(engines, wire):
    slow, decoder = engines[wire].slow, engines[wire].decoder
    before = await rooms_open(slow)
    async with running(*flags_of(wire, [slow], [decoder])) as gateway:
        await gateway.ready_for_legs(2)
        path, body = asked("chat", f"{wire}: left. " + LONG, True)
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
    of = engines["sglang"]
    sides = ([of.slow, of.prefiller], [of.decoder])
    async with running(*flags_of("sglang", *sides)) as gateway:
        await gateway.ready_for_legs(3)
        asked_of = [asked("chat", f"{stopped}, {number}: stopped. " + LONG, True) for number in range(2)]
        asking = asyncio.gather(*[gateway.client.post(path, json=body) for path, body in asked_of])
        await is_loaded(of.slow, 1)
        halted = of.slow if stopped == "prefill" else of.decoder
        halted.process.send_signal(signal.SIGSTOP)
        try:
            if stopped == "decode":  # there is no other: it goes on when that does
                await gateway.until(lambda status: any(one["state"] != "ready" for one in status["replicas"]))
                halted.process.send_signal(signal.SIGCONT)
            for answer in await asking:  # each prefiller got one
                assert answer.status_code == 200 and "broke off" not in answer.text, answer.text
        finally:
            halted.process.send_signal(signal.SIGCONT)
        await nothing_is_left(gateway, of.slow, of.prefiller)


async def test_two_gateways_count_both_legs_in_one_ledger(engines, start_redis):
    prefiller, decoder = engines["sglang"].prefiller, engines["sglang"].decoder
    server = start_redis()
    flags = (*flags_of("sglang", [prefiller], [decoder]), "--redis-url", server.url)
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
            await nothing_is_left(gateway, prefiller)
        with server.client() as client:
            async with asyncio.timeout(10):
                while client.hgetall("hitherto:1:default:{pool}:load"):
                    await asyncio.sleep(0.02)


async def test_another_proxy_is_told_that_requests_in_two_legs_pass_here(engines, single):
    """`/decide` names one replica, and nobody could send these engines a request by that."""
    prefiller, decoder = engines["sglang"].prefiller, engines["sglang"].decoder
    path, body = asked("chat", "Decided. " + TEXT * 20, False)
    flags = flags_of("sglang", [prefiller], [decoder])
    async with running(*flags) as gateway:
        await gateway.ready_for_legs(2)
        refused = await gateway.admin.post("/decide", params={"path": path}, json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (501, "takes_two_legs")
        assert "/decide names one replica" in error["message"] and "to the gateway itself" in error["message"]
        assert (await gateway.client.post(path, json=body)).status_code == 200, "which has its own way"
        await nothing_is_left(gateway, prefiller)
    async with running(*flags[:1], single.url, *flags[1:]) as gateway:
        await gateway.ready_for_legs(3)
        decided = (await gateway.admin.post("/decide", params={"path": path}, json=body)).json()
        assert decided["url"] == single.url and decided["candidates"] == [decided["replica"]]
        await gateway.admin.post(f"/decide/{decided['id']}/done")
        again = {"path": path, "exclude": decided["replica"]}
        assert (await gateway.admin.post("/decide", params=again, json=body)).status_code == 501
        await nothing_is_left(gateway, prefiller)
