"""Limits over several gateways: exact with one real Redis, each gateway's share without it."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime

import pytest

from cachemap.background import Background
from cachemap.cluster.connect import RedisClients, parse
from gateway.tenants import shared
from gateway.tenants.limits import DAY, INPUT, MONTH, Limits, window
from gateway.tenants.metering import Metering
from gateway.tenants.shared import LEASE, SharedCounts
from gateway.tenants.tenant import Tenant
from tests.redis_server import Cluster, running

from ..http.talk import eventually

# By all gateways' clocks, which stand still. It is two months ago, as no window counts that the server's clock has not
# come to.
NOW = time.time() // 60 * 60 - 62 * 86_400.0
OF_A, RUNNING_OF_A = "hitherto:1:test:{limits}:of:a", "hitherto:1:test:{limits}:running:a"


class Gateway:
    """One gateway's counts of tenants."""

    def __init__(self, url, deadline=5.0):
        self.now = NOW
        self.metering = Metering(lambda: self.now)
        self.background = Background()
        self.shared = self.metering.shared = SharedCounts(
            RedisClients(parse(url)), "test", self.metering.accounts, self.background, deadline
        )

    async def ask(self, tenant, tokens=0):
        """The charge of a request that is admitted; why it is not."""
        charge, decided = self.metering.charge(tenant, tokens), asyncio.get_running_loop().create_future()
        self.metering.claim(charge, decided.set_result)
        error = await asyncio.wait_for(decided, 10)
        return charge if error is None else error

    async def admitted(self, tenant, count, tokens=0):
        """How many of so many requests at once are; all of them have ended then."""
        found = await asyncio.gather(*(self.ask(tenant, tokens) for _ in range(count)))
        charges = [one for one in found if not isinstance(one, Exception)]
        for charge in charges:
            self.metering.settle(charge, tokens, 0)
        return len(charges)

    def die(self):
        """As a process that is killed: not a word more."""
        self.shared._beating.cancel()
        self.shared.joined = False


@asynccontextmanager
async def gateways(url, count, **options):
    async with AsyncExitStack() as stack:
        found = [Gateway(url, **options) for _ in range(count)]
        for one in found:
            one.shared.start()
            stack.push_async_callback(one.shared.stop)
        await eventually(lambda: all(one.shared.joined for one in found))
        await eventually(lambda: all(one.shared.gateways == count for one in found), LEASE + 2)
        yield found
        assert not any(one.background.failures["tenants' limits"].count for one in found)


async def until_admitted(gateway, tenant, seconds=5.0):
    """What ended elsewhere is told with the next message, or with the end of a lease."""
    end = asyncio.get_running_loop().time() + seconds
    while isinstance(await gateway.ask(tenant), Exception):
        assert asyncio.get_running_loop().time() < end, "it is still refused"


@pytest.mark.parametrize(
    "limits, tokens, granted",
    [
        (Limits(requests_per_minute=50), 0, 50),
        (Limits(input_tokens_per_minute=1000), 30, 33),
        (Limits(tokens_per_month=1000, requests_per_minute=1000), 40, 25),
    ],
)
async def test_no_request_more_is_admitted_and_none_less(redis_server, limits, tokens, granted):
    tenant = Tenant("a", limits=limits)
    async with gateways(redis_server.url, 3) as all_of:
        assert sum(await asyncio.gather(*(one.admitted(tenant, 60, tokens) for one in all_of))) == granted
        for one in all_of:
            one.now += 60 if limits.tokens_per_month is None else 31 * 86_400
        assert await all_of[0].admitted(tenant, 1, tokens) == 1


async def test_what_runs_is_bounded_over_all_and_tenants_are_apart(redis_server):
    tenant, other = Tenant("a", limits=Limits(concurrent_requests=5)), Tenant("b", limits=Limits(concurrent_requests=1))
    async with gateways(redis_server.url, 2) as (one, two):
        found = await asyncio.gather(*(gateway.ask(tenant) for gateway in (one, two) * 10))
        charges = [(i % 2, charge) for i, charge in enumerate(found) if not isinstance(charge, Exception)]
        assert len(charges) == 5
        assert not isinstance(await two.ask(other), Exception)
        which, charge = charges.pop()
        (one, two)[which].metering.settle(charge, 0, 0)
        await until_admitted(two, tenant)
        assert isinstance(await one.ask(tenant), Exception)


async def test_output_that_one_gateway_counted_is_known_to_the_other(redis_server):
    tenant = Tenant("a", limits=Limits(output_tokens_per_minute=100))
    async with gateways(redis_server.url, 2) as (one, two):
        one.metering.settle(await one.ask(tenant), 0, 100)

        async def refused():
            while not isinstance(found := await two.ask(tenant), Exception):
                two.metering.settle(found, 0, 0)
            return found

        error = await asyncio.wait_for(refused(), 5)
        assert dict(error.headers)[b"x-ratelimit-remaining-output-tokens"] == b"0"
        assert two.metering.refusal(tenant) is not None  # from now on without a question


@pytest.fixture
def server_clock(redis_server, monkeypatch):
    """Return a function that says what time the server's clock tells the script."""
    monkeypatch.setattr(shared, "_SCRIPT", shared._SCRIPT.replace("call('TIME')", "{call('GET', 'now'), '0'}"))
    with redis_server.client() as client:

        def tell(now):
            client.set("now", int(now))

        tell(NOW)
        yield tell


@pytest.mark.parametrize(
    "limits, lasts",
    [
        (Limits(requests_per_minute=30), 60),
        (Limits(tokens_per_day=30), 86_400),
        (Limits(tokens_per_month=30), 31 * 86_400),
    ],
)
async def test_a_gateway_whose_clock_is_ahead_takes_nothing_of_a_later_window(
    redis_server, server_clock, limits, lasts
):
    tenant = Tenant("a", limits=limits)
    async with gateways(redis_server.url, 2) as (one, two):
        two.now += 3 * lasts
        assert (await two.admitted(tenant, 3, 1), await one.admitted(tenant, 40, 1)) == (3, 27)
        assert await two.admitted(tenant, 3, 1) == 0  # nor does it begin a window of its own
        two.now = one.now = NOW + lasts + 60
        server_clock(one.now)
        assert await one.admitted(tenant, 40, 1) == 30


async def test_what_a_gateway_whose_clock_is_ahead_charges_adds_to_what_others_have_charged(redis_server, server_clock):
    tenant = Tenant("a", limits=Limits(output_tokens_per_minute=100))
    async with gateways(redis_server.url, 2) as (one, two):
        two.now += 180
        with redis_server.client() as client:
            for gateway, tokens in ((one, 95), (two, 1), (one, 5)):
                charge, before = await gateway.ask(tenant), client.hgetall(OF_A)
                gateway.metering.settle(charge, 0, tokens)
                await eventually(lambda before=before: client.hgetall(OF_A) != before)
            assert 101 in map(int, client.hgetall(OF_A).values())
        assert await two.admitted(tenant, 1) == await one.admitted(tenant, 1) == 0


async def test_what_no_gateway_can_have_written_counts_for_the_next_window_at_most(redis_server, server_clock):
    tenant = Tenant("a", limits=Limits(requests_per_minute=30))
    running = Tenant("b", limits=Limits(concurrent_requests=1))
    async with gateways(redis_server.url, 1) as (one,):
        with redis_server.client() as client:
            client.hset(OF_A, mapping={"requests": 1000, "requests@": int(NOW // 60) + 2})
            assert await one.admitted(tenant, 40) == 30
            client.hset(OF_A, mapping={"requests": 1000, "requests@": int(NOW // 60) + 1})
            assert await one.admitted(tenant, 1) == 0
            client.delete(OF_A)
            assert one.metering.refusal(tenant) is not None
            client.hset(RUNNING_OF_A[:-1] + "b", "foreign", "1000:900000000000000")  # a lease that never ends
            assert await one.admitted(running, 1) == 1
        one.now += 60
        assert one.metering.refusal(tenant) is None  # Redis is asked again
        assert await one.admitted(tenant, 40) == 30


def test_the_server_knows_in_which_window_its_clock_is(redis_server, server_clock):
    """At the first and the last minute of 2,400 months, and of as many days and minutes."""
    script = shared.Script(shared._SCRIPT).text
    with redis_server.client() as client:
        for month in range(12 * 1970 + 1, 12 * 2170):
            begins = datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp()
            for now in (begins - 60, begins):
                server_clock(now)
                asked = [part for kind in (INPUT, DAY, MONTH) for part in (kind, 10**9, 10, 1)]
                client.eval(script, 1, "x:", "claim", "token", 3000, "a", -1, -1, *asked)
                found = client.hmget("x:of:a", *(f"{kind}@" for kind in (INPUT, DAY, MONTH)))
                client.delete("x:of:a")
                assert [*map(int, found)] == [window(kind, now) for kind in (INPUT, DAY, MONTH)]


async def test_a_gateway_that_dies_runs_nothing_any_more(redis_server):
    tenant = Tenant("a", limits=Limits(concurrent_requests=1))
    async with gateways(redis_server.url, 2) as (one, two):
        assert not isinstance(await one.ask(tenant), Exception)
        assert isinstance(await two.ask(tenant), Exception)
        one.die()
        await until_admitted(two, tenant, 2 * LEASE)
        await eventually(lambda: two.shared.gateways == 1)


async def test_without_redis_each_has_its_share_and_tells_of_it_afterwards(redis_server):
    tenant = Tenant("a", limits=Limits(requests_per_minute=40, concurrent_requests=40))
    async with gateways(redis_server.url, 2) as (one, two):
        assert await one.admitted(tenant, 5) == 5
        redis_server.kill()
        await one.ask(tenant)  # finds out
        await eventually(lambda: not one.shared.joined and not two.shared.joined, 10)
        admitted = await one.admitted(tenant, 60) + await two.admitted(tenant, 60)
        assert 34 - 1 <= admitted <= 35  # 20 each, of which one has had 6; the question that was on its way may count
        redis_server.start()
        await eventually(lambda: one.shared.joined and two.shared.joined, 10)
        await eventually(lambda: all(each.shared._pump.done() and not each.shared._unsent for each in (one, two)))
        # Redis came back empty, and knows all that they have admitted
        assert await one.admitted(tenant, 30) + await two.admitted(tenant, 30) <= 1


async def test_a_redis_that_hangs_holds_nobody_up_and_what_was_sent_counts_once(redis_server):
    tenant = Tenant("a", limits=Limits(requests_per_minute=10))
    async with gateways(redis_server.url, 1, deadline=0.002) as (one,):
        await one.ask(tenant)
        redis_server.freeze()
        try:
            async with asyncio.timeout(30):  # it hangs for longer than that
                assert [isinstance(await one.ask(tenant), Exception) for _ in range(4)] == [False] * 4
        finally:
            redis_server.thaw()
        one.shared._deadline = 5.0
        await eventually(lambda: one.shared.joined and one.shared._pump.done() and not one.shared._unsent, 10)
        assert await one.admitted(tenant, 20) in (5, 6)  # the batch that hung was not told again


async def test_who_comes_back_first_still_has_a_share_alone(redis_server):
    """Others were kept away from Redis for as long: should it go away again, two whole limits would be too much."""
    async with gateways(redis_server.url, 2) as (one, two):
        redis_server.kill()
        await eventually(lambda: not one.shared.joined, 10)
        two.die()
        redis_server.start()
        await eventually(lambda: one.shared.joined, 10)
        assert one.shared.gateways == 2
        await eventually(lambda: one.shared.gateways == 1, 3 * LEASE)


async def test_an_idle_connection_that_redis_closed_costs_no_limit(redis_server):
    tenant = Tenant("a", limits=Limits(requests_per_minute=40, concurrent_requests=40))
    async with gateways(redis_server.url, 2) as (one, two):
        assert await one.admitted(tenant, 5) + await two.admitted(tenant, 5) == 10
        await eventually(lambda: not any(each.shared._changed or not each.shared._pump.done() for each in (one, two)))
        with redis_server.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await eventually(lambda: all(each.shared._line._connection._reader.at_eof() for each in (one, two)))
        admitted = await asyncio.gather(*(each.admitted(tenant, 40) for each in (one, two)))
        assert sum(admitted) == 30 and one.shared.joined and two.shared.joined


async def test_limits_are_those_of_all_gateways_again_once_a_cluster_has_failed_over(tmp_path):
    tenant = Tenant("a", limits=Limits(requests_per_minute=40, concurrent_requests=40))
    with running(Cluster(tmp_path, replicas=True)) as cluster:
        async with gateways(cluster.url, 2) as (one, two):
            assert await one.admitted(tenant, 5) == 5
            await eventually(lambda: not one.shared._changed and one.shared._pump.done())
            node = cluster.node_of("{limits}")
            with node.client() as client:
                assert client.wait(1, 10_000) == 1  # its replica has it, too
            node.kill()
            await eventually(lambda: not one.shared.joined and not two.shared.joined, 10)
            await eventually(lambda: one.shared.joined and two.shared.joined, 30)
            assert sum(await asyncio.gather(*(each.admitted(tenant, 40) for each in (one, two)))) == 35


async def test_what_another_program_left_there_is_nothing(redis_server):
    tenant = Tenant("a", limits=Limits(requests_per_minute=3, concurrent_requests=3))
    with redis_server.client() as client:
        client.set("hitherto:1:test:{limits}:of:a", "x" * 10_000)
        client.hset("hitherto:1:test:{limits}:running:a", mapping={"x": "y", "z": "9" * 1000})
        client.lpush("hitherto:1:test:{limits}:gateways", "x")
        client.lpush("hitherto:1:test:{limits}:epoch", "x")
        async with gateways(redis_server.url, 1) as (one,):
            assert await one.admitted(tenant, 9) == 3
            client.hset("hitherto:1:test:{limits}:of:a", mapping={"requests": "-7", "requests@": "nan"})
            assert await one.admitted(tenant, 9) == 3


async def test_an_epoch_that_is_no_text_is_one_all_the_same(redis_server):
    tenant = Tenant("a", limits=Limits(requests_per_minute=3))
    with redis_server.client() as client:
        client.set("hitherto:1:test:{limits}:epoch", b"\xff")
        async with gateways(redis_server.url, 1) as (one,):
            assert await one.admitted(tenant, 2) == 2
            client.delete(OF_A)
            client.set("hitherto:1:test:{limits}:epoch", b"\xfe")
            await eventually(lambda: client.hget(OF_A, "requests") == b"2", 5)  # told again, as Redis had lost it


async def test_what_redis_did_not_take_is_told_again(redis_server):
    """Redis has its data and not the script: nothing of a batch was done."""
    tenant = Tenant("a", limits=Limits(output_tokens_per_minute=100, concurrent_requests=5))
    async with gateways(redis_server.url, 1) as (one,):
        with redis_server.client() as client:
            charge = await one.ask(tenant)
            await eventually(lambda: one.shared._pump.done())
            client.script_flush()
            one.metering.settle(charge, 0, 70)
            key = "hitherto:1:test:{limits}:of:a"
            await eventually(lambda: client.hget(key, "output") == b"70", 5)
            await eventually(lambda: client.hgetall("hitherto:1:test:{limits}:running:a") == {}, 5)


async def test_a_backlog_of_many_tenants_is_told_whole(redis_server):
    async with gateways(redis_server.url, 1) as (one,):
        for at in range(1500):
            one.shared.charge(f"t{at}", "requests", int(NOW // 60), 3)
        with redis_server.client() as client:
            names = [f"hitherto:1:test:{{limits}}:of:t{at}" for at in range(1500)]
            await eventually(lambda: not one.shared._unsent and one.shared._pump.done(), 10)
            assert {client.hget(name, "requests") for name in names} == {b"3"}


async def test_a_prompt_above_the_share_is_not_told_to_wait_for_the_next_minute(redis_server):
    tenant = Tenant("a", limits=Limits(input_tokens_per_minute=1000))
    async with gateways(redis_server.url, 2) as (one, two):
        redis_server.kill()
        await eventually(lambda: not one.shared.joined and not two.shared.joined, 10)
        error = await one.ask(tenant, 600)
        assert (error.status, error.code) == (429, "request_too_large")
        assert "this gateway has 500" in error.message and b"retry-after" not in dict(error.headers)
        assert not isinstance(await one.ask(tenant, 400), Exception)
        assert (await one.ask(tenant, 400)).code == "rate_limit_exceeded"
        redis_server.start()
        await eventually(lambda: one.shared.joined and two.shared.joined, 10)
        assert not isinstance(await two.ask(tenant, 600), Exception)
