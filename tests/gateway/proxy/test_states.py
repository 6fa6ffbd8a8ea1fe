"""The table of a request's life, on its own."""

from gateway.proxy.states import TRANSITIONS, Action, Event, State


def test_every_state_is_reached_and_every_life_can_end():
    reached, todo = {State.PREPARING}, [State.PREPARING]
    while todo:
        state = todo.pop()
        for (before, _), (after, _) in TRANSITIONS.items():
            if before is state and after not in reached:
                reached.add(after)
                todo.append(after)
    assert reached == set(State)


def test_nothing_follows_the_end():
    assert not [key for key in TRANSITIONS if key[0] is State.ENDED]


def test_a_client_that_leaves_ends_every_state():
    for state in set(State) - {State.ENDED}:
        assert TRANSITIONS[state, Event.GONE] == (State.ENDED, Action.ABANDON)


def test_nothing_is_retried_once_the_client_has_a_byte():
    assert not [event for (state, event), (_, action) in TRANSITIONS.items() if state is State.STREAMING and action is Action.RETRY]
