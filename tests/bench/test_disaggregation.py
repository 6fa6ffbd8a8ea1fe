"""The bench of one leg or two: what it asks, and of which fleets."""

from dataclasses import replace

import pytest

from bench import disaggregation
from bench.disaggregation import (
    CHATS,
    EVERY,
    FAST,
    LONG,
    MODES,
    PROFILE,
    RULES,
    SLO,
    Run,
    chats,
    play,
    runs,
    setting,
    table,
)
from bench.rules.prefill_queue import make_legs


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
            alike = [one for one in asked if replace(one, rule=run.rule, policy=run.policy) == run]
            wanted = {*RULES} if run.part in ("trace", "chats") else {*MODES, *(["always"] * (run.part == "speeds"))}
            assert {one.rule for one in alike} == wanted
        assert len(setting(run).roles) == prefillers + both + decoders
        assert prefillers + both + decoders in ((2, 3, 4) if run.part == "chats" else (8,))
        make_legs(run.rule)  # there is such a rule
    chats_asked = [run for run in asked if run.part == "chats"]
    assert sum(run.long for run in chats_asked) == len(chats_asked) / 2


def test_of_two_speeds_the_quick_engines_are_the_prefillers():
    made = setting(Run("speeds", "2:0:6"))
    assert made.profiles == [FAST] * 4 + [PROFILE] * 4 and made.roles[:3] == ["prefill", "prefill", "decode"]
    for tokens, sequences, share in ((8000, 0, 0.51), (0, 50, 0.70)):
        quick, slow = (
            one.step.seconds(tokens, 0.0, sequences, 2000 * sequences, 0.5) - one.step.seconds(0, 0.0, 0, 0, 0.0)
            for one in (FAST, PROFILE)
        )
        assert quick == pytest.approx(share * slow)
    assert setting(Run("slow", "0:8:0")).profiles == [PROFILE] * 8


def test_a_run_tells_of_the_chats_times_between_tokens(monkeypatch):
    monkeypatch.setattr(disaggregation, "LONG", 20_000)
    run = Run("chats", "1:0:3", "always", requests=100)
    told = play(run)
    assert told.legs == 1.0 and 0 < told.itl_p99 <= told.itl_p999 and told.transfer > 10.0 and 0 < told.overhead < 1
    alone = Run("chats", "1:0:3", "always", requests=100, long=False)
    printed = table({run: told, alone: play(alone)})
    assert "always" in printed and f"{told.itl_p99:.1f}, {told.itl_p999:.1f} (" in printed


def test_of_limits_the_gateway_knows_those_that_answers_are_held_against():
    made, other = setting(Run("limits", "0:4:4")), setting(Run("trace", "0:4:4"))
    assert made.admission == "observe" and other.admission is None
    assert {name: limit * 1e3 for name, limit in made.slo._asdict().items()} == SLO


def test_of_faults_a_prefiller_is_lost_and_comes_back():
    (outage,) = setting(Run("faults", "2:0:6")).outages
    assert outage.replica == 0 and outage.at < outage.until


def test_figures_of_several_seeds_are_their_means_and_each_seeds_goodput_is_told():
    one = Run("trace", "2:0:6", requests=20)
    told = disaggregation.Figures(*[0.5] * len(disaggregation.Figures._fields))
    printed = table({one: told, replace(one, seed=2): told._replace(good=0.75, e2e=1000.5)})
    assert "62.5%" in printed and "good: 50.0%, 75.0%" in printed and " 500 " in printed
    assert "good:" not in table({one: told})


def test_another_seed_is_another_load_and_another_fleet():
    one = Run("chats", "0:4:0", requests=60)
    other = replace(one, seed=2)
    assert setting(other).seed == 2 and play(one) == play(one) != play(other)
