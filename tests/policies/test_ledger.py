"""The ledger reads zero when idle, whatever lives its reservations had."""

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Ledger, Load
from policies.ledger import FAR

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "first_byte", "came", "release", "remove", "add"]),
        st.integers(0, 30),
        st.integers(0, 2),
        st.integers(0, 5000),
    ),
    max_size=80,
)


def counts(load):
    return astuple(load)[:6]


def act(ledger, reservations, action, number, replica, tokens):
    if action == "reserve":
        ledger.add(str(replica))
        reservations.append(ledger.reserve(str(replica), tokens // 2, tokens, output=tokens // 3))
    elif action in ("add", "remove"):
        getattr(ledger, action)(str(replica))
    elif action == "came" and reservations:
        ledger.came(reservations[number % len(reservations)], tokens)
    elif reservations:
        getattr(ledger, action)(reservations[number % len(reservations)])


@given(ACTIONS)
def test_random_lives_end_at_zero(actions):
    ledger, reservations = Ledger(), []
    for replica in "012":
        ledger.add(replica)
    for action in actions:
        act(ledger, reservations, *action)
        live = [r for r in reservations if r.stage != "done"]
        prefill = [r for r in live if r.stage == "prefill"]
        decode = [r for r in live if r.stage == "decode"]
        assert counts(ledger.total()) == (
            len(live),
            len(prefill),
            sum(r.uncached for r in prefill),
            len(decode),
            sum(r.tokens for r in decode),
            sum(r.output for r in live),
        )
    for reservation in reservations:
        ledger.release(reservation)
    assert counts(ledger.total()) == (0, 0, 0, 0, 0, 0)


def test_a_reservation_remembers_the_load_it_met():
    ledger = Ledger()
    load = ledger.add("a")
    ledger.reserve("a", 100, 160, output=70)
    second = ledger.reserve("a", 50, 50, output=20)
    assert counts(second.before) == (1, 1, 100, 0, 0, 70)
    ledger.first_byte(second)
    assert counts(second.before) == (1, 1, 100, 0, 0, 70)
    assert counts(load) == (2, 1, 100, 1, 50, 90)
    ledger.others("a", (5, 3, 700, 2, 40, 300), 3.0)
    ledger.scraped("a", 4, 0.75)
    met = load.copy()
    assert len(set(astuple(met))) >= 8 and ledger.reserve("a", 7, 9, now=4.0).before == met


def test_what_has_come_of_an_answer_is_context_until_it_ends():
    ledger = Ledger()
    load = ledger.add("a")
    first, second = ledger.reserve("a", 100, 160), ledger.reserve("a", 50, 50)
    ledger.came(first, 5)  # nothing can have come before the first byte
    assert load.context_tokens == 0
    ledger.first_byte(first)
    ledger.first_byte(second)
    ledger.came(first, 5)
    ledger.came(second, 30)
    ledger.came(first, 7)
    assert load.context_tokens == 160 + 12 + 50 + 30
    ledger.release(first)
    ledger.came(first, 100)
    assert load.context_tokens == 80
    ledger.release(second)
    assert counts(load) == (0, 0, 0, 0, 0, 0)


def test_a_replica_that_comes_back_starts_empty_and_old_requests_do_not_touch_it():
    ledger = Ledger()
    ledger.add("a")
    old = ledger.reserve("a", 10, 10)
    ledger.remove("a")
    with pytest.raises(KeyError):
        ledger.reserve("a", 1, 1)
    fresh = ledger.add("a")
    ledger.release(old)
    assert fresh == Load()


@given(ACTIONS, st.lists(st.tuples(st.integers(0, 80), st.integers(0, 2), st.integers(0, 9)), max_size=9))
def test_where_what_is_outstanding_changes_is_told(actions, elsewhere):
    """A shared ledger states it anew for these replicas alone, whatever other gateways do meanwhile."""
    ledger, told, reservations = Ledger(), {}, []
    ledger.moved = lambda replica: told.update({replica: ledger.outstanding_on(replica)})
    for replica in "012":
        ledger.add(replica)
    for at, action in enumerate(actions):
        for when, where, many in elsewhere:
            if when == at:
                ledger.others(str(where), (many, 0, 0, many, 7 * many, 5 * many))
        act(ledger, reservations, *action)
        outstanding = {name: counts for name, counts in ledger.outstanding().items() if any(counts)}
        assert {name: counts for name, counts in told.items() if any(counts)} == outstanding
    for reservation in reservations:
        ledger.release(reservation)
    assert not any(map(any, told.values())) and counts(ledger.total()) == (0, 0, 0, 0, 0, 0)


def test_a_load_is_the_sum_of_all_gateways_and_own_is_told_apart():
    ledger = Ledger()
    load = ledger.add("a")
    ledger.others("a", (3, 1, 500, 2, 900, 600))
    ledger.reserve("a", 40, 100, output=80)
    assert counts(load) == (4, 2, 540, 2, 900, 680) and ledger.own("a") == (1, 1, 40, 0, 0, 80)
    ledger.others("a", (0, 0, 0, 0, 0, 0))
    assert counts(load) == (1, 1, 40, 0, 0, 80)


def test_what_the_one_who_decided_has_counted_is_not_told_again():
    ledger, told = Ledger(), []
    ledger.add("a")
    ledger.moved = told.append
    reservation = ledger.reserve("a", 40, 100, counted=True, output=80)
    ledger.release(reservation)
    assert told == ["a"]


def under_way(load):
    return load.since, load.begun, load.begun_tokens


def test_a_first_token_tells_when_the_prompts_that_waited_began():
    ledger = Ledger()
    load = ledger.add("a")
    first = ledger.reserve("a", 100, 100, now=1.0)
    assert under_way(load) == (1.0, 1, 100)
    second = ledger.reserve("a", 20, 20, now=1.5)
    third = ledger.reserve("a", 3, 3, now=1.6)
    assert under_way(load) == (1.0, 1, 100) and (second.at, under_way(second.before)) == (1.5, (1.0, 1, 100))
    ledger.first_byte(first, 2.0)
    assert under_way(load) == (2.0, 2, 23)
    ledger.release(second)  # its client left
    assert load.begun == 1 and load.begun_tokens <= load.prefill_tokens == 3
    ledger.first_byte(third)
    assert load.since == FAR, "nobody told the time"


def test_a_step_of_other_gateways_prompts_ended_when_they_tell_of_fewer():
    ledger = Ledger()
    load = ledger.add("a")
    ledger.others("a", (2, 2, 70, 0, 0, 0), 1.0)
    ledger.reserve("a", 5, 5, now=1.2)
    ledger.others("a", (3, 3, 90, 0, 0, 0), 1.3)  # one more of them waits
    assert under_way(load) == (1.0, 2, 70)
    ledger.others("a", (3, 1, 20, 2, 70, 0), 1.4)
    assert under_way(load) == (1.4, 2, 25)
    ledger.others("a", (3, 0, 0, 3, 90, 0))
    assert load.since == FAR


@given(ACTIONS)
def test_what_has_begun_is_never_more_than_there_is_and_nothing_has_no_tokens(actions):
    ledger, reservations = Ledger(), []
    for replica in "012":
        ledger.add(replica)
    for action in actions:
        act(ledger, reservations, *action)
        for load in (ledger.add(replica) for replica in "012"):
            assert 0 <= load.begun <= load.prefilling and 0 <= load.begun_tokens <= load.prefill_tokens
            assert load.prefilling or not load.prefill_tokens
            assert load.decoding or not load.context_tokens


def test_recent_choices_are_shares_that_forget():
    ledger = Ledger()
    loads = [ledger.add(name) for name in "ab"]

    def share():
        return loads[0].recent / (loads[0].recent + loads[1].recent)

    for turn in range(20_000):  # long enough for the weights to begin anew
        ledger.release(ledger.reserve("aab"[turn % 3], 1, 1))
    assert share() == pytest.approx(2 / 3, abs=0.06)
    for _ in range(100):
        ledger.release(ledger.reserve("b", 1, 1))
    assert share() < 0.05


def test_who_follows_the_changes_hears_of_all_from_then_on():
    ledger = Ledger()
    ledger.add("a"), ledger.add("b")
    ledger.release(ledger.reserve("b", 1, 1))
    changes = ledger.follow()
    before = changes.count
    ledger.first_byte(ledger.reserve("a", 1, 1))
    ledger.scraped("b", 1, 0.5)
    assert ledger.follow() is changes and sorted(changes.since(before)) == ["a", "a", "b"]


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 9)), min_size=1, max_size=6), st.data())
def test_an_answer_that_comes_at_once_is_released_as_one_that_was_told_in_steps(requests, data):
    ledgers, lives = (Ledger(), Ledger()), ([], [])
    for ledger, taken in zip(ledgers, lives, strict=True):
        ledger.add("r")
        for number, (tokens, due) in enumerate(requests):
            taken.append(ledger.reserve("r", tokens // 2, tokens, now=10.0 + number / 10, output=9, due=20.0 + due))
    for at in data.draw(st.permutations(range(len(requests)))):
        now = 15.0 + data.draw(st.integers(0, 10))
        in_steps, at_once = ledgers
        in_steps.first_byte(lives[0][at])
        in_steps.answered(lives[0][at], now)
        in_steps.release(lives[0][at])
        at_once.release(lives[1][at], answered_at=now)
        assert astuple(in_steps.load("r")) == astuple(at_once.load("r"))
