"""Requests in two legs in the ledger of all gateways: several gateways' routers against one real Redis."""

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager

from cachemap import CacheMap
from cachemap.cluster.connect import RedisClients, parse
from gateway.proxy.disagg.legs import LegPlan
from gateway.proxy.placement.shared import SharedLedger
from policies import UNTIMED, CostGroup, Demand, Ledger, Router, Targets, make, two_legs
from policies.leg_rules import make_leg_rule
from replicas.engines import TRANSFERS
from tests.redis_server import Proxy

from .test_shared import SIZE, TOKENS, all_end, all_of, prompt, together, until

PREFILLERS, DECODERS = [f"10.0.0.{i}:80" for i in range(4)], [f"10.0.1.{i}:80" for i in range(2)]


class Legs:
    """What `Placing` does with both legs, and no more: every request has two."""

    def __init__(self, url, deadline=5.0, policy="least_time"):
        self.router = Router(make(policy), CacheMap(1 << 24), Ledger(), CostGroup(), leg_rule=make_leg_rule("always"))
        self.prefillers, self.decoders = [
            [self.router.add(name, self.router.map.attach(name, 1000, False)) for name in names]
            for names in (PREFILLERS, DECODERS)
        ]
        self.outcomes: Counter = Counter()
        cost, clients = getattr(self.router.policy, "cost", None), RedisClients(parse(url))
        count = lambda outcome, _: self.outcomes.update([outcome])  # noqa: E731
        self.shared = SharedLedger(clients, "test", self.router.ledger, cost, observe=count, deadline=deadline)
        self.open = []

    async def place(self, hashes=()):
        """One request: the replica of its first leg."""
        placed = asyncio.get_running_loop().create_future()
        demand = Demand(TOKENS, SIZE, hashes[0] if hashes else 0, now=UNTIMED, hashes=hashes, draw=random.random())
        evaluation = self.router.evaluate(demand, Targets(self.decoders), 0.0)
        chosen = two_legs.choose(self.router, evaluation, self.prefillers, self.decoders, 0.0)
        plan = LegPlan(chosen, TRANSFERS["nixl"], b"")
        first, second = plan.to_decide(evaluation)

        def answer(decided):
            made = plan.among(decided).chosen
            self.open += two_legs.commit(self.router, evaluation, made, 0.0, decided)[:2]
            placed.set_result(made.prefiller.replica)

        self.shared.decide_legs(first, second, answer)
        return await placed

    def end_all(self):
        for placement in self.open:
            self.router.first_token(placement, None)
            self.router.finish(placement)
        self.open = []


@asynccontextmanager
async def legs_of(server, count, **options):
    """That many of them, joined."""
    fleet = [Legs(server.url, **options) for _ in range(count)]
    for one in fleet:
        one.shared.start()
    try:
        await until(lambda: all(one.shared.joined for one in fleet))
        yield fleet
    finally:
        for one in fleet:
            await one.shared.stop()


async def test_first_legs_of_several_gateways_at_once_are_spread_as_if_of_one(start_redis, redis_binary):
    """By its own view each gateway would give its first one to any prefiller, and so on: some get twice what others."""
    server = start_redis(binary=redis_binary)
    async with legs_of(server, 4) as fleet:
        went = Counter(await asyncio.gather(*(fleet[n % 4].place(prompt(n + 1)) for n in range(64))))
        assert went == dict.fromkeys(PREFILLERS, 16)
        assert all(one.outcomes == {"shared": 32} for one in fleet), "both legs of sixteen requests each"
        await until(lambda: together(server) == all_of(one.router.ledger for one in fleet))
        counted = together(server)
        assert [counted[one][:3] for one in PREFILLERS] == [(16, 16, 16 * TOKENS)] * 4
        assert sum(counted[one][0] for one in DECODERS) == sum(counted[one][3] for one in DECODERS) == 64
        await all_end(server, *fleet)


async def test_two_gateways_never_both_take_the_same_of_the_prefillers_that_are_free(redis_server):
    for _ in range(6):
        async with legs_of(redis_server, 2) as (one, other):
            taken = {await one.place(prompt(random.random())) for _ in range(2)}
            taken |= {*await asyncio.gather(*(gateway.place(prompt(random.random())) for gateway in (one, other)))}
            assert taken == {*PREFILLERS}


async def test_a_policy_without_seconds_is_counted_where_it_chose(redis_server):
    async with legs_of(redis_server, 2, policy="round_robin") as fleet:
        await asyncio.gather(*(fleet[n % 2].place() for n in range(16)))
        await until(lambda: together(redis_server) == all_of(one.router.ledger for one in fleet))


async def test_legs_of_a_gateway_that_died_are_no_load_any_more(redis_server):
    async with legs_of(redis_server, 2) as (dies, stays):
        await asyncio.gather(*(dies.place(prompt(n + 1)) for n in range(8)), stays.place(prompt(9)))
        dies.shared._beats.cancel()
        await until(lambda: together(redis_server) == all_of([stays.router.ledger]) != {})


async def test_legs_that_are_decided_too_late_are_taken_back(redis_server):
    async with Proxy(redis_server.port) as proxy, legs_of(proxy, 1, deadline=0.01) as (one,):
        proxy.delay = 0.05
        await asyncio.gather(*(one.place(prompt(n + 1)) for n in range(10)))
        assert one.outcomes["late"] == 20 and len(one.open) == 20
        await until(lambda: together(redis_server) == all_of([one.router.ledger]))
        await all_end(redis_server, one)


async def test_without_redis_both_legs_are_chosen_here():
    one = Legs("redis://127.0.0.1:1")
    assert await one.place() in PREFILLERS
    assert one.outcomes == {"away": 1} and len(one.open) == 2
    await one.shared.stop()
