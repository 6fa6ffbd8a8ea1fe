"""Cached tokens as predicted, against those that the engines report.

The engines' caches are a third of what the talks need, so blocks are evicted all the time.
"""

import asyncio
import json
from hashlib import sha256

import pytest

from ..gateway.running import predicted
from . import traffic
from .engines import gateway
from .pd import WAYS as APIS
from .pd import asked
from .traffic import MODELS, WAYS, cached, caught_up, drive, exactly, mixed, talking

REQUESTS = 160


@pytest.fixture
def witnesses(engines, witness_of):
    return {engine.id: witness_of(engine) for engine in engines}


def explained(one: traffic.Outcome, witness) -> None:
    """What was reported was true while the request was on its way; what was predicted was, then or just before."""
    assert one.cached in one.held(witness), one
    late = next((early for early in (0, 0.1, 0.25, 0.5, 1, 4, 60) if one.predicted in one.held(witness, early)), None)
    assert late is not None and late <= traffic.LATE_SECONDS, f"last true {late} s before it was asked, if ever: {one}"


@pytest.mark.exact
async def test_every_prediction_is_exact_once_events_have_come(engines, witnesses):
    before = {name: len(witness.steps) for name, witness in witnesses.items()}
    async with gateway(*engines, policy="random") as process:
        outcomes = await exactly(process, REQUESTS, mixed, witnesses=witnesses.values())
    for name, witness in witnesses.items():
        mine = [one for one in outcomes if one.replica == name]
        evicted = sum(len(step.removed) for step in witness.steps[before[name] :])
        assert len(mine) > REQUESTS / 4 and evicted > engines[0].blocks, (len(mine), evicted)
    stored = [next(event for event in one.events if event["type"] == "BlockStored") for one in witnesses.values()]
    assert {type(event["block_hashes"][0]) for event in stored} == {int, bytes}
    hits = [one for one in outcomes if one.cached]
    assert len(hits) > REQUESTS / 3
    assert {one.way for one in hits} == set(WAYS)
    assert {one.model for one in hits} == set(MODELS) and {one.salt for one in hits} == {None, "a", "b"}


@pytest.mark.parametrize("clients, least_equal, most_wrong", [(1, 0.96, 0.01), (4, 0.85, 0.05), (8, 0.8, 0.1)])
async def test_what_differs_changed_on_the_way(engines, witnesses, clients, least_equal, most_wrong):
    """Without waiting for events. Between choice and admission pass a few steps of the engine, in which running
    requests take blocks (8 requests alone fill both caches); nobody can know which before they do, and events tell it a
    step later. Seen with 0.28.0 on 2 cores with other work: 100 % equal with one client, 95 to 97 % with 4, 90 to 91 %
    with 8."""
    async with gateway(*engines) as process:
        outcomes = await drive(process, REQUESTS, mixed, talks=16, clients=clients, seed=clients)
    for witness in witnesses.values():
        await asyncio.to_thread(witness.settled)
    for one in outcomes:
        explained(one, witnesses[one.replica])
    error = sum(abs(one.predicted - one.cached) for one in outcomes) / sum(one.prompt for one in outcomes)
    print(f"{clients} clients: {traffic.share_equal(outcomes):.1%} equal, {error:.2%} of prompt tokens wrong")
    assert traffic.share_equal(outcomes) >= least_equal and error <= most_wrong, traffic.wrong(outcomes)


@pytest.mark.exact
@pytest.mark.parametrize("way", APIS)
async def test_keys_with_a_salt_share_nothing(engine, tmp_path, way):
    """The gateway writes the salt: the engine keeps tenants apart, and each finds what was predicted, in every API."""
    salts = {name: f"{name}-0123456789abcd-{way}" for name in "ab"}
    keys = tmp_path / "keys.jsonl"
    known = [
        {"name": name, "sha256": sha256(name.encode()).hexdigest(), "cache_salt": salt} for name, salt in salts.items()
    ]
    keys.write_text("\n".join(map(json.dumps, known)))
    path, body = asked(way, "one prompt for all tenants " * 20, stream=False, most=1)
    async with gateway(engine, api_keys=keys) as process:
        told = []
        for name, given in (("a", None), ("b", None), ("a", None), ("b", salts["a"]), ("b", None)):
            salted = body | ({"cache_salt": given} if given else {})
            answer = await process.client.post(path, json=salted, headers={"x-api-key": name})
            assert answer.status_code == 200, answer.text
            told.append((predicted(answer), cached(answer)))
    full = told[2]
    assert told == [(0, 0), (0, 0), full, (0, 0), full] and full[0] == full[1] > 0


@pytest.mark.parametrize("way", WAYS)
async def test_several_choices_leave_the_map_exact(engine, witnesses, way):
    """With n choices the engine reports of one of them; the requests that follow are exact."""
    witness = witnesses[engine.id]
    async with gateway(engine) as process:
        await drive(process, 12, talking(ways=[way], choices=3), talks=3, seed=5)
        await caught_up(process, witness)
        outcomes = await exactly(process, 6, talking(ways=[way]), talks=2, seed=6, witnesses=[witness])
    assert any(one.cached for one in outcomes)
