"""The decision path costs what it did: by count, so that a busy machine does not matter."""

import pytest

from bench import instructions


def test_a_decision_costs_what_is_recorded():
    before = instructions.recorded().get(instructions.build())
    if before is None:
        pytest.skip(f"no counts are recorded for {instructions.build()}; python -m bench.instructions --record does it")
    try:
        now = instructions.counted()
    except instructions.Unavailable as why:
        pytest.skip(str(why))
    off = instructions.off(now, before)
    assert not off, "; ".join(off) + ". If that is meant: python -m bench.instructions --record, and commit it"


def test_more_than_three_percent_either_way_is_told():
    before = dict.fromkeys(instructions.STEPS, 1000)
    assert not instructions.off(before | {"match": 1029, "choose": 971}, before)
    off = instructions.off(before | {"match": 1031, "choose": 969}, before)
    assert [line.split(":")[0] for line in off] == ["match", "choose"]
