"""The fleet over real processes: killed, stopped, slow, wrong, drained."""

import asyncio
import os
import signal
import socket

import pytest

from replicas import State, watch
from replicas.event_source import EventSource
from replicas.health import Limits
from replicas.launch.ports import pick

HOST = "127.0.0.1"
READY, FAILED, DEGRADED, STOPPED = State.READY, State.FAILED, State.DEGRADED, State.STOPPED


pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def launched(fleet, fake_profile, comes):
    """`launched(*flags)` -> the replica of a launched engine that is READY."""

    async def launched(*flags):
        (replica,) = await fleet.launch(1, fake_profile(*flags))
        return await comes(replica, READY)

    return launched


@pytest.fixture
def killed(until):
    """`killed(replica)` kills its process, and waits until that is noticed; returns the process id."""

    async def killed(replica):
        pid = replica.pid
        os.kill(pid, signal.SIGKILL)
        # a busy machine may see that nothing listens before the keeper says why
        await until(lambda: "killed by SIGKILL" in replica.reason, lambda: f"{replica.state}: {replica.reason}")
        return pid

    return killed


def states(fleet, replica):
    return [new for id, old, new in fleet.seen if id == replica.id and new is not old]


# Launched


async def test_launched_replicas_become_ready_one_state_after_the_other(fleet, fake_profile, comes, alive):
    replicas = await fleet.launch(2, fake_profile())
    assert len({replica.port for replica in replicas}) == 2
    for replica in replicas:
        assert replica.state is State.STARTING and replica.managed and fleet.replicas[replica.id] is replica
    for replica in replicas:
        await comes(replica, READY)
        assert states(fleet, replica) == [State.WARMING, READY]
        assert replica.reason == "answers and serves m" and alive(replica.pid)
        assert (replica.models, replica.block_size, replica.num_blocks) == ({"m": None}, 16, 64)
        assert replica.events.endpoint.startswith(f"tcp://{HOST}:") and replica.incarnation


async def test_one_that_dies_of_its_first_tokens_gets_no_traffic(fleet, fake_profile, comes, monkeypatch):
    async def computes(session, url, model, deadline):
        os.kill(fleet.replicas[url.removeprefix("http://")].pid, signal.SIGKILL)
        return False

    monkeypatch.setattr(watch, "computes", computes)
    (replica,) = await fleet.launch(1, fake_profile())
    await comes(replica, FAILED)
    await comes(replica, State.STARTING)
    await comes(replica, FAILED)
    assert "2 starts in a row failed" in replica.reason and READY not in states(fleet, replica)


async def test_an_engine_that_is_stopped_with_the_fleet_is_not_called_failed(fleet, launched):
    replica = await launched()
    supervisor = fleet.engines[replica.id].supervisor
    stop = supervisor.stop

    async def slowly(grace):
        """As where another engine takes its time to end: whoever still probed this one would find it gone."""
        await stop(grace)
        await asyncio.sleep(0.5)

    supervisor.stop = slowly
    await fleet.stop()
    assert states(fleet, replica) == [State.WARMING, READY, STOPPED]


@pytest.mark.parametrize("flags", [(), ("--no-start-time",)], ids=["its start is told", "no start is told"])
async def test_killed_it_fails_with_the_reason_and_comes_back_as_another_incarnation(launched, killed, comes, flags):
    replica = await launched(*flags)
    incarnation = replica.incarnation
    assert incarnation == f"pid-{replica.pid}" or not flags
    pid = await killed(replica)
    assert replica.state is FAILED and "next start in" in replica.reason and replica.pid is None
    await comes(replica, READY)
    assert replica.pid != pid and replica.incarnation != incarnation and replica.restarts == 1


async def test_our_processes_compute_tokens_before_they_get_traffic(
    fleet, fake_profile, engine, killed, comes, monkeypatch
):
    asked = []

    async def computes(session, url, model, deadline):
        asked.append((url, model, fleet.replicas[url.removeprefix("http://")].state))
        return False  # whatever comes of it

    monkeypatch.setattr(watch, "computes", computes)
    (replica,) = await fleet.launch(1, fake_profile())
    for _ in range(2):
        await comes(replica, READY)
        await killed(replica)
    assert asked == [(replica.url, "m", State.STARTING)] * 2
    await comes(fleet.add(await engine()), READY)
    assert len(asked) == 2  # others' engines are let alone


async def test_a_hung_engine_is_degraded_then_killed_and_started_again(launched, comes, alive, caplog):
    replica = await launched()
    pid = replica.pid
    os.kill(pid, signal.SIGSTOP)
    await comes(replica, DEGRADED)
    assert "/health did not answer within 0." in replica.reason
    await comes(replica, FAILED)
    assert "its process is alive" in replica.reason and replica.fault == "timeout"
    async with asyncio.timeout(10):
        while replica.pid == pid:
            await asyncio.sleep(0)
    assert "so it was killed" in replica.reason and not replica.fault, "it hangs no more"
    await comes(replica, READY)
    assert replica.pid != pid and not alive(pid)
    assert "it hangs, so it was killed; next start in" in caplog.text


async def test_an_engine_that_only_paused_is_taken_back(fleet, launched, comes):
    fleet.limits = Limits(fall=2, lost_after=60)
    replica = await launched()
    pid, incarnation = replica.pid, replica.incarnation
    os.kill(pid, signal.SIGSTOP)
    await comes(replica, DEGRADED)
    os.kill(pid, signal.SIGCONT)
    await comes(replica, READY)
    assert (replica.pid, replica.incarnation) == (pid, incarnation)


async def test_an_engine_that_cannot_start_says_what_to_do(fleet, fake_profile, comes):
    (replica,) = await fleet.launch(1, fake_profile("--fail", "OSError: [Errno 28] No space left on device"))
    await comes(replica, FAILED)
    assert "exited with code 3" in replica.reason and "the disk is full" in replica.reason
    assert fleet.logs(replica.id) == ["loading", "OSError: [Errno 28] No space left on device"]


async def test_a_slow_start_shows_its_last_log_line_and_has_an_end(fleet, fake_profile, comes, until):
    (replica,) = await fleet.launch(1, fake_profile("--silent-start", start_timeout_s=1.0))
    await until(lambda: 'last log line: "still loading weights"' in replica.reason, lambda: replica.reason)
    assert replica.state is State.STARTING
    await comes(replica, FAILED)
    assert "not ready 1 s after its start" in replica.reason and "raise start_timeout_s" in replica.reason


async def test_an_engine_whose_port_is_taken_waits_for_it(launched, killed, comes, until):
    replica = await launched()
    await killed(replica)
    with socket.create_server((HOST, replica.port)):
        taken = f"port {replica.port} is taken: stop what holds it"
        await until(lambda: taken in replica.reason, lambda: replica.reason)
        assert replica.state is FAILED
    await comes(replica, READY)


# Drained


async def test_drain_waits_for_requests_then_stops_the_process(fleet, launched, comes, alive, until):
    open_requests = {}
    fleet.inflight = lambda id: open_requests.get(id, 0)
    fleet._drain_timeout = 30.0
    replica = await launched()
    pid, open_requests[replica.id] = replica.pid, 2
    drained = fleet.drain(replica.id)
    assert replica.state is State.DRAINING and fleet.drain(replica.id) is drained
    await until(lambda: replica.reason == "draining: 2 requests to finish")
    assert alive(pid) and not drained.done()
    open_requests[replica.id] = 0
    await drained
    assert replica.state is STOPPED and replica.reason == "drained on request" and not alive(pid)
    fleet.resume(replica.id)
    await comes(replica, READY)
    assert replica.pid != pid


async def test_a_drain_ends_at_its_deadline_and_says_so(fleet, launched):
    replica = await launched()
    fleet.inflight, fleet._drain_timeout = lambda id: 3, 0.1
    await fleet.drain(replica.id)
    assert replica.reason == "drained on request, 3 requests did not finish within 0.1 s"


async def test_an_engine_that_dies_while_draining_is_not_started_again(fleet, launched, comes):
    replica = await launched()
    fleet.inflight, fleet._drain_timeout = lambda id: 1, 30.0
    fleet.drain(replica.id)
    os.kill(replica.pid, signal.SIGKILL)
    await comes(replica, STOPPED)
    assert "killed by SIGKILL" in replica.reason
    await fleet.drain(replica.id)  # though its requests were not told to have ended
    assert "killed by SIGKILL" in replica.reason and State.STARTING not in states(fleet, replica)[2:]


async def test_remove_drains_and_forgets(fleet, launched, alive):
    replica = await launched()
    pid = replica.pid
    removed = fleet.remove(replica.id)
    assert fleet.remove(replica.id) is removed  # two operators
    await removed
    assert replica.id not in fleet.replicas and replica.state is STOPPED and not alive(pid)
    with pytest.raises(KeyError):
        fleet.drain(replica.id)


# Adopted


async def test_of_an_engine_that_it_did_not_launch_a_fleet_that_stops_says_that_it_stays(fleet, engine, comes):
    replica = fleet.add(await engine())
    await comes(replica, READY)
    await fleet.stop()
    assert replica.state is STOPPED
    assert replica.reason == "this gateway stops, and leaves the engine as it is"
    await engine.stop()


async def test_the_fleet_starts_while_an_engine_is_down_and_takes_it_when_it_comes(fleet, engine, comes):
    port = pick(1, HOST, set())[0]
    replica = fleet.add(f"http://{HOST}:{port}")
    await comes(replica, FAILED)
    assert f"{HOST}:{port}: nothing listens there" in replica.reason and "asked again" in replica.reason
    await engine(port)
    await comes(replica, READY)
    assert replica.incarnation == "1.00" and not replica.managed and replica.pid is None


@pytest.mark.parametrize("first, second, names", [("1.0", "2.0", ("1.00", "2.00")), (None, None, ("seen-1", "seen-2"))])
async def test_an_adopted_engine_that_goes_away_is_taken_back_as_another(fleet, engine, comes, first, second, names):
    """Also where it tells no start time."""
    replica = await comes(fleet.add(await engine(started=first)), READY)
    assert replica.incarnation == names[0]
    await engine.stop()
    await comes(replica, FAILED)
    assert "nothing listens" in replica.reason and replica.fault == "connect"
    await engine(replica.port, started=second)
    await comes(replica, READY)
    assert replica.incarnation == names[1] and not replica.fault


async def test_a_restart_between_two_looks_is_a_new_incarnation(fleet, engine, comes, until):
    replica = await comes(fleet.add(await engine()), READY)
    fleet.inflight = lambda id: 1  # busy: every look reads the metrics
    fleet.seen.clear()
    engine.pages["/metrics"] = "process_start_time_seconds 2.5\n"
    await until(lambda: states(fleet, replica) == [State.WARMING, READY])
    assert replica.incarnation == "2.50"


async def test_a_missing_scrape_does_not_rename_an_incarnation(fleet, engine, comes, until):
    replica = await comes(fleet.add(await engine()), READY)
    fleet.seen.clear()
    page = engine.pages.pop("/metrics")
    fleet.engines[replica.id].nudge()
    await until(lambda: any("/metrics cannot be read" in problem for problem in replica.problems))
    engine.pages["/metrics"] = page
    fleet.engines[replica.id].nudge()
    before = replica.scrape.at
    await until(lambda: replica.scrape.at > before)
    assert replica.incarnation == "1.00" and not states(fleet, replica)


async def test_asked_for_models_the_fleet_knows_a_new_adapter_when_the_call_returns(fleet, engine, comes):
    replica = await comes(fleet.add(await engine()), READY)
    fleet.seen.clear()
    await fleet.ask_models()
    assert fleet.seen == []  # nothing is new
    engine.pages["/v1/models"] = {"data": [{"id": "m"}, {"id": "sql", "parent": "m"}]}
    await fleet.ask_models()
    assert fleet.seen == [(replica.id, READY, READY)] and replica.models == {"m": None, "sql": "m"}
    engine.pages["/v1/models"] = {"data": []}
    await fleet.ask_models()
    await engine.stop()
    await fleet.ask_models()
    assert replica.models == {"m": None, "sql": "m"}  # an engine that does not tell serves what it did


async def test_the_url_may_name_events_and_model(fleet, engine, comes):
    url = await engine()
    replica = await comes(fleet.add(f"{url}#events=tcp://h:1,replay=tcp://h:2,model=m"), READY)
    assert replica.events == EventSource("tcp://h:1", "tcp://h:2", "")
    assert not any("events" in problem for problem in replica.problems)
    other = await engine(models=("x",))
    replica = await comes(fleet.add(f"{other}#model=m"), State.WARMING)
    assert "serves x, not 'm'" in replica.reason


async def test_adopted_engines_have_to_serve_the_name_that_was_given(fleets, engine, comes, until):
    fleet = fleets(model="mine")
    replica = await comes(fleet.add(await engine(models=("other", "more"))), State.WARMING)
    await until(lambda: "serves other, more, not 'mine'" in replica.reason, lambda: replica.reason)
    assert "--served-model-name mine" in replica.reason
    engine.pages["/v1/models"] = {"data": [{"id": "mine"}]}
    await comes(replica, READY)
    engine.pages["/v1/models"] = {"data": [{"id": "other"}]}  # another server took the port
    fleet.engines[replica.id].nudge()
    await comes(replica, State.WARMING)  # out; one that is degraded gets requests where no other is ready
    assert "serves other, not 'mine'" in replica.reason


async def test_known_urls_are_not_added_twice_but_wanted_again(fleet, engine, comes):
    url = await engine()
    replica = await comes(fleet.add(url), READY)
    assert fleet.add(url + "/v1") is replica and len(fleet.replicas) == 1
    await fleet.drain(replica.id)
    assert replica.state is STOPPED
    assert fleet.add(url) is replica
    await comes(replica, READY)


# What traffic shows


async def test_failing_requests_degrade_and_an_answered_one_restores(fleet, engine, comes):
    replica = await comes(fleet.add(await engine()), READY)
    fleet.failed(replica.id, "5xx")
    assert replica.state is READY
    fleet.failed(replica.id, "closed")
    assert replica.state is DEGRADED and "requests fail (closed)" in replica.reason
    fleet.succeeded(replica.id)
    assert replica.state is READY and "requests" in replica.reason


async def test_refused_connections_do_not_get_a_live_engine_killed(fleet, launched, comes):
    replica = await launched()
    pid = replica.pid
    fleet.failed(replica.id, "connect"), fleet.failed(replica.id, "connect")
    assert replica.state is FAILED and "its process is alive" in replica.reason
    await comes(replica, READY)
    assert replica.pid == pid and replica.restarts == 0


async def test_a_launched_replica_has_its_profiles_whole_blocks_and_speculator(fleet, fake_profile, comes):
    """The engine tells one GPU's share of a block, and nothing of the speculator."""

    class Sharing(type(fake_profile())):
        context_parallel = property(lambda self: 8)
        drops_block = property(lambda self: True)

    (replica,) = await fleet.launch(1, Sharing(engine="sim"))
    await comes(replica, READY)
    assert (replica.block_size, replica.drops_block) == (8 * 16, True)


async def test_one_refused_request_makes_the_fleet_look_at_once(seldom, engine, comes):
    replica = await comes(seldom.add(await engine()), READY)
    await engine.stop()
    seldom.failed(replica.id, "connect")
    await comes(replica, FAILED, deadline=5)


async def test_a_broken_listener_does_not_stop_the_fleet(fleet, engine, comes, caplog):
    fleet.on_change.insert(0, lambda *change: 1 / 0)
    replica = await comes(fleet.add(await engine()), READY)
    assert states(fleet, replica)[-1] is READY and "callback" in caplog.text


async def test_a_watcher_survives_its_own_bugs(fleet, engine, comes, monkeypatch, caplog):
    ticks = iter([RuntimeError("a bug")])
    tick = watch.Watch.tick

    async def buggy(self, full=False):
        for error in ticks:
            raise error
        await tick(self, full)

    monkeypatch.setattr(watch.Watch, "tick", buggy)
    await comes(fleet.add(await engine()), READY)
    assert "a bug" in caplog.text


async def test_an_engine_that_hung_and_then_was_replaced_is_another_incarnation(fleet, engine, serve, comes, until):
    """Also where it tells no start time: nobody listened in between."""
    replica = await comes(fleet.add(await engine(started=None)), READY)
    assert replica.incarnation == "seen-1"
    engine.hold.clear()
    await comes(replica, FAILED)
    assert "no answer for" in replica.reason and replica.fault == "timeout"
    await engine.stop()
    await until(lambda: "nothing listens" in replica.reason, lambda: replica.reason)
    engine.hold.set()
    await engine(replica.port, started=None)
    await comes(replica, READY)
    assert replica.incarnation == "seen-2"


async def test_failing_requests_do_not_make_the_fleet_ask_more_often(fleet, engine, comes):
    fleet.interval = 60.0
    replica = await comes(fleet.add(await engine()), READY)
    engine.asked.clear()
    for _ in range(100):
        fleet.failed(replica.id, "5xx")
        fleet.failed(replica.id, "timeout")
        await asyncio.sleep(0)
    assert replica.state is DEGRADED and not engine.asked
