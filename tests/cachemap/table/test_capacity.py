"""What is done in steps is as if it were done at once: growth, the end of a replica, shedding; and nothing is lost on
the way."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap import CacheMap
from cachemap.table import buckets, memory
from cachemap.table import capacity as capacities
from cachemap.table.holders import HolderSets, spread
from cachemap.table.ids import BlockIdAllocator

from ..test_map import PROMPTS, ReferenceMap, keys

MIB = 1 << 20
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear", "leave"]),
        st.integers(0, 2),
        st.sampled_from(PROMPTS),
        st.integers(0, 17),
        st.integers(1, 18),
    ),
    max_size=40,
)


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(capacities, "LEFT", 2)
    monkeypatch.setattr(buckets, "STEP", 3)
    monkeypatch.setattr(capacities, "SMALL", 8)


def sound(table):
    """Check that each block is in the index once, each set is counted right, and each number is used or free."""
    blocks = table.blocks
    used = blocks.hashes.nonzero()[0]
    assert sorted(blocks.index.numbers(blocks.hashes[used]).tolist()) == used.tolist() and blocks.index.count == len(
        used
    )
    counts = Counter(blocks.sets[used].tolist())
    assert {number: blocks.holders.uses[number] for number in counts if number} == {
        n: c for n, c in counts.items() if n
    }
    assert not blocks.sets[blocks.hashes == 0].any()
    assert blocks.ids.free + len(used) == blocks.ids.top - 1
    assert table.capacity._alias_bytes == sum(alias.nbytes for alias in table.aliases.values())


def test_all_memory_that_growth_leaves_behind_is_given_back_piece_by_piece(monkeypatch):
    """Else it goes when its last array does, all at once."""
    monkeypatch.setattr(memory, "LARGE", 4096)
    monkeypatch.setattr(capacities, "LARGE", 4096)
    given, was = {}, memory.give_back

    def give_back(array, start):
        assert given.get(array.ctypes.data, 0) == start
        further = was(array, start)
        given[array.ctypes.data] = max(start, further)
        return further

    monkeypatch.setattr(capacities, "give_back", give_back)
    cache_map = CacheMap(4 * MIB)
    slot = cache_map.attach("r", 60_000, True)
    table, left = cache_map._gpu, []
    rng = np.random.default_rng(3)
    for _ in range(100):
        tables = table.blocks.index, table.aliases[slot]
        hashes = rng.integers(1, 1 << 64, 512, np.uint64).tolist()
        cache_map.store(slot, hashes, hashes)
        left += [
            array
            for before, now in zip(tables, (table.blocks.index, table.aliases[slot]))
            if before is not now
            for array in before.arrays
        ]
    while table.capacity._outgrown:
        cache_map.remove(slot, [1])
    large = [array for array in left if array.nbytes >= 4096]
    assert len(large) == 8 and all(given[array.ctypes.data] >= array.nbytes and not array.any() for array in large)


@settings(max_examples=200)
@given(STEPS)
@pytest.mark.usefixtures("small_steps")
def test_a_step_at_a_time_it_equals_a_reference(steps):
    cache_map, reference = CacheMap(MIB), ReferenceMap()
    for slot in range(3):
        cache_map.attach(f"r{slot}", None, True)
        reference.attach(slot)
    for what, slot, prompt, start, count in steps:
        part = prompt[start : start + count]
        if what == "store" and part:
            cache_map.store(slot, part, keys(slot, part), "gpu", [(0, prompt[start - 1] if start else 0)])
            reference.store(slot, part, keys(slot, part))
        elif what == "remove":
            cache_map.remove(slot, keys(slot, part))
            reference.remove(slot, keys(slot, part))
        elif what == "clear":
            cache_map.clear(slot)
            reference.clear(slot)
        elif what == "leave":
            cache_map.detach(slot)
            assert cache_map.attach("another", None, True) == slot
            reference.clear(slot)
        for one in PROMPTS:
            assert cache_map.match(one, 0.0).confirmed == [reference.confirmed(slot, one) for slot in range(3)]
        sound(cache_map._gpu)
    while cache_map._gpu.capacity._left:
        cache_map.remove(0, [1])
    sound(cache_map._gpu)
    assert cache_map.stats()["blocks"] == len(set().union(*map(reference.held, range(3))))


@pytest.mark.parametrize("capacity", [None, 30_000])
def test_it_grows_and_sheds_in_steps_and_stays_sound(capacity, monkeypatch):
    monkeypatch.setattr(capacities, "CHUNK", 4096)
    monkeypatch.setattr(capacities, "SMALL", 512)
    monkeypatch.setattr(buckets, "STEP", 64)
    rng, cache_map = np.random.default_rng(1), CacheMap(MIB)
    slots = [cache_map.attach(f"r{i}", capacity, True) for i in range(3)]
    grew = 0
    for number in range(400):
        chain = rng.integers(1, 1 << 64, 100, np.uint64).tolist()
        for slot in slots[: 1 + number % 2]:
            cache_map.store(slot, chain, keys(slot, chain))
            assert cache_map.match(chain, 0.0).held[slot] == 100
        grew += cache_map._gpu.blocks.index.wider is not None
        if number % 100 == 0:
            sound(cache_map._gpu)
            assert cache_map.stats()["bytes"] <= MIB
    assert cache_map.stats()["evicted"] > 1000 and grew
    sound(cache_map._gpu)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "forget"]), st.integers(0, 129), st.sets(st.integers(0, 11), min_size=1)
        ),
        max_size=30,
    )
)
def test_holder_sets_equal_sets(steps):
    holders, numbers, model = HolderSets(), np.zeros(12, np.uint32), [set() for _ in range(12)]
    holders.widen(130)
    for what, slot, blocks in steps:
        at = np.array(sorted(blocks))
        if what == "forget":
            holders.forget(slot)
            model = [one - {slot} for one in model]
        else:
            numbers[at] = holders.turn(numbers[at], slot, what == "join")
            for block in blocks:
                model[block] = model[block] | {slot} if what == "join" else model[block] - {slot}
        assert [{i for i in range(130) if holders.mask(number) >> i & 1} for number in numbers.tolist()] == model
        assert holders.empty(numbers).tolist() == [not one for one in model]
        assert all(holders.has(numbers, i).tolist() == [i in one for one in model] for i in (0, 63, 64, 129, slot))


@given(st.sets(st.integers(0, 129)))
def test_spread_sets_what_the_mask_says(slots):
    lengths = [0] * 130
    spread(lengths, sum(1 << slot for slot in slots), 7)
    assert {slot for slot, length in enumerate(lengths) if length == 7} == slots


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=40))
def test_numbers_are_given_once(steps):
    numbers, out = BlockIdAllocator(), []
    for taking, count in steps:
        if taking:
            out += numbers.take(count, 1 << 20).tolist()
        elif out:
            back, out = out[-count:], out[:-count]
            numbers.give(np.array(back))
        assert len(set(out)) == len(out) and all(0 < one < numbers.top for one in out)
        assert numbers.free + len(out) == numbers.top - 1
