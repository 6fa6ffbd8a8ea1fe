"""Whether what answers at a replica's address is still the engine that was there, and how its requests fare."""

import asyncio

import pytest

from replicas import State, watch
from replicas.health import Health, Verdict

READY, DEGRADED, WARMING = State.READY, State.DEGRADED, State.WARMING


async def test_what_takes_an_engines_port_between_two_looks_gets_no_traffic(fleets, engine, comes):
    """Nobody saw it down: the connection that was kept for asking has broken, so all is asked."""
    fleet, seen, url = fleets(0.5), [], await engine()
    fleet.on_change.append(lambda replica, old, new: seen.append(new))
    replica = await comes(fleet.add(url), READY)
    engine.asked.clear()
    await fleet.engines[replica.id].tick()
    assert engine.asked[:1] == ["/health"] and "/v1/models" not in engine.asked, "a kept connection: the same process"
    await engine.stop()
    await engine(replica.port)
    engine.html()
    await comes(replica, WARMING)
    assert "something else than the engine answers there" in replica.reason and State.FAILED not in seen
    await engine.stop()
    await engine(replica.port, started="2.0")
    await comes(replica, READY)
    assert replica.incarnation == "2.00", "its cache is empty"


@pytest.mark.parametrize("answers", ["without an API", "after a wrong answer"])
async def test_what_is_no_engine_is_known_as_such_until_something_else_is_there(fleet, engine, comes, until, answers):
    url = await engine()
    if answers == "without an API":
        engine.pages.clear()
        replica = await comes(fleet.add(url), State.FAILED)
    else:
        engine.html()
        replica = await comes(fleet.add(url), READY)  # any name is sent there, until traffic shows what it is
        assert not replica.foreign
        fleet.failed(replica.id, "foreign")
    await until(lambda: replica.foreign)
    assert not replica.models
    await engine.stop()
    await comes(replica, State.FAILED)
    await until(lambda: not replica.foreign)  # nobody listens: an engine may be loading
    await engine(replica.port)
    await comes(replica, READY)
    assert not replica.foreign


async def test_whoever_needs_proof_has_it_without_waiting_for_the_next_turn(seldom, engine, comes, monkeypatch):
    """Nor for the pause between two looks; and those who ask together share one look."""
    replica = await comes(seldom.add(await engine()), READY)
    monkeypatch.setattr(watch, "CLOSEST", 3600.0)
    assert replica.is_proven
    await engine.stop()
    await engine(replica.port, started="2.0")
    assert not replica.is_proven and replica.incarnation == "1.00"
    engine.asked.clear()
    assert all(await asyncio.gather(*(seldom.prove(replica.id) for _ in range(5))))
    assert replica.is_proven and replica.incarnation == "2.00" and engine.asked.count("/v1/models") == 1
    engine.html()
    await seldom.prove(replica.id)
    assert replica.state is WARMING
    assert not await seldom.prove("unknown")


async def test_a_look_that_began_before_is_no_proof(seldom, engine, comes, until):
    replica = await comes(seldom.add(await engine()), READY)
    engine.asked.clear()
    engine.hold.clear()
    first = asyncio.create_task(seldom.prove(replica.id))
    await until(lambda: "/health" in engine.asked)
    second = asyncio.create_task(seldom.prove(replica.id))
    await asyncio.sleep(0)
    engine.hold.set()
    await first
    assert engine.asked.count("/v1/models") == 1 and not second.done()
    await second
    assert engine.asked.count("/v1/models") == 2


async def test_nobody_waits_for_a_look_at_an_engine_that_is_removed(seldom, engine, comes, until):
    replica = await comes(seldom.add(await engine()), READY)
    engine.asked.clear()
    engine.hold.clear()
    waiting = [asyncio.create_task(seldom.prove(replica.id))]
    await until(lambda: "/health" in engine.asked)
    waiting.append(asyncio.create_task(seldom.prove(replica.id)))
    await seldom.remove(replica.id)
    engine.hold.set()
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)


async def test_an_engine_that_answers_late_is_not_asked_to_prove_itself(seldom, engine, comes, until, monkeypatch):
    """It is we who close the connection then, which shows nothing."""
    replica = await comes(seldom.add(await engine()), READY)
    engine.hold.clear()
    with monkeypatch.context() as while_late:  # on a busy machine the other looks take longer than this
        while_late.setattr(watch, "SHORT_DEADLINE", 0.05)
        while_late.setattr(watch, "DEADLINE", 0.05)
        await seldom.engines[replica.id].tick()
    assert replica.proof is None and replica.is_proven and replica.state is READY
    engine.hold.set()
    await seldom.engines[replica.id].tick()
    assert replica.proof is not None


async def test_what_took_an_engines_place_silently_is_not_taken_for_it(seldom, engine, comes, until, monkeypatch):
    """Neither by those who wait for the look that it does not answer, nor by those who come after that."""
    replica = await comes(seldom.add(await engine()), READY)
    await engine.stop()
    await engine(replica.port, models=("other",))
    await until(lambda: not replica.is_proven)
    engine.hold.clear()
    with monkeypatch.context() as while_silent:
        while_silent.setattr(watch, "DEADLINE", 0.05)
        assert not await seldom.prove(replica.id)
    assert not replica.is_proven
    engine.hold.set()
    assert await seldom.prove(replica.id) and "other" in replica.models


@pytest.mark.parametrize("closes", ["announced", "silently"])
async def test_an_engine_that_closes_its_connections_is_well(fleet, engine, comes, until, closes):
    engine.closes = closes
    replica = await comes(fleet.add(await engine(running=False)), READY)
    assert await fleet.prove(replica.id) and replica.is_proven
    engine.asked.clear()
    await until(lambda: engine.asked.count("/health") >= 5)
    assert closes == "silently" or "/v1/models" not in engine.asked


async def test_who_closed_one_connection_as_engines_do_that_end_is_asked_for_all_next_time(seldom, engine, comes):
    replica = await comes(seldom.add(await engine()), READY)
    engine.closes = "announced"
    await seldom.engines[replica.id].tick()
    engine.closes = ""
    await engine.stop()
    await engine(replica.port, models=("other",))
    await seldom.engines[replica.id].tick()
    assert "other" in replica.models


async def test_an_engine_without_its_figures_is_asked_for_all(fleet, engine, comes):
    """As behind a proxy, which keeps its connections whatever is behind it."""
    replica = await comes(fleet.add(await engine()), READY)
    fleet.inflight = lambda id: 1  # busy: figures are read at each look
    engine.html()
    await comes(replica, WARMING)


async def test_an_answer_that_no_engine_gives_takes_it_out_at_once_until_it_proves_to_be_one(fleet, engine, comes):
    replica = await comes(fleet.add(await engine()), READY)
    fleet.failed(replica.id, "foreign")
    assert replica.state is WARMING, "before the next request"
    await comes(replica, READY)
    for _ in range(3):  # it lists its models, and does it again and again
        await comes(replica, READY)
        fleet.failed(replica.id, "foreign")
    await comes(replica, DEGRADED)


async def test_a_mock_that_names_no_models_is_out_for_good_once_it_answered_as_no_engine(fleet, engine, comes, until):
    url = await engine()
    engine.html()
    replica = await comes(fleet.add(url), READY)  # taken at its word
    fleet.failed(replica.id, "foreign")
    engine.asked.clear()
    await until(lambda: engine.asked.count("/v1/models") >= 3)
    assert replica.state is WARMING and "lists no models" in replica.reason


@pytest.mark.parametrize("started", ["", "1.0"], ids=["never told a start", "told one before"])
@pytest.mark.parametrize("change", [{"version": "0.33.0"}, {"models": ("other",)}])
async def test_another_version_or_model_is_another_process(fleet, engine, comes, until, change, started):
    replica = await comes(fleet.add(await engine(started=started)), READY)
    del engine.pages["/metrics"]
    before = replica.incarnation
    await fleet.engines[replica.id].tick()
    assert replica.incarnation == before
    if "version" in change:
        engine.pages["/version"] = change
    else:
        engine.pages["/v1/models"] = {"data": [{"id": "other"}]}
    await fleet.prove(replica.id)
    assert replica.incarnation != before
    await comes(replica, READY)


async def test_one_that_fails_every_second_request_is_out_though_others_of_its_are_answered(fleet, engine, comes):
    bad, good = [await comes(fleet.add(await engine()), READY) for _ in range(2)]
    for _ in range(5):
        for replica in (bad, good):
            fleet.succeeded(replica.id)
        assert bad.state is READY
        fleet.failed(bad.id, "5xx")
    assert bad.state is DEGRADED and "50% of its requests fail (requests fail (5xx)), 0% of its siblings'" in bad.reason
    fleet.succeeded(bad.id)  # one that was on its way
    assert bad.state is DEGRADED
    await comes(bad, READY)  # and is tried again: 2 s


def fails(health, now, share=1):
    for _ in range(share):
        health.succeeded(now)
    health.failed(now, "5xx")


def test_who_goes_on_failing_is_out_longer_each_time_and_who_does_not_starts_anew():
    health, now, holds = Health(), 0.0, []
    for _ in range(6):
        while not health.compare(now, 100, 0):
            fails(health, now)
        began = now
        while health.opinion(now).verdict is Verdict.TROUBLE:
            now += 0.5
        holds.append(now - began)
    assert holds == [2, 4, 8, 16, 30, 30]
    now += 60
    for _ in range(4):
        fails(health, now)
        assert not health.compare(now, 100, 0), "few failures are no rate"
    fails(health, now)
    assert health.compare(now, 100, 0)


def test_a_rate_needs_to_be_high_and_of_late_and_far_from_the_siblings():
    health = Health()
    for _ in range(50):
        fails(health, 0.0, share=9)
    assert not health.compare(0.0, 100, 0)  # a tenth
    health = Health()
    for _ in range(50):
        fails(health, 0.0, share=2)
    assert not health.compare(0.0, 80, 20) and not health.compare(25.0, 100, 0)
    for _ in range(50):
        fails(health, 50.0, share=2)
    assert health.compare(50.0, 95, 5)
