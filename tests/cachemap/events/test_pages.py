"""Pages that are smaller than the map's blocks: which blocks are whole, and what is held behind them."""

import random
from array import array

import pytest

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.events.apply import EventApplier
from cachemap.events.pages import MOST_SEARCHED, Pages
from cachemap.events.records import AGREEING, Cleared, Removed, Stored

from ...calls import counting_calls
from ..publisher import record

BLOCK = 4
SEED = chain_seed("m", BLOCK)


class Engine:
    """A cache of pages like a radix tree's, which reports its pages in pieces of any size."""

    def __init__(self, page: int, seed: int = 0):
        self.page, self.random = page, random.Random(seed)
        self.keys: dict[tuple[int, ...], int] = {}

    def key(self, prefix: tuple[int, ...]) -> int:
        """Return the key of a prefix: signed, as on the wire, and the same each time."""
        return hash((prefix, self.page)) >> 2

    def store(self, tokens) -> list[Stored]:
        """Store a prompt, and return the events that report its new pages."""
        tokens, page = tuple(tokens), self.page
        ends = [end for end in range(page, len(tokens) + 1, page) if tokens[:end] not in self.keys]
        for end in ends:
            self.keys[tokens[:end]] = self.key(tokens[:end])
        events = []
        while ends:
            most = next((at for at, end in enumerate(ends) if end != ends[0] + at * page), len(ends))
            count = min(self.random.randint(1, 6), most)
            piece, ends = ends[:count], ends[count:]
            start = piece[0] - page
            parent = self.key(tokens[:start]) if start else None
            keys = [self.key(tokens[:end]) for end in piece]
            events.append(record(keys, tokens[start : piece[-1]], page, parent))
        return events

    def remove(self, prefixes) -> Removed:
        for prefix in prefixes:
            del self.keys[prefix]
        return Removed([self.key(prefix) for prefix in prefixes], "gpu", 0)

    def is_leaf(self, prefix, gone=()) -> bool:
        """Return whether no page follows the one that ends with this prefix, besides those that are gone."""
        others = (other for other in self.keys if other != prefix and other not in gone)
        return not any(other[: len(prefix)] == prefix for other in others)

    def held(self, tokens) -> int:
        tokens, reach = tuple(tokens), 0
        while reach + self.page <= len(tokens) and tokens[: reach + self.page] in self.keys:
            reach += self.page
        return reach


@pytest.fixture
def table():
    return CacheMap(1 << 22)


@pytest.fixture
def applier(table):
    return EventApplier(table, table.attach("r", None, True), "m", BLOCK)


def apply(applier, *events):
    applier.apply(list(events))
    applier.flush()


def blocks(table, tokens) -> int:
    return table.match(hash_blocks(array("I", tokens).tobytes(), BLOCK, SEED), 0.0).confirmed[0]


def told(table, applier, tokens) -> int:
    """Return how many leading tokens are known to be held: whole blocks, and pages of the next block."""
    hashes = hash_blocks(array("I", tokens).tobytes(), BLOCK, SEED)
    whole = table.match(hashes, 0.0).confirmed[0]
    return applier.reach(whole, hashes, SEED, memoryview(array("I", tokens).tobytes()))


def test_a_block_counts_while_all_its_pages_are_held(table, applier):
    engine, prompt = Engine(1), range(10, 22)
    apply(applier, *engine.store(prompt[:7]))
    assert (blocks(table, prompt), told(table, applier, prompt)) == (1, 7)
    apply(applier, *engine.store(prompt[:8]))
    assert blocks(table, prompt) == 2
    apply(applier, *engine.store(prompt))
    assert blocks(table, prompt) == 3 and applier.blocks_stored == 3
    apply(applier, engine.remove([tuple(prompt[:end]) for end in (10, 11, 12)]))
    assert (blocks(table, prompt), told(table, applier, prompt)) == (2, 9)


def test_what_is_stored_twice_is_gone_when_it_is_removed_once(table, applier):
    """A page has one copy, unlike a block of an engine whose blocks are as large as the map's."""
    engine, prompt = Engine(1), tuple(range(8))
    events = engine.store(prompt)
    apply(applier, *events, *events)
    apply(applier, *events)
    assert blocks(table, prompt) == 2
    apply(applier, engine.remove([prompt[:8]]))
    assert told(table, applier, prompt) == 7
    apply(applier, *engine.store(prompt))
    assert told(table, applier, prompt) == 8


def test_pages_behind_one_that_was_never_told_are_left_out(table, applier):
    engine, prompt = Engine(1), tuple(range(12))
    engine.store(prompt[:3])  # lost
    apply(applier, *engine.store(prompt))
    assert blocks(table, prompt) == 0 and applier.orphans == 9 and applier.fault is None
    apply(applier, engine.remove([prompt[:12]]))
    assert told(table, applier, prompt) == 0


def test_a_clear_forgets_the_pages_too(table, applier):
    engine, prompt = Engine(2), tuple(range(8))
    apply(applier, *engine.store(prompt))
    apply(applier, Cleared())
    assert told(table, applier, prompt) == 0
    engine.keys.clear()
    apply(applier, *engine.store(prompt[:6]))
    assert told(table, applier, prompt) == 6


def test_pages_of_a_salt_and_of_an_adapter_are_their_own(table, applier):
    engine, prompt = Engine(1), tuple(range(6))
    (event,) = engine.store(prompt[:1])
    salted = [event._replace(extra=[["mine"]]), *engine.store(prompt)]
    apply(applier, *salted)
    bytes_ = array("I", prompt).tobytes()
    own = chain_seed("m", BLOCK, None, "mine")
    assert table.match(hash_blocks(bytes_, BLOCK, own), 0.0).confirmed[0] == 1
    reaches = [applier.reach(0, [], seed, memoryview(bytes_[:12])) for seed in (own, SEED)]
    assert reaches == [3, 0]
    assert blocks(table, prompt) == 0


def test_a_page_that_does_not_divide_a_block_is_a_fault(table, applier):
    apply(applier, record([1], range(3), 3))
    assert "blocks have 3 tokens" in applier.fault


def test_orphans_among_pages_stay_counted_when_they_turn_out_to_be_parts_of_blocks(table, applier):
    page, whole = record([1], [0], 1, 9), record([2], range(BLOCK), BLOCK)
    apply(applier, page)
    assert applier.orphans == 1
    apply(applier, *[whole] * AGREEING, page)
    assert applier.pages is None and applier.orphans == 1


def test_pages_in_slower_tiers_are_left_out(table, applier):
    engine, prompt = Engine(1), tuple(range(4))
    apply(applier, *(one._replace(tier="cpu") for one in engine.store(prompt)))
    assert blocks(table, prompt) == 0 and applier.ignored == 4 and applier.fault is None


@pytest.mark.parametrize(("limit", "value"), [("MOST_PAGES", 30), ("MOST_BYTES", 30 * (60 + 4))])
def test_more_pages_than_there_is_room_for_are_a_fault(table, applier, monkeypatch, limit, value):
    monkeypatch.setattr(f"cachemap.events.pages.{limit}", value)
    engine = Engine(1)
    apply(applier, *engine.store(range(20)))
    assert applier.fault is None
    apply(applier, *engine.store(range(100, 120)))
    assert "more than 30 pages of 1 tokens" in applier.fault


@pytest.mark.parametrize("page", [1, 2])
@pytest.mark.parametrize("tidy", [True, False], ids=["leaves go first", "any page goes"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_told_is_what_is_held(table, page, tidy, seed):
    """Compare after each of many prompts that share beginnings, with evictions between them."""
    applier, engine = EventApplier(table, table.attach("r", None, True), "m", BLOCK), Engine(page, seed)
    rng, prompts = random.Random(seed), [()]
    for _ in range(120):
        start = rng.choice(prompts)
        prompt = start[: rng.randint(0, len(start))] + tuple(rng.randint(0, 3) for _ in range(rng.randint(1, 14)))
        prompts.append(prompt)
        events = engine.store(prompt)
        if rng.random() < 0.7 and engine.keys:
            if tidy:
                gone = [one for one in engine.keys if engine.is_leaf(one)]
                gone = rng.sample(gone, min(len(gone), 3))
                one = gone[0]
                while (one := one[:-page]) and rng.random() < 0.8 and engine.is_leaf(one, gone):
                    gone.append(one)
            else:
                gone = rng.sample(list(engine.keys), min(len(engine.keys), rng.randint(1, 9)))
            events.append(engine.remove(gone))
        if rng.random() < 0.5:
            apply(applier, *events)
        else:
            for event in events:
                apply(applier, event)
        for probe in (prompt, rng.choice(prompts), (*prompt, 1, 2, 3)):
            assert told(table, applier, probe) == engine.held(probe)
    assert applier.orphans == 0 and len(applier.pages) >= len(engine.keys)
    assert len(applier.pages) == len(engine.keys) or not tidy


def result(steps):
    """Exhaust a generator, and return what it returns at its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def chain_of(first, last, parent=None):
    """Return one event with the keys `first` to `last`, in pages of one token."""
    return record(range(first, last + 1), range(last - first + 1), 1, parent)


def test_a_gap_is_searched_below_in_its_own_blocks_only():
    """All pages were searched once for each page of the block: of 163,840 one removal took 6.8 s."""
    pages = Pages("m", 1024, 1)
    result(pages.store(chain_of(1, 20 * 1024)))
    pages.searched = 0
    assert result(pages.remove([1])) == [1024] and pages.searched < 1024
    assert [one.keys for one in result(pages.store(chain_of(1, 1)))] == [[1024]] and pages.searched < 2048


def test_many_pages_after_one_are_visited_and_forgotten_in_steps():
    pages, count = Pages("m", 1024, 1), 3 * MOST_SEARCHED
    result(pages.store(chain_of(1, 1)))
    for key in range(2, count + 2):
        result(pages.store(chain_of(key, key, 1)))
    assert sum(1 for _ in pages.remove([1])) >= 2 and sum(1 for _ in pages.store(chain_of(1, 1))) >= 2
    result(pages.remove(range(1, count + 2)))
    assert not len(pages)
    result(pages.store(chain_of(1, count)))
    result(pages.remove(range(1, count)))
    assert len(pages) == count and sum(1 for _ in pages.remove([count])) >= 2 and not len(pages)


def test_many_pages_that_come_back_together_are_named_together():
    pages = Pages("m", BLOCK, 1)
    first, again = (
        record(range(start + 1, end + 1), range(start, end), 1, start or None) for start, end in ((0, 400), (40, 360))
    )
    [chain] = result(pages.store(first))
    result(pages.remove(range(41, 361)))
    found, calls = counting_calls(lambda: result(pages.store(again)))
    assert [one.hashes for one in found] == [[block] for block in chain.hashes[10:90]]
    assert calls < 4 * 320
