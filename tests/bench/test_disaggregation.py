"""The bench of one leg or two: what it asks, and of which fleets."""

import pytest

from bench import disaggregation
from bench.disaggregation import CHATS, EVERY, LONG, RULES, Run, chats, play, runs, setting, table


def test_long_prompts_come_every_five_seconds_and_leave_the_chats_as_they_are():
    with_, without = chats(200, True, 1), chats(200, False, 1)
    count = len(without.conversations)
    assert [one.id for one in with_.conversations[:count]] == [one.id for one in without.conversations]
    assert with_.starts[:count] == without.starts
    added = with_.conversations[count:]
    assert (
        with_.starts[count:] == [EVERY * number for number in range(len(added))] and len(added) == 200 / CHATS / EVERY
    )
    assert {one.turns[0].messages[0]["content"][0].length for one in added} == {LONG}


@pytest.mark.parametrize("quick", [True, False])
def test_every_rule_is_run_on_every_fleet_that_has_it(quick):
    asked = runs(quick)
    assert len(set(asked)) == len(asked)
    for run in asked:
        prefillers, both, decoders = map(int, run.fleet.split(":"))
        if prefillers and not both:
            assert {
                one.rule for one in asked if (one.part, one.fleet, one.rate) == (run.part, run.fleet, run.rate)
            } == set(RULES)
        assert len(setting(run).roles) == prefillers + both + decoders == (4 if run.part == "chats" else 8)
    chats_asked = [run for run in asked if run.part == "chats"]
    assert sum(run.long for run in chats_asked) == len(chats_asked) / 2


def test_of_two_speeds_the_quick_engines_are_the_prefillers():
    made = setting(Run("speeds", "2:0:6"))
    assert [one.speedup for one in made.profiles] == [2.0] * 4 + [1.0] * 4 and made.roles[:3] == [
        "prefill",
        "prefill",
        "decode",
    ]


def test_a_run_tells_of_the_chats_times_between_tokens(monkeypatch):
    monkeypatch.setattr(disaggregation, "LONG", 20_000)
    run = Run("chats", "1:0:3", "always", requests=100)
    told = play(run)
    assert told.legs == 1.0 and 0 < told.itl_p99 <= told.itl_p999 and told.transfer > 10.0 and 0 < told.overhead < 1
    alone = Run("chats", "1:0:3", "always", requests=100, long=False)
    printed = table({run: told, alone: play(alone)})
    assert "always" in printed and f"{told.itl_p99:.1f}, {told.itl_p999:.1f} (" in printed
