"""CacheMap against a reference, and what each of its rules promises."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap import CacheMap, GuessedBlocks, chain_seed, hash_blocks
from cachemap.changes import CacheGroup, ChunkTier
from cachemap.table.blocks import u64

from .cluster.gateways import contents

MIB = 1 << 20


def chain(*branches: int, length: int = 6) -> list[int]:
    """Return the hashes of a prompt whose sections have names: equal leading names make an equal prefix."""
    tokens = b"".join(name.to_bytes(4, "little") * length * 4 for name in branches)
    return hash_blocks(tokens, 4, chain_seed("m", 4))


def keys(slot: int, hashes: list[int]) -> list[int]:
    """Return an engine's own keys of blocks, which differ between replicas."""
    return [h * 3 + slot & (1 << 64) - 1 for h in hashes]


class ReferenceMap:
    """A slow map that is easy to check: by replica, how many copies of each block it has under each engine key."""

    def __init__(self):
        self.keys: dict[int, Counter] = {}

    def attach(self, slot):
        self.keys[slot] = Counter()

    def store(self, slot, hashes, engine_keys):
        self.keys[slot].update(zip(engine_keys, hashes, strict=True))

    def remove(self, slot, engine_keys):
        for key in engine_keys:
            self.keys[slot] -= Counter(pair for pair in self.keys[slot] if pair[0] == key)

    def clear(self, slot):
        self.keys[slot] = Counter()

    def held(self, slot):
        return {block for _, block in self.keys[slot]}

    def confirmed(self, slot, hashes):
        held = self.held(slot)
        return next((length for length, block in enumerate(hashes) if block not in held), len(hashes))


PROMPTS = [chain(*path) for path in [(1, 2, 3), (1, 2, 4), (1, 5), (6, 7, 8), (6, 7), (9,)]]
SLOTS = range(3)

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear"]),
        st.sampled_from(SLOTS),
        st.sampled_from(PROMPTS),
        st.integers(0, 17),
        st.integers(1, 18),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(EVENTS, st.randoms(use_true_random=False), st.floats(0, 0.4), st.floats(0, 0.4))
def test_equals_a_reference_under_lost_repeated_and_reordered_events(events, rng, lost, repeated):
    table, reference = CacheMap(MIB), ReferenceMap()
    for slot in SLOTS:
        assert table.attach(f"r{slot}", None, True) == slot
        reference.attach(slot)
    stream = [e for e in events if rng.random() >= lost]
    stream += [e for e in stream if rng.random() < repeated]
    rng.shuffle(stream)
    for kind, slot, prompt, start, count in stream:
        part = prompt[start : start + count]
        if not part:
            continue
        if kind == "store":
            parent = prompt[start - 1] if start else 0
            table.store(slot, part, keys(slot, part), "gpu", [(0, parent)])
            reference.store(slot, part, keys(slot, part))
        elif kind == "remove":
            table.remove(slot, keys(slot, part[::-1]), "gpu")
            reference.remove(slot, keys(slot, part))
        else:
            table.clear(slot)
            reference.clear(slot)
    for prompt in PROMPTS:
        match = table.match(prompt, 0.0)
        assert match.confirmed == [reference.confirmed(slot, prompt) for slot in SLOTS]
        assert match.held == match.confirmed
    for slot in SLOTS:
        assert table.stats()["slots"][slot] == len(reference.keys[slot])
    union = set().union(*map(reference.held, SLOTS))
    assert table.stats()["blocks"] == len(union)


OWN = (ChunkTier("cpu", 2, own=True).tier, ChunkTier("disk", 2, own=True).tier)
TIERED = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear", "clear own"]),
        st.sampled_from(["gpu", "cpu", "disk", "remote", ChunkTier("cpu", 4).tier, *OWN, CacheGroup(1, 4).tier]),
        st.lists(st.integers(1, 8), min_size=1, max_size=8, unique=True),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(TIERED)
def test_what_the_engine_drops_of_its_own_leaves_what_stores_below_it_hold(steps):
    table, held = CacheMap(MIB), Counter()  # copies, by tier and block
    slot = table.attach("r", None, True)
    for what, tier, blocks in steps:
        if what == "store":
            table.store(slot, blocks, blocks, tier)
            held.update((tier, block) for block in blocks)
        elif what == "remove":
            table.remove(slot, blocks, tier)
            held -= Counter((tier, block) for block in blocks)
        else:
            table.clear(slot, below=what == "clear")
            kept = ("disk", "remote", ChunkTier("cpu", 4).tier, OWN[1]) if what == "clear own" else ()
            held = Counter({one: copies for one, copies in held.items() if one[0] in kept})
        found = contents(table)
        assert held == Counter(
            {(tier, block): found["copies"].get((tier, tag), 0) + 1 for (tier, tag), block in found["held"].items()}
        )
        assert set(table.groups(slot)) <= {CacheGroup(1, 4).tier}
        assert table.held(slot) == sum(2 if tier in OWN else 1 for tier, _ in held)


NAMED = st.lists(
    st.tuples(
        st.booleans(), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=6, unique=True)
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(NAMED)
def test_a_block_with_several_keys_is_held_until_the_last_is_removed(steps):
    """An engine that does not tell salts has the same tokens under several keys; a key may also come to mean another
    block."""
    table, held = CacheMap(MIB), {}
    slot = table.attach("r", None, True)
    for storing, named in steps:
        for block, variant in named if storing else ():
            table.remove(slot, [block + 100 * variant])  # so that no key is there twice: those are copies
            held.pop(block + 100 * variant, None)
        if storing:
            moved = [(block % 7 + 1, block + 100 * variant) for block, variant in named]
            table.store(slot, [block for block, _ in moved], [key for _, key in moved])
            held |= {key: block for block, key in moved}
        else:
            table.remove(slot, [block + 100 * variant for block, variant in named])
            for block, variant in named:
                held.pop(block + 100 * variant, None)
        for block in range(1, 9):
            assert table.match([block], 0.0).held[slot] == (block in held.values())
        assert table.stats()["blocks"] == len(set(held.values())) and table.held(slot) == len(held)
    table.clear(slot)
    assert table.stats()["blocks"] == table.held(slot) == 0


def random_chain(rng, length):
    return rng.integers(1, 1 << 64, length, np.uint64).tolist()


@pytest.mark.parametrize("replicas", [1, 8, 9, 33, 64, 65, 130])
def test_any_number_of_replicas(replicas):
    rng, table, reference = np.random.default_rng(3), CacheMap(64 * MIB), ReferenceMap()
    slots = [table.attach(f"r{i}", None, True) for i in range(replicas)]
    chains = [random_chain(rng, 200) for _ in range(20)]
    for slot in slots:
        reference.attach(slot)
        for i in rng.integers(0, len(chains), 4).tolist():
            part = chains[i][: int(rng.integers(1, 200))]
            table.store(slot, part, keys(slot, part), "gpu")
            reference.store(slot, part, keys(slot, part))
    for chain_ in chains:
        expected = [reference.confirmed(slot, chain_) for slot in slots]
        assert table.match(chain_, 0.0).confirmed == expected
    union = set().union(*map(reference.held, slots))
    assert table.stats()["blocks"] == len(union)


def test_a_chain_of_which_nothing_is_new_may_be_empty():
    cache_map = CacheMap(MIB)
    slot = cache_map.attach("r", None, True)
    cache_map.store(slot, [5, 6, 7], [1, 2, 3], "gpu", [(0, 0), (1, 5), (1, 6), (3, 7)])
    assert cache_map.match([5, 6, 7], 0.0).confirmed == [3]


def test_a_long_prompt_is_matched_past_its_first_look():
    rng, table = np.random.default_rng(4), CacheMap(64 * MIB)
    slot, long = table.attach("r", None, True), random_chain(np.random.default_rng(5), 5000)
    table.store(slot, long[:4000], keys(slot, long[:4000]), "gpu")
    for length in (1, 255, 256, 257, 511, 512, 513, 3999, 4000, 5000):
        assert table.match(long[:length], 0.0).held == [min(length, 4000)]
    assert table.match([*long[:300], *random_chain(rng, 500)], 0.0).held == [300]
    assert table.match([], 0.0).held == [0]


def test_a_slot_is_used_again_and_knows_nothing_of_its_past():
    table = CacheMap(MIB)
    a, b = table.attach("a", None, True), table.attach("b", None, True)
    prompt = PROMPTS[0]
    for slot in (a, b):
        table.store(slot, prompt, keys(slot, prompt), "gpu")
        table.expect(slot, prompt, 0.0)
    table.detach(a)
    assert table.match(prompt, 0.0).held == [0, len(prompt)]
    with pytest.raises(KeyError, match="slot 0"):
        table.store(a, prompt, keys(a, prompt), "gpu")
    assert table.attach("c", None, True) == a
    assert table.match(prompt, 0.0).held == [0, len(prompt)]


def test_routed_prompts_are_predicted_for_some_seconds():
    table = CacheMap(MIB, predicted_seconds=5.0)
    slot, prompt = table.attach("r", None, True), PROMPTS[0]
    table.store(slot, prompt[:4], keys(slot, prompt[:4]), "gpu")
    table.match(prompt, 10.0)
    table.expect(slot, prompt, 10.0)
    sibling = chain(1, 2, 4)
    assert (table.match(prompt, 14.9).held, table.match(prompt, 14.9).confirmed) == ([18], [4])
    assert table.match(sibling, 14.9).held == [12]
    assert table.match(prompt, 15.0).held == [4]
    table.expect(slot, prompt[:8], 16.0)
    table.expect(slot, prompt, 30.0)
    assert table.stats()["predicted"] == 18  # what had expired went


def test_a_refused_prompt_is_taken_back_and_what_others_sent_stays():
    table = CacheMap(MIB, predicted_seconds=5.0)
    slot, refused, before, since = table.attach("r", None, True), chain(1, 2, 3), chain(1, 7), chain(1, 2, 8)
    table.expect(slot, before, 1.0)
    held = table.match(refused, 2.0).held[slot]
    number = table.expect(slot, refused, 2.0)
    next_number = table.expect(slot, since, 2.0)  # in the same event-loop iteration
    table.take_back(slot, refused, held, number)
    assert [table.match(one, 3.0).held[slot] for one in (before, since, refused)] == [len(before), len(since), 12]
    table.take_back(slot, since, held, next_number)
    assert [table.match(one, 3.0).held[slot] for one in (before, since, refused)] == [len(before), 6, 6]
    assert table.match(before, 7.5).held == [0]  # as ever


def test_a_modelled_replica_forgets_a_refused_prompt_but_not_what_it_shared():
    table = CacheMap(MIB)
    slot, refused, before, since = table.attach("r", 1000, False), chain(1, 2, 3), chain(1, 7), chain(1, 2, 8)
    for prompt in (before, refused):
        table.expect(slot, prompt, 0.0)
    table.take_back(slot, refused, 6, 0)
    assert [table.match(one, 0.0).held[slot] for one in (before, refused)] == [len(before), 6]
    assert table.stats()["modelled"] == len(before)
    for prompt in (refused, since):
        table.expect(slot, prompt, 0.0)
    table.take_back(slot, refused, 6, 0)
    assert [table.match(one, 0.0).held[slot] for one in (before, since, refused)] == [len(before), len(since), 12]
    table.take_back(slot, chain(9), 0, 0)  # never expected, or gone already
    assert table.stats()["modelled"] == len(set(before) | set(since))


def test_what_the_engine_dropped_is_no_longer_predicted():
    table = CacheMap(MIB)
    slot, prompt = table.attach("r", None, True), PROMPTS[0]
    table.expect(slot, prompt, 0.0)
    table.store(slot, prompt, keys(slot, prompt), "gpu")
    table.remove(slot, keys(slot, prompt[:9:-1]), "gpu")
    assert table.match(prompt, 1.0).held == [10]


def test_confirmed_blocks_count_again_behind_predicted_ones():
    table, prompt = CacheMap(MIB), PROMPTS[0]
    one, other = (table.attach(name, None, True) for name in "ab")
    for slot in (one, other):
        table.store(slot, prompt, keys(slot, prompt), "gpu")
    table.remove(one, keys(one, prompt[3:6]), "gpu")
    assert table.match(prompt, 0.0).held == [3, 18]
    table.expect(one, prompt[:5], 0.0)
    assert table.match(prompt, 1.0).held == [5, 18]
    table.expect(one, prompt[:6], 1.0)
    match = table.match(prompt, 2.0)
    assert (match.held, match.confirmed) == ([18, 18], [3, 18])


def test_an_unobserved_replica_is_modelled_by_its_capacity():
    table = CacheMap(MIB)
    slot = table.attach("r", 30, False)
    first, second, third = chain(1, 2), chain(3, 4), chain(5, 6)
    for prompt in (first, second, third):
        table.expect(slot, prompt, 0.0)
    # 36 blocks into 30: the first prompt's tail went
    assert [table.match(p, 1e9).held[0] for p in (first, second, third)] == [6, 12, 12]
    table.expect(slot, first, 0.0)
    assert [table.match(p, 1e9).held[0] for p in (first, second, third)] == [12, 6, 12]
    assert table.match(first, 0.0).confirmed == [0] and table.stats()["modelled"] == 30


def test_the_model_learns_from_reported_cached_tokens():
    table = CacheMap(MIB)
    slot = table.attach("r", 1000, False)
    for number in range(100):
        table.expect(slot, chain(number, 7), 0.0)
    assert table.stats()["modelled"] == 1000
    for _ in range(200):
        table.learn(slot, [], 6, 0)
    table.expect(slot, chain(7), 0.0)
    assert table.stats()["modelled"] == 250  # a quarter at least
    for _ in range(200):
        table.learn(slot, [], 0, 6)
    for number in range(100):
        table.expect(slot, chain(number, 7), 0.0)
    assert table.stats()["modelled"] == 1000


def test_switching_between_events_and_model_starts_from_nothing():
    table = CacheMap(MIB)
    slot, prompt = table.attach("r", None, True), PROMPTS[0]
    table.store(slot, prompt, keys(slot, prompt), "gpu")
    table.observed(slot, False)
    assert table.match(prompt, 0.0).held == [0]
    table.store(slot, prompt, keys(slot, prompt), "gpu")  # late events do not count
    table.expect(slot, prompt[:5], 0.0)
    assert table.match(prompt, 0.0).held == [5]
    table.observed(slot, True)
    assert table.match(prompt, 0.0).held == [0]


@pytest.mark.parametrize("capacity", [None, 100_000])
@pytest.mark.parametrize("shared", [False, True])
def test_the_budget_is_hard_and_the_ends_of_the_oldest_chains_go(capacity, shared):
    rng, table = np.random.default_rng(6), CacheMap(2 * MIB)
    slots = [table.attach(f"r{i}", capacity, True) for i in range(4)]
    conversations: list[list[int]] = []
    for number in range(1500):
        turn = random_chain(rng, 60)
        if number % 3 == 0 or len(conversations) < 5:
            conversations.append(turn)
            prompt, parent = turn, 0
        else:
            prompt = conversations[-1 - int(rng.integers(0, 5))]
            table.match(prompt, 0.0)
            parent = prompt[-1]
            prompt += turn
        for slot in slots if shared else [prompt[0] % 4]:
            table.store(slot, turn, keys(slot, turn), "gpu", [(0, parent)])
        assert table.stats()["bytes"] <= 2 * MIB
    stats = table.stats()
    assert stats["evicted"] > 1000 and stats["refused"] == 0
    assert max(table.match(conversations[-1], 0.0).held) == len(conversations[-1])
    for under_way in table._gpu.capacity._shedding.values():
        assert all(under_way)
    gone = 0
    for prompt in conversations:
        present = table._gpu.blocks.index.numbers(u64(prompt)) > 0
        length = int(present.argmin()) if not present.all() else len(prompt)
        assert not present[length:].any(), "a block outlived the one before it"
        gone += length == 0
    assert 0 < gone < len(conversations)


def test_a_replica_alone_that_outgrows_the_budget_keeps_its_newest():
    rng, table = np.random.default_rng(8), CacheMap(MIB)
    slot = table.attach("r", None, True)
    chains = [random_chain(rng, 500) for _ in range(200)]
    for prompt in chains:
        table.store(slot, prompt, keys(slot, prompt), "gpu")
    assert table.match(chains[-1], 0.0).held == [500]
    assert table.match(chains[0], 0.0).held == [0]
    stats = table.stats()
    assert stats["bytes"] <= MIB and stats["slots"][slot] == stats["blocks"] > 5000
    table.clear(slot)
    assert table.stats()["slots"][slot] == 0 and table.match(chains[-1], 0.0).held == [0]
    for _ in range(20):  # its blocks go a step with each call
        table.remove(slot, [1])
    assert table.stats()["blocks"] == 0


def test_a_budget_too_small_to_work_with_is_refused():
    with pytest.raises(ValueError, match="1 MiB"):
        CacheMap(1000)


def test_engine_keys_may_be_bytes_negative_or_small():
    table = CacheMap(MIB)
    slot, prompt = table.attach("r", None, True), PROMPTS[0]
    names = [bytes([200 + i]) * 32 for i in range(6)] + [-i for i in range(1, 7)] + list(range(6))
    table.store(slot, prompt, names, "gpu")
    assert table.resolve(slot, names) == prompt
    assert table.resolve(slot, [b"none", 99]) == [0, 0]
    assert table.remove(slot, names[::-1][:8], "gpu") == 8
    assert table.match(prompt, 0.0).held == [10]
    with pytest.raises(ValueError, match="tier"):
        table.store(slot, prompt, names, "tape")


def test_a_replica_that_joins_a_full_map_gets_its_part():
    rng, table = np.random.default_rng(9), CacheMap(MIB)
    first = table.attach("a", None, True)
    for _ in range(100):
        prompt = random_chain(rng, 500)
        table.store(first, prompt, keys(first, prompt), "gpu")
    second = table.attach("b", None, True)
    for _ in range(20):
        prompt = random_chain(rng, 500)
        table.store(second, prompt, keys(second, prompt), "gpu")
        assert table.match(prompt, 0.0).held == [0, 500]
    stats = table.stats()
    assert stats["refused"] == 0 and stats["bytes"] <= MIB and stats["slots"][second] > 2000


class TestGuessedBlocks:
    """Two replicas that report their blocks; of the prompts' last four blocks no event tells."""

    @pytest.fixture
    def table(self):
        table = CacheMap(MIB)
        for name in "ab":
            table.attach(name, 100, True)
        return table

    def sent(self, table, slot, hashes, now=0.0):
        table.match(hashes, now)
        return table.expect(slot, hashes, now)

    def held(self, table, hashes, now=1000.0):
        return table.match(hashes, now).held

    def test_are_where_the_prompt_was_sent_long_ago(self, table):
        prompt = chain(1, 2)
        self.sent(table, 1, GuessedBlocks.of(prompt, 0))
        longer = chain(1, 2, 3)
        assert self.held(table, GuessedBlocks.of(longer, 0)) == [0, 12]
        assert table.match(GuessedBlocks.of(longer, 0), 1000.0).confirmed == [0, 0]
        assert self.held(table, GuessedBlocks.of(chain(1, 3), 0)) == [0, 6]
        assert self.held(table, longer) == [0, 0]  # of blocks that are the engine's, events tell

    def test_count_only_where_the_known_ones_are_still_held(self, table):
        prompt = GuessedBlocks.of(chain(1, 2), 6)
        self.sent(table, 0, prompt)
        assert self.held(table, prompt) == [0, 0]
        table.store(0, list(prompt[:6]), keys(0, prompt[:6]))
        assert self.held(table, prompt) == [12, 0]
        table.remove(0, keys(0, prompt[5:6]))
        assert self.held(table, prompt) == [5, 0]

    def test_go_with_what_the_replica_holds_and_with_a_refusal(self, table):
        prompt = GuessedBlocks.of(chain(1, 2), 0)
        self.sent(table, 0, prompt)
        table.clear(0)
        assert self.held(table, prompt) == [0, 0]
        table.take_back(0, prompt, 0, self.sent(table, 0, prompt))
        assert self.held(table, prompt) == [0, 0]

    def test_are_bounded_by_the_replicas_cache_and_by_what_it_reports(self, table):
        for name in range(30):
            self.sent(table, 0, GuessedBlocks.of(chain(name), 0), float(name))
        assert [self.held(table, GuessedBlocks.of(chain(name), 0))[0] for name in (0, 29)] == [0, 6]
        assert table.stats()["modelled"] == 100
        for _ in range(20):
            table.learn(0, GuessedBlocks.of(chain(29), 0), 6, 0)
        self.sent(table, 0, GuessedBlocks.of(chain(40), 0), 100.0)
        assert table.stats()["modelled"] < 80

    def test_fit_in_the_budget(self):
        table = CacheMap(MIB)
        table.attach("a", 1 << 20, True)
        for name in range(3000):
            prompt = GuessedBlocks.of(chain(name), 0)
            table.match(prompt, name / 1000)
            table.expect(0, prompt, name / 1000)
        assert table.stats()["bytes"] < MIB


@pytest.mark.parametrize(
    "tier, blocks, left_out",
    [
        ("cpu", 6, 0),
        ("disk", 6, 0),
        (ChunkTier("cpu", 3).tier, 6, 1),
        (ChunkTier("cpu", 4).tier, 6, None),
        (ChunkTier("cpu", 1).tier, 6, 1),
        (ChunkTier("cpu", 3, own=True).tier, 6, 0),
        (ChunkTier("cpu", 4, own=True).tier, 6, None),
    ],
)
def test_whether_a_slower_tier_has_a_prompts_last_block(tier, blocks, left_out):
    table, prompt = CacheMap(MIB), chain(1)[:6]
    slot, other = table.attach("r", None, True), table.attach("s", None, True)
    table.store(slot, prompt, keys(slot, prompt), "gpu")
    assert table.last_below(slot, prompt, 3) is None
    table.store(slot, prompt[:blocks], keys(slot, prompt[:blocks]), tier)
    assert table.last_below(slot, prompt, 3) == left_out and table.last_below(other, prompt, 3) is None
    table.remove(slot, keys(slot, prompt[-1:]), tier)
    assert table.last_below(slot, prompt, 3) is None


def test_what_an_engine_says_is_compared_with_what_was_told_until_it_was_asked():
    table = CacheMap(MIB)
    slot = table.attach("r", None, True)
    table.store(slot, [11, 12, 13], [1, 2, 3])
    compare = table.differs(slot)
    table.store(slot, [14], [4], heads=[(0, 13)])
    table.remove(slot, [1])
    assert compare([1, 2, 3]) == ([], []) and compare([2, 9, 3]) == ([1], [11])
    assert table.differs(slot)([1, 2, 3]) == ([0], [14])


def test_a_model_follows_the_size_of_its_engines_cache():
    table = CacheMap(1 << 20)
    small, other = (table.attach(name, 800, False) for name in ("small", "other"))
    chain = list(range(1, 601))
    for slot in (small, other):
        table.expect(slot, chain, 0.0)
    table.resize(small, 400)
    assert table.match(chain, 0.0).held == [400, 600]
    table.resize(small, 800)
    table.expect(small, chain, 0.0)
    assert table.match(chain, 0.0).held == [600, 600]


@pytest.mark.parametrize("tier", OWN)
def test_a_replica_that_left_takes_no_prompt_with_it_whatever_slower_tiers_there_are(tier):
    """Its slot stays empty until another replica comes."""
    cache_map = CacheMap(1 << 20)
    gone, here = (cache_map.attach(name, None, True) for name in ("gone", "here"))
    for slot in (gone, here):
        cache_map.store(slot, [11, 12], [1, 2])
        cache_map.store(slot, [14], [4], tier)
    cache_map.detach(gone)
    match = cache_map.match([11, 12, 13, 14], 0.0)
    assert match.held == [0, 2] and match.lower == {here: [(tier.split()[0], 2)]}
