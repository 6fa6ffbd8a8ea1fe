"""The fleet and engines that answer /health and compute nothing, as vLLM does when its core hangs."""

import pytest

from replicas import State, health, progress, watch
from replicas.launch.supervisor import Backoff

READY, DEGRADED, FAILED = State.READY, State.DEGRADED, State.FAILED


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "STALLED", 0.5)
    monkeypatch.setattr(progress, "HUNG", 1.5)
    monkeypatch.setattr(watch, "DEADLINE", 0.5)
    monkeypatch.setattr(health, "FIRST_HOLD", 0.1)
    monkeypatch.setattr(watch, "IDLE_SCRAPE", 0.1)
    monkeypatch.setattr(Backoff, "FIRST", 0.2)


@pytest.fixture
def hung(core):
    """An engine whose core hangs while it is idle: its counters stand still, and no prompt is answered."""
    core.moves, core.running = False, 0
    core.wakes.clear()
    return core


async def test_it_gets_no_traffic_until_its_counters_move(fleet, hung, comes):
    replica = await comes(fleet.add(hung.url), READY)
    hung.running = 1
    await comes(replica, DEGRADED)
    assert "answers /health, but has computed nothing for" in replica.reason and "restart it" in replica.reason
    fleet.succeeded(replica.id)  # /tokenize, say: the API server does that alone
    for _ in range(3):
        fleet.failed(replica.id, "timeout")  # those that went elsewhere
    assert replica.state is DEGRADED and "has computed nothing for" in replica.reason
    hung.generated += 1
    await comes(replica, READY)


async def test_hung_while_idle_it_is_found_by_the_requests_that_wait(fleet, hung, comes, until):
    waited = 0.0
    fleet.waited = lambda id: waited
    replica = await comes(fleet.add(hung.url), READY)
    waited = 1.0
    await comes(replica, DEGRADED)
    waited = 0.0  # they were sent elsewhere, so that nothing shows when it is well again: a token is asked for
    hung.wakes.set()
    await comes(replica, READY)


async def test_one_of_our_own_is_killed_and_started_again(fleet, fake_profile, comes, until, alive):
    (replica,) = await fleet.launch(1, fake_profile("--stuck"))
    await comes(replica, READY)
    pid = replica.pid
    await comes(replica, DEGRADED)
    await comes(replica, FAILED)
    # For as long as it is being killed, nothing listens there though it is alive.
    await until(lambda: "its engine core hangs, so it was killed; next start in" in replica.reason)
    assert not alive(pid)
    await comes(replica, READY)
    assert replica.pid != pid


async def test_an_idle_engine_is_left_alone(fleet, hung, comes, until):
    replica = await comes(fleet.add(hung.url), READY)
    scrapes = set()
    await until(lambda: scrapes.add(replica.scrape.at) or len(scrapes) > 10)
    assert replica.state is READY and not [new for _, _, new in fleet.seen if new is DEGRADED]
