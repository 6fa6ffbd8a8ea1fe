"""Engines that could not fetch a prompt's cache from each other: they are not paired, and everybody is told why."""

import httpx
import pytest

from gateway.cli import main

from .http.talk import free_port
from .running import running
from .test_legs import TEXT, asked, words


@pytest.fixture(scope="module")
def quartet(start_engine):
    """A prefiller, a decoder that cannot fetch from it, one that can, and an engine without a connector."""
    made = [
        start_engine("--kv-connector"),
        start_engine("--kv-connector", "--kv-cache-dtype", "fp8"),
        start_engine("--kv-connector"),
        start_engine(),
    ]
    return [one.wait() for one in made]


def urls(*engines):
    return [f"{one.url}#role={role}" for one, role in engines]


async def test_two_engines_of_unlike_cache_types_refuse_the_transfer(quartet):
    """What the gateway is to know before: without it, every request to them costs a first leg and a 500."""
    prefiller, unlike, alike, _ = quartet
    path, body = asked("completions", "Refused. " + TEXT * 20, False)
    kept = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    async with httpx.AsyncClient() as client:
        for decoder, status in ((unlike, 500), (alike, 200)):
            first = await client.post(prefiller.url + path, json=body | kept)
            parameters = {"kv_transfer_params": first.json()["kv_transfer_params"]}
            assert (await client.post(decoder.url + path, json=body | parameters)).status_code == status


async def test_unlike_engines_get_whole_requests_and_no_transfer_is_tried(quartet):
    prefiller, unlike, _, single = quartet
    replicas = urls((prefiller, "prefill"), (unlike, "decode"))
    async with running("--replica-url", *replicas, "--policy", "round_robin") as gateway:
        await gateway.ready_for_legs(2)
        async with httpx.AsyncClient(base_url=single.url) as alone:
            for number in range(3):
                path, body = asked("chat", f"Unlike {number}. " + TEXT * 20, False)
                answer = await gateway.client.post(path, json=body)
                assert words(answer) == words(await alone.post(path, json=body))
                assert answer.headers["x-hitherto-replica"] == f"127.0.0.1:{unlike.port}"
        status = await gateway.status()
        assert status["legs"] == {"apart": 0, "whole": 3, "prefill": {}, "decode": {}}
        why = "kv_cache_dtype is auto in one and fp8 in the other"
        for one in status["replicas"]:
            [said] = [problem for problem in one["problems"] if "cannot fetch" in problem]
            assert why in said and f":{unlike.port} cannot fetch what 127.0.0.1:{prefiller.port}" in said
        assert b"".join(gateway.log).count(why.encode()) == 1, "said once"
        assert await gateway.counted("hitherto_retries_total") == 0
        told = (await gateway.admin.post("/explain", params={"path": path}, json=body)).json()
        assert told["legs"] is None and told["other_legs"] is None


async def test_of_several_decoders_the_one_that_can_fetch_is_paired(quartet):
    prefiller, unlike, alike, single = quartet
    replicas = urls((prefiller, "prefill"), (unlike, "decode"), (alike, "decode"), (single, "decode"))
    async with running("--replica-url", *replicas, "--policy", "round_robin") as gateway:
        await gateway.ready_for_legs(4)
        for number in range(6):
            path, body = asked("chat", f"Of three {number}. " + TEXT * 20, False)
            assert (await gateway.client.post(path, json=body)).status_code == 200
        status = await gateway.status()
        assert status["legs"]["apart"] == status["legs"]["decode"]["complete"] > 0
        assert await gateway.counted("hitherto_retries_total") == 0
        log = b"".join(gateway.log)
        assert log.count(b"kv_cache_dtype is auto") == 1 and log.count(b"the decoder has no connector for NIXL") == 1
        problems = {one["url"]: " ".join(one["problems"]) for one in status["replicas"]}
        assert "cannot fetch" not in problems[alike.url] and "no connector" in problems[single.url]


def test_doctor_names_what_differs_and_tries_no_such_transfer(quartet, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for port in ("HITHERTO_PORT", "HITHERTO_ADMIN_PORT"):
        monkeypatch.setenv(port, str(free_port()))
    prefiller, unlike, alike, _ = quartet
    replicas = urls((prefiller, "prefill"), (unlike, "decode"))
    assert main(["doctor", "--replica-url", *replicas]) == 1
    out = capsys.readouterr().out
    assert "fail  roles" in out and "no pair of sim is left" in out and "kv_cache_dtype is auto in one and fp8" in out
    assert "transfer 127.0.0.1" not in out
    replicas = urls((prefiller, "prefill"), (unlike, "decode"), (alike, "decode"))
    assert main(["doctor", "--replica-url", *replicas]) == 0
    out = capsys.readouterr().out
    assert "warn  roles" in out and f"ok    transfer 127.0.0.1:{prefiller.port}" in out


@pytest.mark.parametrize(
    "wire, unlike",
    [("nixl", ("--kv-cache-dtype", "fp8")), ("nixl", ("--block-size", "32")), ("llm-d", ("--block-size", "32"))],
    ids=["cache type", "blocks", "blocks, behind sidecars"],
)
async def test_pairs_of_two_kinds_have_legs_among_themselves(start_engine, wire, unlike):
    made = [start_engine("--kv-connector", one, *more) for more in ((), unlike) for one in ("nixl", wire)]
    p, d, q, e = [one.wait() for one in made]
    sides = (p, "prefill"), (d, "decode"), (q, "prefill"), (e, "decode")
    replicas = urls(*[(one, f"{role},transfer={wire}") for one, role in sides])
    async with running("--replica-url", *replicas, "--policy", "round_robin") as gateway:
        await gateway.ready_for_legs(4, variants=2 if "--block-size" in unlike else 1)
        answers = []
        for number in range(8):
            path, body = asked("chat", f"Of two pairs {number}. " + TEXT * 20, False)
            answers.append(await gateway.client.post(path, json=body))
            words(answers[-1])
        status = await gateway.status()
        assert status["legs"] == {"apart": 8, "whole": 0, "prefill": {"complete": 8}, "decode": {"complete": 8}}
        # Which engines are alike may still be being found out when the first request comes.
        wrote = [one.headers["x-hitherto-replica"] for one in answers[2:]]
        assert wrote.count(f"127.0.0.1:{d.port}") == wrote.count(f"127.0.0.1:{e.port}") == 3
        compared = 0 if wire == "llm-d" else 1  # of each: nobody tells what a sidecar's prefiller had cached
        assert await gateway.counted("hitherto_predictions_total", outcome="equal") == 8 * compared
        assert await gateway.counted("hitherto_retries_total") == 0
        again = await gateway.client.post(path, json=body)  # its decoder holds it now, in blocks of its own size
        assert again.status_code == 200
        assert await gateway.counted("hitherto_predictions_total", outcome="equal") == 9 * compared
