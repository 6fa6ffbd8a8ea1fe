"""Cached tokens as predicted, against those that the engines report.

The engines' caches are a third of what the talks need, so blocks are evicted all the time.
"""

import asyncio
import json
from hashlib import sha256

import pytest

from .engines import gateway
from .traffic import LATE_SECONDS, WAYS, Outcome, Talk, caught_up, drive, events, mixed, share_equal, wrong
from .witness import Chains, Witness

REQUESTS = 160


@pytest.fixture
def witnesses(engines):
    chains = Chains()
    both = {engine.url.removeprefix("http://"): Witness(engine, chains) for engine in engines}
    yield both
    for witness in both.values():
        witness.close()


def explained(outcomes: list[Outcome], witnesses: dict[str, Witness]) -> None:
    """What was reported was true while the request was on its way; what was predicted was, then or just before."""
    for one in outcomes:
        witness = witnesses[one.replica]
        assert one.cached in one.held(witness), one
        late = next(
            (early for early in (0, 0.1, 0.25, 0.5, 1, 2, 4, 60) if one.predicted in one.held(witness, early)), None
        )
        assert late is not None and late <= LATE_SECONDS, f"last true {late} s before it was asked, if ever: {one}"


@pytest.mark.exact
async def test_every_prediction_is_exact_once_events_have_come(engines, witnesses):
    before = {name: len(witness.steps) for name, witness in witnesses.items()}
    async with gateway(*engines, policy="random") as process:
        outcomes = await drive(process, REQUESTS, mixed, between=lambda one: caught_up(process, witnesses[one.replica]))
    assert share_equal(outcomes) == 1, wrong(outcomes)
    for name, witness in witnesses.items():
        mine = [one for one in outcomes if one.replica == name]
        evicted = sum(len(step.removed) for step in witness.steps[before[name] :])
        assert len(mine) > REQUESTS / 4 and evicted > engines[0].blocks, (len(mine), evicted)
    hits = [one for one in outcomes if one.cached]
    assert len(hits) > REQUESTS / 3
    assert {one.way for one in hits} == set(WAYS)
    assert {one.model for one in hits} == {"tiny", "red", "blue"} and {one.salt for one in hits} == {None, "a", "b"}


@pytest.mark.parametrize("clients, least_equal, most_wrong", [(1, 0.96, 0.01), (4, 0.85, 0.05), (8, 0.8, 0.1)])
async def test_what_differs_changed_on_the_way(engines, witnesses, clients, least_equal, most_wrong):
    """Without waiting for events. Between choice and admission pass a few steps of the engine, in which running
    requests take blocks (8 requests alone fill both caches); nobody can know which before they do, and events tell it a
    step later. Seen with 0.28.0 on 2 cores with other work: 100 % equal with one client, 95 to 97 % with 4, 90 to 91 %
    with 8."""
    async with gateway(*engines) as process:
        outcomes = await drive(process, REQUESTS, mixed, talks=16, clients=clients, seed=clients)
        print(await events(process))
    for witness in witnesses.values():
        await asyncio.to_thread(witness.settled)
    explained(outcomes, witnesses)
    error = sum(abs(one.predicted - one.cached) for one in outcomes) / sum(one.prompt for one in outcomes)
    print(f"{clients} clients: {share_equal(outcomes):.1%} equal, {error:.2%} of prompt tokens wrong")
    assert share_equal(outcomes) >= least_equal and error <= most_wrong, wrong(outcomes)


async def test_tenants_and_adapters_share_nothing(engine):
    """The same words, for each model and salt: computed the first time, cached from the second on."""
    prompt = "one prompt for all of them " * 20
    combinations = [(model, salt) for model in ("tiny", "red", "blue") for salt in (None, "t1", "t2")]
    async with gateway(engine) as process:
        told = []
        for model, salt in combinations * 2:
            body = {"model": model, "prompt": prompt, "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
            answer = await process.client.post("/v1/completions", json=body)
            usage = answer.json()["usage"]
            told.append(
                (int(answer.headers["x-hitherto-cached-tokens"]), usage["prompt_tokens_details"]["cached_tokens"])
            )
    full = (usage["prompt_tokens"] - 1) // engine.block_size * engine.block_size
    assert told == [(0, 0)] * len(combinations) + [(full, full)] * len(combinations)


ESSAY = "one prompt for all tenants " * 20
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": ESSAY}], "max_tokens": 1},
    "/v1/completions": {"prompt": ESSAY, "max_tokens": 1},
    "/v1/responses": {"input": ESSAY, "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": ESSAY}], "max_tokens": 1},
}


@pytest.mark.exact
@pytest.mark.parametrize("path", ASKED)
async def test_keys_with_a_salt_share_nothing(engine, tmp_path, path):
    """The gateway writes the salt: the engine keeps tenants apart, and each finds what was predicted, in every API."""
    salts = {"a": f"a-0123456789abcd-{len(path)}", "b": f"b-0123456789abcd-{len(path)}"}
    keys = tmp_path / "keys.jsonl"
    known = [
        {"name": name, "sha256": sha256(name.encode()).hexdigest(), "cache_salt": salt} for name, salt in salts.items()
    ]
    keys.write_text("\n".join(map(json.dumps, known)))
    async with gateway(engine, api_keys=keys) as process:
        told = []
        for name, given in (("a", None), ("b", None), ("a", None), ("b", salts["a"]), ("b", None)):
            body = {"model": "tiny", **ASKED[path], **({"cache_salt": given} if given else {})}
            answer = await process.client.post(path, json=body, headers={"x-api-key": name})
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
            cached = usage["cache_read_input_tokens"] if details is None else details["cached_tokens"]
            told.append((int(answer.headers["x-hitherto-cached-tokens"]), cached))
    full = told[2]
    assert told == [(0, 0), (0, 0), full, (0, 0), full] and full[0] == full[1] > 0


@pytest.mark.parametrize("way", WAYS)
async def test_several_choices_leave_the_map_exact(engine, witnesses, way):
    """With n choices the engine reports of one of them; the requests that follow are exact."""
    witness = witnesses[engine.url.removeprefix("http://")]
    async with gateway(engine) as process:

        def several(dice):
            return Talk(dice, way, choices=3)

        await drive(process, 12, several, talks=3, seed=5)
        await caught_up(process, witness)
        outcomes = await drive(
            process, 6, lambda dice: Talk(dice, way), talks=2, seed=6, between=lambda _: caught_up(process, witness)
        )
    assert share_equal(outcomes) == 1, wrong(outcomes)
    assert any(one.cached for one in outcomes)
