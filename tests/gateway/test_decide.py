"""`POST /decide`: the gateway decides and counts, the bytes go by the caller's own way; over real sockets to real
engines."""

import asyncio
import os
import signal

import httpx
import pytest
import pytest_asyncio

from .running import Running, running, until
from .test_gateways import joined, together

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"


def chat(text: str, **fields) -> dict:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


async def decide(gateway: Running, body: dict, **query) -> dict:
    answer = await gateway.admin.post("/decide", params=query, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def tell(gateway: Running, decided: dict, what: str, content: bytes = b"") -> int:
    headers = {"Content-Type": "application/json"} if content else {}
    answer = await gateway.admin.post(f"/decide/{decided['id']}/{what}", content=content, headers=headers)
    return answer.status_code


async def pass_on(gateway: Running, body: dict) -> tuple[dict, int]:
    """What a proxy does that keeps to the rules; gives the decision and the engine's own count of cached tokens."""
    decided = await decide(gateway, body)
    async with httpx.AsyncClient() as own:
        answer = await own.post(decided["url"] + PATH, json=body, headers=decided["headers"])
    assert await tell(gateway, decided, "done", answer.content) == 200
    return decided, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def refused(answer: httpx.Response) -> tuple[int, str | None]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return answer.status_code, error["code"]


def counted(status: dict) -> dict[str, tuple[int, bool, bool]]:
    """By replica: requests there, whether any tokens wait for prefill, whether any stream."""
    return {
        one["id"]: (one["inflight"], one["prefill_tokens"] > 0, one["context_tokens"] > 0) for one in status["replicas"]
    }


IDLE = (0, False, False)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["one process", "two workers"])
async def gateway(engines, request):
    """One for all tests, each of which leaves it idle."""
    workers = ("--workers", "2") if request.param == "two workers" else ()
    async with running("--model", "sim", "--replica-url", *(one.url for one in engines), *workers) as one:
        await one.ready(2)
        yield one


# several hear of each other's decisions a moment later
ONE = pytest.mark.parametrize("gateway", ["one process"], indirect=True)


@ONE
async def test_conversations_go_where_their_prefix_is_and_the_engine_agrees(gateway):
    homes = {}
    for turn in range(4):
        for name in "abc":
            decided, cached = await pass_on(gateway, chat(f"I am {name}. " * (60 + 20 * turn)))
            assert decided["cached_tokens"] == cached
            assert f"{cached} of {decided['tokens']} prompt tokens held" in decided["reason"]
            assert decided["url"] == "http://" + decided["replica"] and decided["headers"] == {}
            assert decided["candidates"][0] == decided["replica"] and len(set(decided["candidates"])) == 2
            if turn:
                assert decided["replica"] == homes[name] and cached > 100
            homes[name] = decided["replica"]
    await gateway.until(lambda status: set(counted(status).values()) == {IDLE})
    await gateway.counts(12.0, "hitherto_decisions_total", outcome="done")
    assert await gateway.counted("hitherto_decisions_total", outcome="expired") == 0
    for wrong in ("over", "under"):
        assert await gateway.counted("hitherto_predictions_total", outcome=wrong) == 0


@ONE
async def test_load_is_counted_from_the_choice_to_the_end_that_is_told(gateway):
    first = await decide(gateway, chat("Count. " * 400, stream=True))
    second = await decide(gateway, chat("Again. " * 400, stream=True))
    assert second["replica"] != first["replica"]  # the second sees the first, though both engines are idle
    a, b = first["replica"], second["replica"]
    assert counted(await gateway.status()) == {a: (1, True, False), b: (1, True, False)}
    for _ in range(2):
        assert await tell(gateway, first, "first_byte") == 200
        assert counted(await gateway.status()) == {a: (1, False, True), b: (1, True, False)}
    assert await tell(gateway, first, "done") == 200
    assert counted(await gateway.status()) == {a: IDLE, b: (1, True, False)}
    for what in ("first_byte", "done"):
        assert refused(await gateway.admin.post(f"/decide/{first['id']}/{what}")) == (404, "unknown_decision")
    assert await tell(gateway, second, "done") == 200  # it failed before its first byte
    assert set(counted(await gateway.status()).values()) == {IDLE}
    await gateway.counts(0, "hitherto_reservations")


async def test_what_a_dead_caller_left_is_taken_off(gateway):
    for _ in range(5):
        decided = await decide(gateway, chat("Is anybody there? " * 40, stream=True), lease_s=2)
    assert decided["lease_seconds"] == 2
    assert sum(one["inflight"] for one in (await gateway.status())["replicas"]) == 5
    await gateway.until(lambda status: set(counted(status).values()) == {IDLE})
    assert refused(await gateway.admin.post(f"/decide/{decided['id']}/done")) == (404, "unknown_decision")
    await gateway.counts(5.0, "hitherto_decisions_total", outcome="expired")


async def test_words_renew_the_lease(gateway):
    """One that is told something all the time outlives one of which nothing is heard."""
    expired = await gateway.counted("hitherto_decisions_total", outcome="expired")
    now = asyncio.get_running_loop().time
    while True:
        kept = await decide(gateway, chat("A long answer", stream=True), lease_s=2)
        left = await decide(gateway, chat("Another one", stream=True), lease_s=2)
        expired += 1
        told, pause = now(), 0.0
        while await tell(gateway, kept, "first_byte") == 200:
            told, pause = now(), max(pause, now() - told)
            if await gateway.counted("hitherto_decisions_total", outcome="expired") == expired:
                break
        pause = max(pause, now() - told)
        ended = [await tell(gateway, one, "done") for one in (left, kept)]
        if pause < 2:
            break
        expired = await gateway.counted("hitherto_decisions_total", outcome="expired")
        # else the machine did not let us say anything for as long as a lease
    assert ended == [404, 200]


async def test_refusals_have_the_clients_own_format(gateway):
    ask = gateway.admin.post
    broken = await ask("/decide", content=b"{", headers={"Content-Type": "application/json"})
    assert refused(broken) == (400, "bad_request")
    assert refused(await ask("/decide", json={"model": "sim"}))[0] == 400
    assert refused(await ask("/decide", json=chat("x", stream=[])))[0] == 400
    assert refused(await ask("/decide", json={**chat("x"), "model": "gpt-9"})) == (404, "model_not_found")
    for lease in ("0", "-3", "soon", "nan", "1e9"):
        answer = await ask("/decide", params={"lease_s": lease}, json=chat("x"))
        assert refused(answer) == (400, "invalid_lease") and lease in answer.text
    both = [one["id"] for one in (await gateway.status())["replicas"]]
    assert refused(await ask("/decide", params={"exclude": both}, json=chat("x"))) == (503, "no_replica_ready")
    assert refused(await ask("/decide/0-nobody/done")) == (404, "unknown_decision")
    assert refused(await gateway.admin.get("/decide"))[0] == 405
    await gateway.counts(0, "hitherto_reservations")


async def test_with_redis_a_decision_counts_in_the_ledger_of_all_gateways(engines, redis_server):
    urls = [one.url for one in engines]
    async with running("--model", "sim", "--redis-url", redis_server.url, "--replica-url", *urls) as gateway:
        await gateway.ready(2)
        await joined(gateway)
        client = redis_server.client()

        async def counted(requests: int) -> None:
            await until(lambda: sum(one[0] for one in together(client).values()) == requests)

        made = await decide(gateway, chat("Together. " * 40, stream=True))
        await decide(gateway, chat("Alone. " * 40, stream=True), lease_s=2)
        await counted(2)
        assert await tell(gateway, made, "done") == 200
        await counted(1)
        await counted(0)
        async with asyncio.timeout(60):
            # On a busy machine the ledger may answer too late for one of them.
            while not await gateway.counted("hitherto_shared_decisions_total", outcome="shared"):
                await tell(gateway, await decide(gateway, chat("Together. " * 40)), "done")


@pytest.mark.parametrize("gateway", ["two workers"], indirect=True)
async def test_a_worker_that_dies_takes_what_it_counted(gateway):
    before = (await gateway.status())["workers"][0]["pid"]
    made = [await decide(gateway, chat(f"{number} " * 40, stream=True)) for number in range(4)]
    assert sorted(one["id"].split("-")[0] for one in made) == ["0", "0", "1", "1"]
    os.kill(before, signal.SIGKILL)
    await gateway.until(lambda status: sum(one["inflight"] for one in status["replicas"]) == 2)
    await gateway.until(
        lambda status: all(one["ready"] for one in status["workers"]) and status["workers"][0]["pid"] != before
    )
    assert [await tell(gateway, one, "done") for one in made] == [
        404 if one["id"].startswith("0-") else 200 for one in made
    ]
    assert set(counted(await gateway.status()).values()) == {IDLE}
