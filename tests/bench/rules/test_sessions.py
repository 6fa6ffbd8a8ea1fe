"""`sticky_least_loaded`: new sessions where fewest are active, known ones at home."""

from collections import Counter

from bench.rules import make

from .fleets import asked, chain, fleet, send


def ask(policy, candidates, session, now=0.0):
    request = asked(chain(2), session=session, now=now)
    index = policy.choose(request, candidates).index
    send(policy, request, candidates, index)
    return index


def test_new_sessions_are_spread_evenly_and_known_ones_stay_whatever_the_load():
    policy, candidates = make("sticky_least_loaded"), fleet(4)
    homes = {str(number): ask(policy, candidates, str(number)) for number in range(40)}
    assert Counter(homes.values()) == dict.fromkeys(range(4), 10)
    candidates[homes["7"]].load.requests = 1000
    assert ask(policy, candidates, "7", now=500.0) == homes["7"]


def test_it_is_sessions_that_count_not_requests():
    policy, candidates = make("sticky_least_loaded"), fleet(2)
    first = ask(policy, candidates, "a")
    candidates[1 - first].load.requests = 50
    assert ask(policy, candidates, "b") == 1 - first


def test_a_session_that_is_finished_makes_room():
    policy, candidates = make("sticky_least_loaded"), fleet(2)
    homes = {name: ask(policy, candidates, name) for name in "abcd"}
    for name in "abcd":
        if homes[name] == 0:
            policy.session_finished(name)
    policy.session_finished("never seen")
    assert [ask(policy, candidates, name) for name in "ef"] == [0, 0]


def test_one_that_nobody_asks_in_for_ten_minutes_is_forgotten():
    policy, candidates = make("sticky_least_loaded"), fleet(2)
    homes = {name: ask(policy, candidates, name) for name in "abcd"}
    for name in "abcd":
        if homes[name] == 1:
            ask(policy, candidates, name, now=590.0)
    assert [ask(policy, candidates, name, now=601.0) for name in "ef"] == [0, 0]


def test_sessions_of_a_replica_that_is_gone_are_placed_as_new_ones():
    policy, candidates = make("sticky_least_loaded"), fleet(3)
    homes = {str(number): ask(policy, candidates, str(number)) for number in range(9)}
    policy.gone("r2")
    after = {name: ask(policy, candidates[:2], name) for name in homes}
    assert all(after[name] == home for name, home in homes.items() if home < 2)
    assert Counter(after.values()).most_common()[0][1] <= 5


def test_without_a_session_the_fewest_requests():
    policy = make("sticky_least_loaded")
    assert policy.choose(asked(chain(2)), fleet(3, requests=[2, 1, 1])).index == 1
