"""When the process did not run: what is measured, what is seen, and what counts."""

import asyncio
from time import monotonic, sleep

import pytest

from replicas import State
from replicas.health import Health, Limits, Verdict
from replicas.lifecycle import Event
from replicas.pulse import BEAT_SECONDS, FRESH_SECONDS, LATE_SECONDS, MOST_FRESH_SECONDS, REMEMBERED, Pulse


@pytest.fixture
def pulse():
    """Held up for 10 s until 110, and for 3 s until 120."""
    made = Pulse()
    made.held_up(10.0, 110.0)
    made.held_up(3.0, 120.0)
    return made


@pytest.mark.parametrize(
    "since, now, ran",
    [
        (121.0, 125.0, 4.0),  # after both
        (120.0, 125.0, 5.0),
        (115.0, 125.0, 7.0),  # one of them
        (99.0, 125.0, 13.0),  # both
    ],
)
def test_only_the_time_in_which_it_ran_is_measured(pulse, since, now, ran):
    assert pulse.ran(since, now) == pytest.approx(ran)


def test_what_breaks_right_after_a_long_time_is_not_taken_at_its_word(pulse):
    assert not pulse.saw(119.0, 121.0) and pulse.saw(120.0, 121.0)
    assert pulse.fresh(120.5) and not pulse.fresh(120.0 + FRESH_SECONDS)
    pulse.held_up(1.0, 130.0)
    assert not pulse.fresh(130.1), "nothing breaks for a second in which nobody reads"


def test_the_memory_of_such_times_is_bounded():
    pulse = Pulse()
    for second in range(10 * REMEMBERED):
        pulse.held_up(0.5, float(second))
    last = 10.0 * REMEMBERED - 1
    assert len(pulse._ends) == REMEMBERED
    assert pulse.ran(last - 10.5, last) == pytest.approx(10.5 - 11 * 0.5)
    assert pulse.ran(0.0, last) == pytest.approx(last - REMEMBERED * 0.5), "the oldest ones count as time"


async def test_a_loop_that_is_held_up_knows_before_its_timers_say_so():
    told = []
    pulse = Pulse()
    pulse.on_held_up.append(lambda now, seconds: told.append(seconds))
    pulse.start()
    begun, clock = monotonic(), pulse.clock()
    sleep(BEAT_SECONDS + LATE_SECONDS + 0.3)
    assert not pulse.saw(begun, monotonic()), "whoever asks first finds out"
    assert pulse.clock() - clock < monotonic() - begun - LATE_SECONDS
    times = len(told)
    await asyncio.sleep(0.01)  # the beat is due
    assert times == len(told) == 1 and told[0] > LATE_SECONDS, "and it is told of once"
    pulse.stop()
    sleep(BEAT_SECONDS + LATE_SECONDS + 0.1)
    pulse.look(monotonic())
    assert len(told) == 1


def test_what_comes_out_of_a_stop_is_fresh_while_it_is_read_and_no_longer():
    pulse, now = Pulse(), 100.0
    pulse.held_up(10.0, now)
    for _ in range(4):  # each beat comes late
        now += 0.9
        assert pulse.fresh(now)
        pulse.held_up(0.6, now)
    assert now < 100.0 + MOST_FRESH_SECONDS and pulse.fresh(now + 0.9)
    pulse.held_up(0.6, now + 0.9)
    assert not pulse.fresh(100.0 + MOST_FRESH_SECONDS)
    starved = Pulse()
    for second in range(30):
        starved.held_up(0.6, float(second))
        assert not starved.fresh(second + 0.1), "a machine without CPU excuses nothing"


def test_an_engine_is_not_lost_for_the_time_in_which_nobody_asked_it():
    """Two probes failed before a stop of 14 s, and one after it: that is no silence of 15 s."""
    health, pulse, seconds = Health(Limits(fall=3, lost_after=15.0)), Pulse(), 0.0
    for at in (100.0, 101.0):
        health.probed(at - seconds, "timeout", "did not answer")
    pulse.held_up(14.0, 116.0)
    health.probed(116.0 - pulse._total, "timeout", "did not answer")
    assert health.opinion(116.0 - pulse._total).verdict is Verdict.TROUBLE


@pytest.fixture
async def watched(fleets, engine, comes):
    """A fleet of one READY replica, which is looked at when it is asked for alone; and its watch."""
    fleet = fleets(3600.0)
    replica = await comes(fleet.add(await engine()), State.READY)
    return fleet, replica, fleet.engines[replica.id]


async def test_what_broke_while_nobody_read_is_looked_at_and_not_counted(watched, until):
    fleet, replica, watch = watched
    looked_at = watch._looked_at
    fleet.pulse.held_up(10.0, monotonic())
    for _ in range(3):
        fleet.failed(replica.id, "closed")
    assert replica.state is State.READY and watch.health.opinion(fleet.pulse.clock()).verdict is Verdict.GOOD
    await until(lambda: watch._looked_at > looked_at, lambda: "it was not looked at")
    assert replica.state is State.READY
    fleet.pulse.held_up(10.0, monotonic())
    for _ in range(3):
        fleet.failed(replica.id, "5xx")
    assert replica.state is State.DEGRADED, "an engine's own errors do not come from that"


async def test_a_look_that_failed_while_we_were_held_up_is_taken_again_once(watched, engine):
    """And not a second time, on a machine that is held up all the time."""
    fleet, replica, watch = watched
    found = watch.access.find

    async def held_up(*given, **more):
        facts = await found(*given, **more)
        fleet.pulse.held_up(1.0, monotonic())
        return facts

    async def stays_open():
        """The task that is cancelled closes its session as it ends."""

    close, watch.access.close = watch.access.close, stays_open
    fleet.engines[replica.id].task.cancel()  # what it is nudged to do is done below
    watch.access.find = held_up
    await engine.stop()
    failures = []
    for _ in range(3):
        await watch.tick(full=True)
        failures.append(watch.health._probe_failures)
        watch.fleet.tell(replica, Event.SERVES, "as before")
    await close()
    assert failures[0] == 0 and failures[1] == 1
