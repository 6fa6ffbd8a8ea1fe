"""Chunks of several blocks in a store below the engine: the map has what the store's own lookup finds, which goes from
a prompt's beginning to the first chunk that is not there."""

import itertools
import tracemalloc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.changes import ChunkTier, Clear
from cachemap.events import chunks as module
from cachemap.events.apply import EventApplier
from cachemap.events.chunks import Chunks
from cachemap.events.groups import MOST_PIECE
from cachemap.events.records import Cleared, Removed

from ..publisher import record

OF_CHUNKS = [tracemalloc.Filter(True, module.__file__)]
SIZE, BLOCKS = 4, 3  # tokens of a block, blocks of a chunk
LENGTH = 4  # chunks of a prompt

# A prompt is a path in a tree: the next chunk is the one or the other.
prompts = st.lists(st.integers(0, 1), min_size=LENGTH, max_size=LENGTH).map(tuple)
chunks = st.tuples(prompts, st.integers(1, LENGTH)).map(lambda one: one[0][: one[1]])
steps = st.one_of(
    st.tuples(st.just("store"), chunks),
    st.tuples(st.just("store"), chunks),
    st.tuples(st.just("evict"), chunks),
    st.tuples(st.just("compute"), st.tuples(prompts, st.integers(1, LENGTH * BLOCKS))),
    st.tuples(st.just("drop"), st.tuples(prompts, st.integers(1, LENGTH * BLOCKS))),
    st.tuples(st.just("reset"), st.none()),
)


def tokens(path):
    return array("I", [10 * place + way for place, way in enumerate(path) for _ in range(SIZE * BLOCKS)])


def key(path):
    return b"chunk" + bytes(path)


def block_key(path, number):
    """Return the engine's key of a block; prompts that are equal up to the block's end have the same key."""
    return hash((path[: number // BLOCKS + 1], number)) % 2**63 + 1


class Told:
    """A map that gets the events of a store with chunks and of an engine's own cache."""

    def __init__(self, budget=1 << 22):
        self.map = CacheMap(budget)
        self.applier = EventApplier(self.map, self.map.attach("r", None, True), "m", SIZE)

    def apply(self, *events):
        self.applier.apply(list(events))
        self.applier.flush()

    def store(self, *paths, tier="cpu"):
        self.apply(*(self.stored(path, tier) for path in paths))

    @staticmethod
    def stored(path, tier="cpu"):
        data = tokens(path)[-SIZE * BLOCKS :].tobytes()
        before = key(path[:-1]) if len(path) > 1 else None
        return record([key(path)], data, SIZE * BLOCKS, before, tier)

    def evict(self, *paths):
        self.apply(Removed([key(path) for path in paths], "cpu", 0))

    def compute(self, path, start, end):
        keys = [block_key(path, number) for number in range(start, end)]
        parent = block_key(path, start - 1) if start else None
        data = tokens(path)[start * SIZE : end * SIZE].tobytes()
        self.apply(record(keys, data, SIZE, parent))

    def drop(self, path, number):
        self.apply(Removed([block_key(path, number)], "gpu", 0))

    def held(self, path, blocks=None):
        """Return how many blocks of a prompt are in GPU memory, and how many with those after them in host memory."""
        match = self.map.match(hash_blocks(tokens(path).tobytes(), SIZE, chain_seed("m", SIZE))[:blocks], 0.0)
        return match.held[0], match.held[0] + sum(count for _, count in match.lower.get(0, ()))


def leading(path, there):
    """Return how many leading chunks of a prompt are there without a gap."""
    return next((count for count in range(len(path)) if path[: count + 1] not in there), len(path))


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=40))
def test_the_map_has_what_the_stores_own_lookup_finds(story):
    told, there, computed = Told(), set(), set()
    placed = set()  # chunks of which the one before was known when they came
    for what, of in story:
        if what == "store" and of not in there and (len(of) == 1 or of[:-1] in placed):
            told.store(of)
            there.add(of)
            placed.add(of)
        elif what == "evict" and of in there:
            told.evict(of)
            there.discard(of)
            # what is gone is known as long as something behind it is there
            placed = {one for one in placed if any(other[: len(one)] == one for other in there)}
        elif what == "compute":
            path, end = of
            start = next((n for n in range(end) if block_key(path, n) not in computed), end)
            if start < end and not any(block_key(path, n) in computed for n in range(start, end)):
                told.compute(path, start, end)
                computed |= {block_key(path, n) for n in range(start, end)}
        elif what == "drop" and block_key(of[0], of[1] - 1) in computed:
            told.drop(of[0], of[1] - 1)
            computed.discard(block_key(of[0], of[1] - 1))
        elif what == "reset":
            told.apply(Cleared())
            computed.clear()
        for number in range(2**LENGTH):
            path = tuple(number >> place & 1 for place in range(LENGTH))
            blocks = LENGTH * BLOCKS - number % 7
            own = next((n for n in range(blocks) if block_key(path, n) not in computed), blocks)
            found = min(leading(path, there), blocks // BLOCKS) * BLOCKS
            assert told.held(path, blocks) == (own, max(own, found))
    assert told.applier.fault is None and not told.applier.ignored


def test_what_stands_behind_a_chunk_comes_and_goes_in_steps():
    told, count = Told(1 << 24), 2 * MOST_PIECE
    ids = array("I", range(count * SIZE * BLOCKS)).tobytes()
    told.apply(record(range(1, count + 1), ids, SIZE * BLOCKS, tier="cpu", below=True))
    changed: list[int] = []
    told.map.record(0, lambda change: changed.append(len(change.tags)))
    root = record([1], ids[: SIZE * BLOCKS * 4], SIZE * BLOCKS, tier="cpu", below=True)
    for event in (Removed([1], "cpu", 0), root):
        changed.clear()
        before = 0
        for _ in told.applier.applying([event]):
            assert sum(changed) - before <= MOST_PIECE
            before = sum(changed)
        assert sum(changed) - before <= MOST_PIECE and sum(changed) == count * BLOCKS
    assert told.applier.blocks_stored == 2 * count * BLOCKS


def test_chunks_behind_one_that_is_gone_come_back_with_it():
    told, path = Told(), (0, 1, 0, 1)
    told.store(*(path[:end] for end in range(1, 5)))
    assert told.held(path) == (0, 12)
    told.evict(path[:2])
    assert told.held(path) == (0, 3)
    told.compute(path, 0, 5)
    assert told.held(path) == (5, 5), "nor does what the engine has itself make up for it"
    told.store(path[:2])
    assert told.held(path) == (5, 12)
    assert told.applier.blocks_stored == 12 + 5 + 9 and told.applier.blocks_removed == 9


def test_a_source_that_tells_of_no_evictions_is_not_believed():
    """LMCache's connectors, where its server tells them nothing."""
    told = Told()
    told.store((0,), (0, 0), (1,))
    told.store((1,))  # computed and stored once more: it had gone, and nobody said so
    assert told.held((0, 0, 0, 0)) == told.held((1, 0, 0, 0)) == (0, 0)
    told.store((0,))
    assert told.held((0, 0, 0, 0)) == (0, 0) and told.applier.ignored == 2 * BLOCKS and told.applier.fault is None
    told.compute((0, 0, 0, 0), 0, 2)
    assert told.held((0, 0, 0, 0)) == (2, 2), "of the engine's own cache it says nothing"
    assert told.applier.blind == ["cpu"]


@pytest.mark.parametrize("anew", ["forget", "clear"])
def test_who_tells_of_no_evictions_is_not_believed_until_it_does(anew):
    """This holds after the map was rebuilt from a replay, and after the engine's own cache was reset."""
    told, path = Told(), (0, 0, 0, 0)
    told.store((0,), (0, 0))
    told.store((0,))
    if anew == "forget":
        told.applier.forget()
    else:
        told.apply(Cleared())
    told.store((0,), (0, 0))
    assert told.held(path) == (0, 0) and told.applier.ignored == 3 * BLOCKS and told.applier.blind == ["cpu"]
    told.compute(path, 0, 2)
    told.apply(Removed([block_key(path, 1)], "cpu", 0))
    told.store((0,))
    assert told.held(path) == (2, 2), "a copy that the engine itself had there says nothing of the store below it"
    told.evict((1,))
    told.store((0,), (0, 0))
    assert told.held(path) == (2, 6) and not told.applier.blind
    told.evict((0, 0))
    assert told.held(path) == (2, 3)


def test_chunks_are_whole_blocks():
    told = Told()
    odd = told.stored((0,))._replace(block_size=SIZE * BLOCKS - 1, tokens=bytes(4 * (SIZE * BLOCKS - 1)))
    told.apply(odd)
    assert told.applier.ignored == BLOCKS - 1 and told.applier.fault is None and told.held((0,)) == (0, 0)


def test_of_a_chunk_with_an_unknown_predecessor_nothing_is_known():
    told = Told()
    told.store((0, 0))
    assert told.applier.orphans == BLOCKS and told.held((0, 0)) == (0, 0)


def test_a_gateway_that_takes_over_goes_on_with_what_the_map_has():
    """Such a gateway has the map of the gateway before it, but not its chunks."""
    told, path = Told(), (0, 0, 0, 0)
    told.store((0,), (0, 0), (1,))
    told.applier = EventApplier(told.map, 0, "m", SIZE)
    told.store((0, 0, 0))
    assert told.held(path) == (0, 9)
    told.evict((0, 0))
    assert told.held(path) == (0, 3)
    told.evict((1,))
    assert told.held((1,)) == (0, 0)


def test_a_reset_of_the_engine_costs_nothing_for_what_a_store_below_keeps():
    """Nothing is stored again in the map; chunks that only the map knows, from another gateway, stay too."""
    told, path, changes = Told(), (0, 0, 0, 0), []
    told.store((0,), (0, 0))
    told.applier = EventApplier(told.map, 0, "m", SIZE)
    told.store((0, 0, 0))
    told.compute(path, 0, 4)
    told.map.record(0, changes.append)
    told.apply(Cleared())
    assert told.held(path) == (0, 9) and changes == [Clear(below=False)]
    told.evict((0,), (0, 0), (0, 0, 0))
    told.compute(path, 0, 4)
    told.apply(Cleared())
    assert told.held(path) == (0, 0) and changes[-1] == Clear(), "which gateways of older versions read, too"


def test_there_is_a_bound(monkeypatch):
    monkeypatch.setattr("cachemap.events.apply.MOST_BLOCKS", 6)
    told = Told()
    told.store((0,), (0, 0), (0, 0, 0))
    assert told.held((0, 0, 0)) == (0, 6) and told.applier.ignored == BLOCKS
    told.evict((0, 0))
    told.store((0, 0))
    assert told.held((0, 0, 0)) == (0, 6)


def test_what_is_gone_is_forgotten_with_what_stood_behind_it():
    held = []
    chunks = Chunks(1, lambda more: not held.append(more))
    for number in range(3):
        list(chunks.store(number + 1, number or None, number, [number + 1]))
    assert [one.key for one in chunks.remove([2])] == [2, 3] and len(chunks) == 3 and chunks.end(3) == 3
    assert [one.key for one in chunks.found()] == [1]
    assert not any(chunks.remove([3, 9])) and len(chunks) == 1
    assert [one.key for one in chunks.remove([1]) if one] == [1] and not len(chunks)
    assert len(held) == 6 and not sum(held)


@pytest.mark.parametrize("length", [1, 16])
def test_chunks_are_in_the_maps_budget(length):
    """What Python keeps of them, and no less, is counted; with what the tables take the budget holds."""
    budget, told = 1 << 20, Told(1 << 20)
    events, blocks = [], 16
    for number in range(600):
        before = events[-1].keys[0] if number % length else None
        name, data = b"k%031d" % number, array("I", [number]) * (SIZE * blocks)
        events.append(record([name], data, SIZE * blocks, before, "cpu"))
    tracemalloc.start()
    for event in events:
        told.apply(event)
        assert told.map.stats()["bytes"] <= budget
    taken = tracemalloc.take_snapshot().filter_traces(OF_CHUNKS).statistics("filename")
    tracemalloc.stop()
    counted = told.map._budget.beside
    assert told.applier.ignored + told.applier.orphans > 200 and counted > 1 << 17
    assert sum(one.size for one in taken) <= counted <= 2 * sum(one.size for one in taken)
    told.applier.let_go()
    assert not told.map._budget.beside and told.map.held(0)


def test_chunks_push_no_block_of_another_replica_out_of_a_full_map():
    """What tables shed gives no byte back, so what is beside them takes only what they leave."""
    told = Told(1 << 20)
    slot, count = told.map.attach("other", None, True), itertools.count(1)
    other = EventApplier(told.map, slot, "m", SIZE)
    held, before = 1, 0
    while held > before:  # until it is full
        before = held
        for _ in range(8):
            data = array("I", range(next(count) << 16, (next(count) << 16) + 512 * SIZE))[: 512 * SIZE]
            keys = [b"o%031d" % (data[0] + number) for number in range(512)]
            other.apply([record(keys, data, SIZE)])
            other.flush()
        held = told.map.held(slot)
    for _ in range(200):
        data = array("I", [next(count)]) * (SIZE * 16)
        told.apply(record([b"k%031d" % data[0]], data, SIZE * 16, tier="cpu"))
        assert told.map.stats()["bytes"] <= 1 << 20
    assert told.map.held(slot) > 0.7 * held and told.applier.ignored > 16 * 16


def test_who_stops_following_knows_no_chunk_any_more():
    """Another gateway follows the events meanwhile. What it told the map is believed, and no store is taken for one
    that hides what goes."""
    told, path = Told(), (0, 0, 0, 0)
    told.store((0,), (0, 0))
    told.applier.let_go()
    told.map.remove(0, module.block_keys(key((0, 0)), BLOCKS), ChunkTier("cpu", BLOCKS).tier)
    told.store((0, 0), (0, 0, 0))
    assert told.held(path) == (0, 9) and not told.applier.blind


def test_blocks_of_a_chunk_have_keys_of_their_own():
    for one in (7, 2**64 - 1, -3, b"0123456789abcdef"):
        keys = module.block_keys(one, 16)
        assert len(set(keys)) == 16 and keys[-1] == one
