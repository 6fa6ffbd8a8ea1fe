"""The fleet and engines that end gracefully: they turn newcomers away, and finish what they have."""

import asyncio

import pytest

from replicas import State, health, watch

READY, DEGRADED, LEAVING, FAILED = State.READY, State.DEGRADED, State.LEAVING, State.FAILED
ABORTED = {"choices": [{"text": "", "finish_reason": "abort"}]}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(health, "QUESTION_SECONDS", 0.1)
    monkeypatch.setattr(watch, "IDLE_SCRAPE", 0.1)


@pytest.fixture
def held(fleet):
    """The replicas that have requests on connections that stand; one may be added and taken away."""
    held: set[str] = set()
    fleet.holds = held.__contains__
    fleet.inflight = lambda id: int(id in held)
    return held


def states(fleet, replica):
    return [new for id, _, new in fleet.seen if id == replica.id]


async def test_health_that_says_503_while_requests_run_is_a_leave_and_no_death(fleet, core, held, comes, until, caplog):
    replica = await comes(fleet.add(core.url), READY)
    held.add(replica.id)
    core.health = 503
    await comes(replica, LEAVING)
    assert "takes nothing new, and finishes what it has: /health answers 503" in replica.reason
    assert [one.levelname for one in caplog.records if "-> leaving" in one.getMessage()] == ["WARNING"]
    seen = [replica.moved_at]
    await until(lambda: replica.moved_at != seen[-1] and (seen.append(replica.moved_at) or len(seen) > 5))
    assert replica.state is LEAVING, "however long it takes: its counters move"
    core.health = 200
    await comes(replica, READY)
    assert states(fleet, replica) == [State.WARMING, READY, LEAVING, READY]


async def test_nobody_listens_any_more_and_its_connections_stand(fleet, core, serve, held, comes, until):
    replica = await comes(fleet.add(core.url), READY)
    held.add(replica.id)
    await serve.stop()
    await comes(replica, LEAVING)
    assert "finishes what it has" in replica.reason and "nothing listens there" in replica.reason
    for _ in range(3):
        fleet.succeeded(replica.id)  # what it has is answered
        fleet.failed(replica.id, "connect")  # what had been sent there before anybody knew
    looks = []
    fleet.hear = lambda id: looks.append(id)
    await until(lambda: len(looks) > 3)
    assert replica.state is LEAVING
    held.clear()
    await comes(replica, FAILED)
    assert states(fleet, replica) == [State.WARMING, READY, LEAVING, FAILED]


async def test_refused_requests_show_no_end_while_others_run(fleet, core, serve, held, comes):
    replica = await comes(fleet.add(core.url), READY)
    held.add(replica.id)
    await serve.stop()
    looks = []
    fleet.holds = lambda id: looks.append(id) or id in held
    for _ in range(1000):
        fleet.failed(replica.id, "connect")
    assert replica.state is READY and len(looks) < 100, "each look goes through all requests"
    await comes(replica, LEAVING)


@pytest.mark.parametrize("answer", [(500, {"error": "ends"}), (200, ABORTED)], ids=["with an error", "by giving up"])
async def test_it_fails_what_is_new_and_goes_on_with_what_it_has(fleet, core, held, comes, answer):
    """vLLM with --shutdown-timeout: /health is 200, and the counters move."""
    replica = await comes(fleet.add(core.url), READY)
    held.add(replica.id)
    core.answer = answer
    fleet.unconfirmed(replica.id)
    await comes(replica, LEAVING)
    assert replica.reason == "fails what it is newly sent, and goes on with what it has"
    fleet.succeeded(replica.id)  # one of those
    await asyncio.gather(*(fleet.prove(replica.id) for _ in range(3)))
    assert replica.state is LEAVING
    core.answer = 200, {}
    await comes(replica, READY)
    assert states(fleet, replica) == [State.WARMING, READY, LEAVING, READY]


async def test_one_that_fails_what_is_new_and_stays_takes_traffic_again(fleet, core, held, comes):
    replica = await comes(fleet.add(core.url), READY)
    core.answer = 500, {}
    fleet.unconfirmed(replica.id)
    await comes(replica, LEAVING)
    core.moves = False
    replica.moved_at = float("-inf")  # as after 20 s without a step
    await comes(replica, DEGRADED)
    fleet.succeeded(replica.id)  # a request to another endpoint, which works
    assert replica.state is READY
    core.moves = True
    fleet.unconfirmed(replica.id)
    await comes(replica, DEGRADED)
    assert states(fleet, replica) == [State.WARMING, READY, LEAVING, DEGRADED, READY, DEGRADED]


async def test_one_whose_time_is_up_is_gone_though_its_connections_stand(fleet, core, serve, held, comes):
    """vLLM 0.32 whose streams did not end within --shutdown-timeout: its core is gone, and it waits for them."""
    replica = await comes(fleet.add(core.url), READY)
    held.add(replica.id)
    core.answer = 500, {}
    fleet.unconfirmed(replica.id)
    await comes(replica, LEAVING)
    await serve.stop()
    await comes(replica, FAILED)
    assert replica.ends, "what breaks there broke because it ends"
    await fleet.drain(replica.id)
    fleet.resume(replica.id)
    assert not replica.ends
