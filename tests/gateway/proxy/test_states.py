"""The tables of an exchange and of its attempts, on their own."""

from gateway.proxy.conductor import DO
from gateway.proxy.states import LEGS, TRANSITIONS, Action, Event, Leg, State, Turn


def reached(first, steps):
    """All states that `steps` (pairs of before and after) lead to."""
    found, todo = {first}, [first]
    while todo:
        state = todo.pop()
        new = {after for before, after in steps if before is state} - found
        found |= new
        todo += new
    return found


def test_every_state_is_reached_and_every_exchange_can_end():
    assert reached(State.PREPARING, [(before, after) for (before, _), (after, _) in TRANSITIONS.items()]) == set(State)
    assert reached(Leg.CONNECTING, [(before, after) for (before, _), after in LEGS.items()]) == set(Leg)


def test_nothing_follows_the_end():
    assert not [key for key in TRANSITIONS if key[0] is State.ENDED]
    assert not [key for key in LEGS if key[0] is Leg.ENDED]


def test_a_client_that_leaves_ends_every_state():
    for state in set(State) - {State.ENDED}:
        assert TRANSITIONS[state, Event.GONE] == (State.ENDED, Action.ABANDON)
    for leg in set(Leg) - {Leg.ENDED}:
        assert LEGS[leg, Turn.DROPPED] is Leg.ENDED


def test_nothing_is_retried_once_the_client_has_a_byte():
    assert not [
        event
        for (state, event), (_, action) in TRANSITIONS.items()
        if state is State.ANSWERING and action is Action.RETRY
    ]


def test_every_action_is_done():
    assert set(DO) == set(Action) == {action for _, action in TRANSITIONS.values()}
