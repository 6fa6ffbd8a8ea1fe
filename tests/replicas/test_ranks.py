"""Data-parallel ranks: one engine, several replicas that come, go and fail together, and can be drained apart."""

import asyncio

import pytest

from replicas import State
from replicas.launch.ports import pick

from .conftest import answering

pytestmark = pytest.mark.usefixtures("impatient")
READY, STOPPED, FAILED = State.READY, State.STOPPED, State.FAILED


class Ranked:
    """An engine in this process that says it has so many ranks. Each has its own figures."""

    def __init__(self, serve):
        self.serve, self.count, self.started, self.listed, self.adapters = serve, 2, 1.0, True, ()

    async def start(self, port: int = 0) -> str:
        pages = {
            "/health": "",
            "/version": {"version": "0.32.0"},
            "/metrics": self.metrics,
            "/v1/models": lambda: {"data": [{"id": "m"}, *({"id": one, "parent": "m"} for one in self.adapters)]},
            "/kv_event_sources": lambda: {str(rank): self.source(rank) for rank in range(self.count)} if self.listed else 404,
        }  # fmt: skip
        self.url = await self.serve(answering(pages), port)
        self.stop = self.serve.stop
        return self.url

    def source(self, rank: int) -> dict:
        return {"endpoint": f"tcp://*:{5600 + rank}", "replay_endpoint": f"tcp://*:{5700 + rank}"}

    def metrics(self) -> str:
        lines = [f"process_start_time_seconds {self.started}"]
        for rank in range(self.count):
            sizes = f'block_size="16",engine="{rank}",num_gpu_blocks="{100 * self.count}"'
            lines.append(f"vllm:cache_config_info{{{sizes}}} 1.0")
            lines.append(f'vllm:num_requests_waiting{{engine="{rank}",model_name="m"}} {rank}.0')
        return "\n".join(lines) + "\n"


@pytest.fixture
def ranked(serve):
    return Ranked(serve)


@pytest.fixture
def become(fleet, until):
    """Wait until the fleet's replicas are these, all in one state; them in order."""

    async def become(ids, state=READY):
        await until(
            lambda: {id: one.state for id, one in fleet.replicas.items()} == dict.fromkeys(ids, state),
            lambda: {id: f"{one.state}: {one.reason}" for id, one in fleet.replicas.items()},
        )
        return [fleet.replicas[id] for id in ids]

    return become


def names(url: str, count: int) -> list[str]:
    base = url.removeprefix("http://")
    return [base] if count == 1 else [f"{base}-dp{rank}" for rank in range(count)]


@pytest.fixture
async def ranks(fleet, ranked, become):
    """The replicas of an adopted engine's two ranks."""
    fleet.add(await ranked.start() + "#model=m")
    return await become(names(ranked.url, 2))


async def test_each_rank_is_a_replica_with_its_own_events_load_and_cache(fleet, ranked, ranks):
    zero, one = ranks
    assert (zero.rank, one.rank) == (0, 1) and zero.required_model == one.required_model == "m"
    assert zero.url == one.url == ranked.url and zero.engine == one.engine
    assert [replica.events.endpoint[-4:] for replica in (zero, one)] == ["5600", "5601"]
    assert [replica.num_blocks for replica in (zero, one)] == [100, 100]
    assert [replica.scrape.waiting for replica in (zero, one)] == [0, 1]
    assert zero.incarnation == one.incarnation == "1.00" and zero.version == "0.32.0"
    assert [replica.headers for replica in (zero, one)] == [{"X-data-parallel-rank": rank} for rank in "01"]
    assert len(fleet.engines) == 1 and zero.takes_rank("/v1/completions") and not zero.takes_rank("/v1/responses")


async def test_what_happens_to_the_engine_happens_to_all_its_ranks(fleet, ranked, ranks, become, until):
    (zero, one), ids = ranks, names(ranked.url, 2)
    fleet.failed(ids[1], "5xx")
    fleet.failed(ids[0], "5xx")
    assert zero.state is one.state is State.DEGRADED and zero.reason == one.reason
    fleet.succeeded(ids[0])
    assert zero.state is one.state is READY
    await ranked.stop()
    await become(ids, FAILED)
    ranked.started = 2.0
    await ranked.start(zero.port)
    assert await become(ids) == [zero, one]
    await until(lambda: zero.incarnation == one.incarnation == "2.00")


async def test_a_restart_with_other_ranks(fleet, ranked, ranks, become):
    before, url, gone = ranks, ranked.url, []
    fleet.on_change.append(lambda replica, old, new: replica.id in fleet.replicas or gone.append(replica))
    for count in (3, 1, 2):
        ranked.count, ranked.started = count, ranked.started + 1
        fleet.engines[names(url, 1)[0]].nudge()
        after = await become(names(url, count))
        assert {one.incarnation for one in after} == {f"{ranked.started:.2f}"}
        if count == 3:
            assert after[:2] == before and not gone
        if count == 1:
            assert [one.rank for one in gone] == [0, 1, 2] and after[0].rank is None
    assert gone[-1].rank is None and after != before and len(fleet.engines) == 1


async def test_one_rank_is_drained_and_the_other_goes_on(fleet, ranked, ranks, until):
    zero, one = ranks
    open_requests = {one.id: 1}
    fleet.inflight = lambda id: open_requests.get(id, 0)
    drained = fleet.drain(one.id)
    assert one.state is State.DRAINING and zero.state is READY and fleet.drain(one.id) is drained
    await until(lambda: "1 requests to finish" in one.reason)
    open_requests.clear()
    await drained
    assert one.state is STOPPED and zero.state is READY
    # another process, and it stays out; asked for, it is what its engine is
    ranked.started = 2.0
    fleet.engines[one.engine].nudge()
    await until(lambda: zero.incarnation == "2.00" and zero.state is READY)
    assert one.state is STOPPED and one.reason == "drained on request"
    assert fleet.add(ranked.url) is zero and one.state is READY


async def test_an_engine_is_drained_and_removed_with_all_its_ranks(fleet, ranked, ranks, become):
    zero, one = ranks
    with pytest.raises(ValueError, match="one of 2 ranks of one engine"):
        fleet.remove(one.id)
    await fleet.drain(zero.engine)
    assert zero.state is one.state is STOPPED
    fleet.add(ranked.url)
    await become(names(ranked.url, 2))
    await fleet.remove(zero.engine)
    assert not fleet.replicas and not fleet.engines
    with pytest.raises(KeyError):
        fleet.drain(zero.id)


async def test_what_happens_to_all_ranks_of_an_engine_is_one_change(fleet, ranked, ranks, until):
    """Who may serve what is found anew after each change, by a look at all replicas: 300 ranks took 3 s one by one."""
    seen, once = [], [*(one.id for one in ranks), ""]
    fleet.on_change.append(lambda replica, old, new: seen.append(replica.id))
    fleet.on_changed.append(lambda: seen.append(""))
    ranked.adapters = ("sql",)
    await until(lambda: seen == once)
    seen.clear()
    fleet.drain(ranks[0].engine)
    assert seen == once
    fleet.drain(ranks[0].id)
    await until(lambda: {one.state for one in ranks} == {STOPPED})
    assert seen[3:] == once


async def test_a_launched_engines_ranks_are_there_from_the_start(fleet, fake_profile, become, alive, until):
    class Ranked(type(fake_profile())):
        ranks = property(lambda self: 2)

    zero, one = await fleet.launch(1, Ranked(engine="sim"))
    assert [replica.id for replica in (zero, one)] == list(fleet.replicas) and zero.managed
    http, ports = zero.port, fleet.engines[zero.engine].ports
    assert len(ports) == 7
    assert [int(replica.events.endpoint.rpartition(":")[2]) for replica in (zero, one)] == [http + 1, http + 2]
    assert [int(replica.events.replay.rpartition(":")[2]) for replica in (zero, one)] == [http + 3, http + 4]
    await until(lambda: zero.pid == one.pid is not None)
    # this one's metrics tell a single engine without a number: what the profile says holds
    await become([zero.id, one.id])
    pid = one.pid
    await fleet.drain(one.id)
    assert one.state is STOPPED and zero.state is READY and alive(pid)
    await fleet.drain(zero.engine)
    assert zero.state is STOPPED and not alive(pid)


async def test_a_second_launch_takes_other_ports_and_devices(fleet, fake_profile, monkeypatch):
    """Also before the first one's engines listen."""
    asked = []

    class Placed(type(fake_profile())):
        def place(self, count, used=()):
            asked.append(list(used))
            return self, [{"CUDA_VISIBLE_DEVICES": str(len(used) + number)} for number in range(count)]

    first = pick(1, "127.0.0.1", set(), run=64)[0]

    def next_ones(count, host, taken, run):
        free = [port for port in range(first, first + 64) if not taken & set(range(port, port + run))]
        return free[: count * run : run]

    monkeypatch.setattr("replicas.fleet.pick", next_ones)
    await asyncio.gather(fleet.launch(2, Placed(engine="sim")), fleet.launch(1, Placed(engine="sim")))
    assert asked == [[], ["0", "1"]]
    ports = [port for engine in fleet.engines.values() for port in engine.ports]
    assert len(ports) == len(set(ports)) == 12


async def test_ranks_stay_when_a_look_tells_none(ranked, ranks, become, until):
    ranked.listed = False
    ranked.count = 0  # /metrics has no vllm: series any more
    await until(lambda: any("no vllm: series" in problem for problem in ranks[1].problems))
    assert await become(names(ranked.url, 2)) == ranks
