"""API keys in whole gateways: engines that ask for a key of their own, workers, and settings that cannot be."""

import asyncio
import hashlib
import json
import re
import time
from collections import Counter
from contextlib import AsyncExitStack

import httpx
import pytest
import pytest_asyncio

from gateway.cli import main

from .running import running

KEYS = {"one": "sk-one-0123456789", "two": "sk-two-0123456789"}
ENGINE_KEY = "the-engines-own-key"
SECRET = {"HITHERTO_ENGINE_API_KEY": ENGINE_KEY}
CHAT = {"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
MESSAGES = {"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}


def line(name: str, **fields) -> str:
    return "- " + json.dumps({"name": name, "sha256": hashlib.sha256(KEYS[name].encode()).hexdigest(), **fields})


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("\n".join([line("one"), line("two", models=["another"])]))
    return file


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine("--api-key", ENGINE_KEY).wait()


@pytest.fixture(scope="module")
def given(engine, tmp_path_factory):
    """Flags for a gateway before that engine, with its key in a file: the environment is as of any other test."""
    secret = tmp_path_factory.mktemp("secrets") / "engine-key"
    secret.write_text(ENGINE_KEY)
    return ("--replica-url", engine.url, "--engine-api-key", f"@{secret}")


@pytest.mark.parametrize("workers", [1, 2])
async def test_keys_in_front_and_the_engines_own_behind(file, engine, workers):
    arguments = ("--api-keys", str(file), "--replica-url", engine.url, "--workers", str(workers), "--access-log")
    arguments += ("--usage-log", str(usage := file.with_name("usage")))
    async with running(*arguments, env=SECRET) as gateway:
        status = await gateway.ready(1)
        # asked with the key, the engine told all of itself
        replica = status["replicas"][0]
        assert (replica["models"], replica["problems"]) == (["sim"], [])
        await gateway.until(lambda status: status["replicas"][0]["running"] is not None)  # so did its metrics
        assert (status["api_keys"]["tenants"], status["api_keys"]["problem"]) == (2, "")
        post = gateway.client.post
        for headers in (bearer("one"), {"x-api-key": KEYS["one"]}):
            for path in ("/v1/chat/completions", "/v1/messages"):
                assert (await post(path, json=CHAT, headers=headers)).status_code == 200
        assert (await post("/v1/chat/completions", json=CHAT)).status_code == 401
        assert (await post("/v1/messages", json=MESSAGES, headers={"x-api-key": "wrong"})).json() == {
            "type": "error",
            "error": {
                "type": "authentication_error",
                "message": "this API key is not known here: send `Authorization: Bearer KEY` or `x-api-key: KEY` with the one that you were given",
            },
        }
        assert (await post("/v1/chat/completions", json=CHAT, headers=bearer("two"))).status_code == 403
        assert (await gateway.client.get("/health")).status_code == 200
        assert await gateway.counted("hitherto_tenant_requests_total", tenant="one", status="2xx") == 4
        assert await gateway.counted("hitherto_tenant_tokens_total", tenant="one", kind="output") == 16
        file.write_text("no keys")
        await gateway.until(lambda status: status["api_keys"]["problem"])
        assert await gateway.counted("hitherto_unusable_files", file="api_keys") >= 1
        file.write_text(line("two"))  # in all workers, though nobody tells them

        async def both_changed():
            while any([(await post("/v1/chat/completions", json=CHAT, headers=bearer("one"))).status_code == 200 for _ in range(8)]):  # fmt: skip
                await asyncio.sleep(0.05)

        await asyncio.wait_for(both_changed(), 20)
        assert (await post("/v1/chat/completions", json=CHAT, headers=bearer("two"))).status_code == 200
        told = json.dumps(await gateway.status()) + (await gateway.admin.get("/metrics")).text
        said = b"".join(gateway.log).decode() + told
    lines = [json.loads(line) for line in usage.read_text().splitlines()]
    counted = Counter((one["key"], one["status"], one["output_tokens"]) for one in lines)
    assert counted["one", 200, 4] >= 4 and counted["two", 403, 0] == 1 and counted[None, 401, 0] >= 2
    for key in (*KEYS.values(), ENGINE_KEY):
        assert key not in said + usage.read_text()


async def at_the_beginning_of_a_minute():
    """Of the clock, so that what follows is in one window of the limits."""
    if (left := 60 - time.time() % 60) < 15:
        await asyncio.sleep(left + 0.1)


@pytest.mark.parametrize("workers", [1, 2])
async def test_limits_are_of_all_gateways_and_workers_together(file, given, workers, start_redis):
    file.write_text("\n".join([line("one", requests_per_minute=20, concurrent_requests=50), line("two")]))
    arguments = ["--api-keys", str(file), *given]
    async with AsyncExitStack() as stack:
        if workers == 1:
            arguments += ["--redis-url", start_redis().url]
            gateways = [await stack.enter_async_context(running(*arguments, forked=one)) for one in (True, False)]
        else:
            gateways = [await stack.enter_async_context(running(*arguments, "--workers", "2"))]
        for gateway in gateways:
            await gateway.ready(1)
            await gateway.until(lambda status: status["api_keys"]["limits"]["joined"])
        await at_the_beginning_of_a_minute()
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.url, timeout=30))
            for gateway in gateways
            for _ in range(4)  # each has a connection of its own, and workers share them
        ]
        statuses = []
        for client in clients * (32 // len(clients)):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=bearer("one"))
            statuses.append(answer.status_code)
            assert answer.headers["x-ratelimit-limit-requests"] == "20"
        assert {*statuses} <= {200, 429}
        # One that Redis decides too late is decided by what it told last.
        assert 20 <= statuses.count(200) <= 22
        assert (await clients[0].post("/v1/chat/completions", json=CHAT, headers=bearer("two"))).status_code == 200


SALTS = {name: f"{name}-0123456789-abc" for name in KEYS}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def fields(path: str) -> dict:
    """Those of a request whose prompt shares no cache with that of another path."""
    prompt = f"{path} " + "The quality of mercy is not strained; it droppeth as the gentle rain from heaven. " * 40
    if path == "/v1/completions":
        return {"prompt": prompt, "max_tokens": 2}
    if path == "/v1/responses":
        return {"input": prompt, "max_output_tokens": 16}
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2}


def cached(usage: dict) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return usage["cache_read_input_tokens"] if details is None else details["cached_tokens"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def salted(given, tmp_path_factory):
    """A gateway with two tenants, each with a cache of its own."""
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text("\n".join(line(name, cache_salt=salt) for name, salt in SALTS.items()))
    async with running("--api-keys", str(file), *given) as gateway:
        await gateway.until(lambda status: status["replicas"][0]["tokenizer"].startswith("the gateway's"))
        yield gateway


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", PATHS)
async def test_tenants_with_a_cache_of_their_own_find_nothing_of_others_as_predicted(salted, path):
    """Two keys of one salt share what they cached, another salt shares nothing, whatever it says its salt is."""

    async def ask(name: str, **more) -> tuple[int, int]:
        """Tokens that were predicted to be cached, and that were."""
        body = {"model": "sim", **fields(path), **more}
        answer = await salted.client.post(path, json=body, headers=bearer(name))
        assert answer.status_code == 200, answer.text
        return int(answer.headers["x-hitherto-cached-tokens"]), cached(answer.json()["usage"])

    found = [await ask(name) for name in ("one", "two", "one", "two")]
    assert found[:2] == [(0, 0), (0, 0)]
    assert found[2] == found[3] and found[2][0] == found[2][1] > 400
    assert await ask("two", cache_salt=SALTS["one"]) == (0, 0)
    assert await ask("two", cache_salt=SALTS["one"]) == found[2]
    assert await salted.counted("hitherto_predictions_total", outcome="over") == 0
    assert await salted.counted("hitherto_predictions_total", outcome="under") == 0
    refused = await salted.client.post(path, content=b"[]", headers=bearer("one"))
    assert refused.status_code == 400 and "JSON object" in refused.text


def test_what_is_wrong_with_the_settings_is_said_with_a_remedy(capsys, tmp_path, file, monkeypatch):
    def told(*argv: str) -> str:
        assert main(["serve", "--replica-url", "http://127.0.0.1:1", *argv]) == 2
        return capsys.readouterr().err

    assert re.search(
        r"flag --api-keys: \S*/none cannot be read: No such file.*key new", told("--api-keys", str(tmp_path / "none"))
    )
    file.write_text("- {name: a}")
    assert re.search(r"flag --api-keys: \S*keys.yaml:1: sha256: is missing", told("--api-keys", str(file)))
    file.write_text(line("one", **{"class": "premum"}))
    scheduler = "{qos_classes: [{name: premium, reserved_fraction: 0.1, priority: 100}]}"
    said = told("--api-keys", str(file), "--scheduler", scheduler)
    assert "keys.yaml:1: class: there is no class 'premum' in scheduler.qos_classes. Known: premium" in said
    assert "flag --usage-log: /nowhere/x cannot be used" in told("--usage-log", "/nowhere/x")
    said = told("--engine-api-key", ENGINE_KEY)
    assert "everybody on this machine can read a command line" in said and ENGINE_KEY not in said
    assert "No such file" in told("--engine-api-key", f"@{tmp_path / 'none'}")
    assert "flag --forward-api-keys: clients' keys are passed on anyway" in told("--forward-api-keys")
    monkeypatch.setenv("HITHERTO_ENGINE_API_KEY", "two words")
    said = told()
    assert "no spaces" in said and "two words" not in said


def test_who_only_looks_at_the_settings_makes_no_usage_log(capsys, tmp_path):
    """It would have the caller's owner and mode, and the gateway's own user might not write there."""
    log = tmp_path / "usage"
    assert main(["config", "--usage-log", str(log)]) == 0
    assert not log.exists()
    assert main(["config", "--usage-log", str(tmp_path)]) == 2


def test_the_engines_key_is_not_shown(capsys, monkeypatch):
    monkeypatch.setenv("HITHERTO_ENGINE_API_KEY", ENGINE_KEY)
    assert main(["config"]) == 0
    assert ENGINE_KEY not in capsys.readouterr().out
