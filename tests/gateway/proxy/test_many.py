"""A fleet of many is weighed as arrays, and nobody can tell."""

import random
from types import SimpleNamespace

import pytest

from cachemap import CacheMap
from gateway.models import Models
from gateway.prompt import Prompt
from gateway.prompt.pipeline import Pipeline
from gateway.proxy.proxy import Proxy
from policies import CostGroup, Ledger, Roster, Router, make, router

from .stack import backend_for, nothing_new

COUNT = 40


def fleet(policy="least_time"):
    proxy = Proxy(
        models=Models.of(Pipeline(None, "m", 16)), router=Router(make(policy), CacheMap(1 << 24), Ledger(), CostGroup()), metrics=None,
        retries=2, request_timeout=5, idle_timeout=5, response_headers=True, replicas={}, on_traffic=None, ask_models=nothing_new,
    )  # fmt: skip
    for number in range(COUNT):
        backend_for(proxy, 9000 + number)
    for backend in proxy.backends.values():
        proxy.router.map.observed(backend.slot, True)
    return proxy


def asker(rng, chains, proxy):
    chain = rng.choice(chains)[: rng.randrange(2, 60)]
    prompt = Prompt("/v1/completions", "m", tokens=16 * len(chain) + 3, hashes=chain)
    tried = tuple(rng.sample([*proxy.backends.values()], 2)) if rng.random() < 0.2 else ()
    return SimpleNamespace(prompt=prompt, tried=tried)


def lived(policy="least_time"):
    """Where each of many requests went, with what overlap; events of what each leaves behind come at once."""
    rng, proxy = random.Random(6), fleet(policy)
    chains = [[rng.randrange(1, 1 << 63) for _ in range(60)] for _ in range(12)]
    for chain in chains:
        chain[:4] = chains[0][:4]
    told, rosters, running = [], 0, []
    for number in range(300):
        one = asker(rng, chains, proxy)
        now, place = number * 0.01, proxy.router
        demand = proxy.placing.demand(one.prompt, now)
        demand.draw = rng.random()
        asked = place.evaluate(demand, proxy.eligible.targets(one.prompt, one.tried), now)
        rosters += isinstance(asked.candidates, Roster)
        placement = place.commit(asked, now)
        told.append((placement.candidate.replica, placement.overlap, placement.reservation.uncached))
        tier = "cpu" if number in range(100, 110) else "gpu"
        slot = placement.candidate.slot
        proxy.router.map.store(slot, one.prompt.hashes, [h + slot for h in one.prompt.hashes], tier)
        running.append(placement.reservation)
        if rng.random() < 0.7:
            proxy.router.ledger.first_byte(rng.choice(running), number * 0.01)
        if len(running) > 60:
            proxy.router.ledger.release(running.pop(rng.randrange(60)))
        if number == 200:
            proxy.remove(f"127.0.0.1:{9000 + 7}")
    return told, rosters


@pytest.mark.parametrize("policy", ["least_time", "overlap_cost", "prefix_affinity", "round_robin"])
def test_requests_go_where_they_would_go_one_by_one(policy, monkeypatch):
    many, rosters = lived(policy)
    monkeypatch.setattr(router, "MANY", 1 << 30)
    assert (many, 0) == lived(policy) and rosters > 200
    assert sum(overlap > 0 for _, overlap, _ in many) > 100
