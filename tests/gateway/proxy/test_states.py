"""The tables of an exchange and of its attempts, on their own."""

from gateway.proxy.failures.actions import Failures
from gateway.proxy.handle import Handler
from gateway.proxy.states import (
    ATTEMPT_TRANSITIONS,
    TRANSITIONS,
    AttemptEvent,
    AttemptState,
    ExchangeEvent,
    ExchangeState,
)


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
    assert reached(
        ExchangeState.PREPARING, [(before, after) for (before, _), (after, _) in TRANSITIONS.items()]
    ) == set(ExchangeState)
    assert reached(
        AttemptState.CONNECTING, [(before, after) for (before, _), after in ATTEMPT_TRANSITIONS.items()]
    ) == set(AttemptState)


def test_nothing_follows_the_end():
    assert not [key for key in TRANSITIONS if key[0] is ExchangeState.ENDED]
    assert not [key for key in ATTEMPT_TRANSITIONS if key[0] is AttemptState.ENDED]


def test_a_client_that_leaves_ends_every_state():
    for state in set(ExchangeState) - {ExchangeState.ENDED}:
        assert TRANSITIONS[state, ExchangeEvent.GONE] == (ExchangeState.ENDED, "Failures.client_left")
    for leg in set(AttemptState) - {AttemptState.ENDED}:
        assert ATTEMPT_TRANSITIONS[leg, AttemptEvent.DROPPED] is AttemptState.ENDED


def test_nothing_is_retried_once_the_client_has_a_byte():
    assert not [
        event
        for (state, event), (_, action) in TRANSITIONS.items()
        if state is ExchangeState.ANSWERING and action == "Failures.retry"
    ]


def test_every_action_is_a_method_of_the_handler_or_of_its_failures():
    actors = {"Handler": Handler, "Failures": Failures}
    for _, action in TRANSITIONS.values():
        actor, _, method = action.partition(".")
        assert callable(getattr(actors[actor], method, None)), action


def test_the_answer_to_a_first_leg_is_never_relayed():
    """It leads from waiting to its end, and its exchange goes on trying."""
    assert TRANSITIONS[ExchangeState.TRYING, ExchangeEvent.HANDED_OVER] == (ExchangeState.TRYING, "Handler.hand_over")
    assert ATTEMPT_TRANSITIONS[AttemptState.AWAITING, AttemptEvent.FINISHED] is AttemptState.ENDED
    assert [state for state, event in TRANSITIONS if event is ExchangeEvent.HANDED_OVER] == [ExchangeState.TRYING]
