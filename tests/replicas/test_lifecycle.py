from hypothesis import given
from hypothesis import strategies as st

from replicas.lifecycle import TABLE, Event, State, follows
from replicas.replica import Replica

EVENTS = st.lists(st.sampled_from(Event), max_size=40)


@given(EVENTS)
def test_a_drained_replica_stays_away_until_it_is_wanted(events):
    state = State.DRAINING
    for event in events:
        before, state = state, follows(state, event) or state
        if before is State.DRAINING:
            assert state in (State.DRAINING, State.STOPPED)
        if before is State.STOPPED and state is not State.STOPPED:
            assert (event, state) == (Event.LAUNCHED, State.STARTING)
            return


def test_traffic_only_after_the_model_was_seen():
    ways = {(state, event) for state, then in TABLE.items() for event, after in then.items() if after is State.READY}
    assert ways == {(state, Event.SERVES) for state in (State.WARMING, State.DEGRADED, State.LEAVING)}


def test_apply_tells_the_state_before_and_keeps_the_reason():
    replica = Replica("h:1", "http://h:1", "h", 1)
    assert replica.apply(Event.ANSWERS, "hello", 5.0) is State.STARTING
    assert (replica.state, replica.reason, replica.since) == (State.WARMING, "hello", 5.0)
    assert replica.apply(Event.TROUBLE, "means nothing here", 6.0) is None
    assert (replica.state, replica.reason, replica.since) == (State.WARMING, "hello", 5.0)
    replica.apply(Event.GONE, "first reason", 7.0)
    assert replica.apply(Event.GONE, "newer reason", 8.0) is None
    assert (replica.state, replica.reason, replica.since) == (State.FAILED, "newer reason", 7.0)


def test_a_fault_is_of_the_last_look_at_the_process_that_there_is():
    replica = Replica("h:1", "http://h:1", "h", 1, state=State.READY, fault="timeout")
    replica.apply(Event.GONE, "no answer for 15 s", 1.0)
    assert replica.fault == "timeout"
    replica.apply(Event.LAUNCHED, "process 7 started", 2.0)
    assert replica.fault == ""
    replica.state, replica.fault = State.READY, "timeout"
    replica.apply(Event.DOUBTED, "what answered a request there was no inference engine", 3.0)
    assert replica.fault == ""
