"""The field's figures of a run, and its cells: what each says of the requests it was made from."""

import json
from dataclasses import replace

import pytest

from bench.field import Grid, busy_rate, figures
from bench.field_cells import CELLS, QUICK, Cell, work
from loadgen.drive.records import Record
from loadgen.simulate import Outcome
from loadgen.workload.conversations import Conversation

CLOSED = [cell for cell in CELLS if cell.users]


def record(conversation, turn, sent, first, last, output, cached=0, replica="r0"):
    counted = {"prompt_tokens": 100, "output_tokens": output, "cached_tokens": cached}
    return Record(conversation, turn, sent, sent=sent, first=first, last=last, status=200, replica=replica, **counted)


def test_the_figures_of_a_run():
    """Two conversations, of two turns and of one."""
    done = [
        record("a", 0, 0.0, 0.1, 1.1, 11),
        record("a", 1, 3.0, 3.3, 4.3, 11, cached=80),
        record("b", 0, 1.0, 1.2, 2.2, 21, cached=40, replica="r1"),
    ]
    cell = Cell("rollouts", 3, users=1, replicas=2)
    outcome = Outcome([Conversation(name, []) for name in "ab"], [0.0, 0.0])
    outcome.done, outcome.ended = done, 4.3
    found = figures(outcome, cell)
    assert found["ttft_mean"] == pytest.approx(200) and found["e2e_mean"] == pytest.approx(1000 * (1.1 + 1.3 + 1.2) / 3)
    assert found["tpot_p99"] == pytest.approx(100, rel=0.01)
    assert found["tokens_s"] == pytest.approx(43 / 4.3) and found["wall"] == 4.3
    assert found["trajectory"] == pytest.approx((4.3 + 1.2) / 2)
    assert (found["hit"], found["hit_least"]) == (pytest.approx(0.4), pytest.approx(0.4))
    assert found["spread"] == pytest.approx(4 / 3)


def test_the_busy_rate_counts_until_the_last_conversation_begins():
    done = [record("a", 0, 0.0, 1.0, 2.0, 30), record("b", 0, 4.0, 5.0, 6.0, 500), record("a", 1, 3.0, 4.0, 5.0, 70)]
    assert busy_rate(done) == pytest.approx(30 / 4)


def test_cells_have_names_of_their_own_and_the_quick_ones_are_among_them():
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names) and set(QUICK) < set(names)
    assert {cell.at for cell in CELLS} >= {0.1, 0.3, 0.5, 0.7, 0.9}


def test_closed_loops_are_of_two_to_eight_users_on_four_to_sixteen_engines():
    normal = [cell for cell in CLOSED if not cell.special]
    assert {cell.load for cell in normal} == {"coders", "rollouts"}
    assert {cell.users for cell in normal} == {2, 4, 8} and {cell.replicas for cell in normal} == {4, 8, 16}


@pytest.mark.parametrize("load", ["coders", "rollouts"])
def test_a_closed_loop_has_trajectories_of_twenty_to_sixty_turns_for_each_user(load):
    cell = next(cell for cell in CLOSED if cell.load == load)
    asked = work(cell, 0.0, 1)
    turns = [len(conversation.turns) for conversation in asked.conversations]
    assert all(20 <= length <= 60 for length in turns[:-1])
    assert len(turns) >= 1.5 * cell.users * cell.replicas and set(asked.starts) == {0.0}
    limits = {turn.limit for conversation in asked.conversations for turn in conversation.turns}
    assert None in limits and 4096 in limits and len(limits) > 2
    assert work(replace(cell, users=cell.users), 0.0, 1) == asked != work(cell, 0.0, 2)


def test_in_the_thrash_scene_the_caches_together_hold_what_users_have_said_and_no_more():
    cell = next(cell for cell in CELLS if cell.special == "thrash")
    longest = [
        sum(span.length for turn in conversation.turns for message in turn.messages for span in message["content"])
        + sum(turn.max_tokens for turn in conversation.turns)
        for conversation in work(cell, 0.0, 1).conversations
    ]
    mean = sum(longest) / len(longest) / 2  # half way through
    room = cell.profiles(0)[0].num_blocks * 16
    assert 0.75 * room < cell.users * mean < room


def test_what_other_code_made_is_forgotten_and_run_again(tmp_path):
    cell = next(cell for cell in CELLS if cell.at == 0.3)
    fleet, kept = {"saturation": 40.0, "working_set": 900}, {"kept": True}
    path = tmp_path / "field.json"
    path.write_text(json.dumps({"fleets": {cell.fleet: fleet}, "cells": {}}))
    grid = Grid(path, 0.0, 1)
    entry = grid.kept["cells"][cell.name]
    missing = grid.missing_runs([cell], ["round_robin", "lmetric"], (1, 2), (1, 2))
    assert [place[1:] for place, *_ in missing] == [
        (rule, seed) for rule in ("round_robin", "lmetric") for seed in "12"
    ]
    for place, of, _ in missing:
        entry.setdefault(place[1], {})[place[2]] = kept | {"of": of}
    entry["lmetric"]["2"]["of"] = "another"
    entry["a rule that is gone"] = {"1": kept | {"of": "another"}}
    grid.forget_stale()
    assert {rule: set(runs) for rule, runs in entry.items() if isinstance(runs, dict)} == {
        "round_robin": {"1", "2"},
        "lmetric": {"1"},
    }
    [(place, *_)] = grid.missing_runs([cell], ["round_robin", "lmetric"], (1, 2), (1, 2))
    assert place == (cell.name, "lmetric", "2")
