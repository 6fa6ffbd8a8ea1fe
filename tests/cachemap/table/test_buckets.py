"""Buckets and the index against a plain dict, through any order of adding, dropping and growing."""

import runpy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap.table import buckets
from cachemap.table.buckets import EASY, FILL, Buckets
from cachemap.table.index import Index
from tests.calls import counting_calls

# few distinct tags in few buckets: first and second buckets fill, and words spill
TAGS = st.lists(st.integers(1, 60), unique=True, max_size=14)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "drop", "put", "widen", "go on"]), TAGS), max_size=30)


def u64(numbers):
    return np.array(sorted(numbers), np.uint64)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(buckets, "STEP", 7)  # so that a small table takes several


@settings(max_examples=300)
@given(STEPS)
def test_holds_what_was_added_and_not_dropped(steps):
    table, model = Buckets(40, 9), {}
    for what, tags in steps:
        if what == "add":
            new = u64([t for t in tags if t not in model][: 40 - len(model)])
            words = (new << np.uint64(9)) | np.uint64(5)
            places = table.add(new, words)
            assert table.words[places].tolist() == words.tolist()
            model |= dict.fromkeys(new.tolist(), 5)
        elif what == "widen" and table.wider is None:
            table.widen(40 + len(tags))
        elif what == "go on":
            table = table.go_on(len(tags))
        else:
            known = u64([t for t in tags if t in model])
            places = table.find(known)
            if what == "drop":
                table.drop(places)
                for tag in known.tolist():
                    del model[tag]
            elif what == "put":
                table.put(places, known << np.uint64(9) | np.uint64(3))
                model |= dict.fromkeys(known.tolist(), 3)
        for one in (table,) if table.wider is None else (table, table.grown()):
            places = one.find(u64(range(1, 61)))
            found = {t: int(one.payloads(places[t - 1 : t])[0]) for t, p in zip(range(1, 61), places) if p >= 0}
            assert found == model and one.count == len(model)
        if table.wider is not None:
            table = table.grown() if what == "put" else table
    while table.wider is not None:
        table = table.go_on(1)
    table.drop(table.find(u64(model)))
    for array in (table.words, table.load, table.passed, table.spilled):
        assert not array.any()


@settings(max_examples=300)
@given(STEPS)
def test_an_index_finds_the_numbers_of_blocks(steps):
    hashes = np.zeros(62, np.uint64)
    index, model = Index(40, 6, hashes), {}
    for what, tags in steps:
        if what == "add":
            new = u64([t for t in tags if t not in model][: 40 - len(model)])
            numbers = np.array([61 - t for t in new.tolist()], np.int64)
            hashes[numbers] = new
            assert index.insert(new, numbers).tolist() == numbers.tolist()
            model |= dict(zip(new.tolist(), numbers.tolist(), strict=True))
        elif what == "drop":
            numbers = np.array([model.pop(t) for t in tags if t in model], np.int64)
            index.remove(numbers)
            hashes[numbers] = 0
        elif what == "widen" and index.wider is None:
            index.widen(40 + len(tags))
        elif what == "go on":
            index = index.go_on(len(tags))
        expected = [model.get(t, 0) for t in range(1, 61)]
        assert index.numbers(u64(range(1, 61))).tolist() == expected and index.count == len(model)
        assert [index.at(t) for t in range(1, 61)] == expected


def test_full_to_its_fill_every_tag_is_found_and_hardly_any_spills():
    tags = np.random.default_rng(1).integers(1, 1 << 63, 100_000, np.uint64)
    table = Buckets(len(tags))
    places = np.concatenate([table.add(part, part) for part in np.split(tags, 200)])
    assert table.room >= 0 and table.count / len(table.words) > FILL - 0.01
    assert (table.find(tags) == places).all() and len(set(places.tolist())) == len(tags)
    assert (table.find(tags ^ np.uint64(1 << 63)) == -1).all()
    assert (table.spilled > 0).mean() < 0.03 and table.passed.max() < 40
    assert table.load.max() == 8 and (table.load >= EASY).mean() > 0.9


def test_tags_that_meet_in_another_process_do_not_meet_here():
    """An engine chooses its keys, and knows how a table chooses buckets but not what it draws for that."""
    theirs = runpy.run_path(buckets.__file__)["Buckets"](1000)
    tags = np.random.default_rng(3).integers(1, 1 << 63, 1 << 23, np.uint64)
    meeting = tags[(theirs._first(tags) == 5) & (theirs._second(tags) < 2)][:400]
    assert len(meeting) == 400
    added, calls = counting_calls(lambda: Buckets(1000).add(meeting, meeting))
    assert len(set(added.tolist())) == 400
    assert calls < 2 * counting_calls(lambda: Buckets(1000).add(tags[:400], tags[:400]))[1]


def test_twins_added_together_share_a_place():
    table = Buckets(100, 8)
    words = np.array([0x101, 0x203, 0x102, 0x204], np.uint64)
    places = table.add(words >> np.uint64(8), words)
    assert places[0] == places[2] and places[1] == places[3] and table.count == 2


def test_more_than_fits_is_refused():
    table, tags = Buckets(6), np.arange(1, 10, dtype=np.uint64)
    with pytest.raises(ValueError, match="room"):
        table.add(tags, tags)


def test_growth_ends_before_the_table_is_full():
    tags = np.random.default_rng(2).integers(1, 1 << 63, 60_000, np.uint64)
    table = Buckets(30_000)
    for part in np.split(tags, 600):
        if table.room < len(part):
            assert table.wider is None, "it should have grown by now"
            table.widen(2 * table.count)
        table = table.go_on(len(part))
        table.add(part, part)
    assert table.count == len(tags) and (table.find(tags) >= 0).all()
