"""Buckets against a plain set, through any order of adding and dropping."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap.table import EASY, FILL, Buckets

# few distinct tags in few buckets: first and second buckets fill, and words spill
TAGS = st.lists(st.integers(1, 60), unique=True, max_size=14)
STEPS = st.lists(st.tuples(st.booleans(), TAGS), max_size=30)


def u64(numbers):
    return np.array(sorted(numbers), np.uint64)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.sampled_from([0, 9]))
def test_holds_what_was_added_and_not_dropped(steps, payload_bits):
    table, model = Buckets(40, payload_bits), {}
    for adding, tags in steps:
        if adding:
            new = [t for t in tags if t not in model][: 40 - len(model)]
            words = (u64(new) << np.uint64(payload_bits)) | np.uint64(payload_bits and 5)
            places = table.add(words)
            assert table.words[places].tolist() == words.tolist()
            model |= dict(zip(sorted(new), words.tolist(), strict=True))
        else:
            known = [t for t in tags if t in model]
            table.drop(table.find(u64(known)))
            for tag in known:
                del model[tag]
        places = table.find(u64(range(1, 61)))
        found = {t: int(table.words[p]) for t, p in zip(range(1, 61), places) if p >= 0}
        assert found == model and table.count == len(model)
        prefix = table.find_prefix(u64(range(1, 61)))
        absent = [i for i, p in enumerate(places) if p < 0]
        assert prefix.tolist() == places[: absent[0] if absent else 60].tolist()
        if not payload_bits:
            assert [table.at(t) for t in range(1, 61)] == places.tolist()
    table.drop(table.find(u64(model)))
    for array in (table.words, table.load, table.passed, table.spilled):
        assert not array.any()


def test_full_to_its_fill_every_tag_is_found_and_hardly_any_spills():
    tags = np.random.default_rng(1).integers(1, 1 << 63, 100_000, np.uint64)
    table = Buckets(len(tags))
    places = np.concatenate([table.add(tags[i : i + 500]) for i in range(0, len(tags), 500)])
    assert table.room >= 0 and table.count / len(table.words) > FILL - 0.01
    assert (table.find(tags) == places).all() and len(set(places.tolist())) == len(tags)
    assert (table.find(tags ^ np.uint64(1 << 63)) == -1).all()
    assert (table.spilled > 0).mean() < 0.03 and table.passed.max() < 40
    assert table.load.max() == 8 and (table.load >= EASY).mean() > 0.9


def test_twins_added_together_share_a_place():
    table = Buckets(100, 8)
    places = table.add(np.array([0x101, 0x203, 0x102, 0x204], np.uint64))
    assert places[0] == places[2] and places[1] == places[3] and table.count == 2


def test_more_than_fits_is_refused():
    table = Buckets(6)
    with pytest.raises(ValueError, match="room"):
        table.add(np.arange(1, 10, dtype=np.uint64))


def test_pouring_keeps_all_and_says_where_they_went():
    tags = np.random.default_rng(2).integers(1, 1 << 63, 50_000, np.uint64)
    table, wider = Buckets(len(tags)), Buckets(2 * len(tags))
    table.add(tags)
    for old, new in table.pour(wider):
        assert (table.words[old] == wider.words[new]).all()
    assert (wider.find(tags) >= 0).all() and wider.count == len(tags)
