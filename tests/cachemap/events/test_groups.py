"""Engines with several KV cache groups: which of their blocks are hits is what all groups make of them.

The events are of the forms that vLLM 0.28 and 0.32 were seen to publish for layers with sliding windows beside layers
of full attention: group by group, that of full attention last; in 0.32 the groups with windows keep only what a later
prompt can resume at, and tell the tokens of all blocks with the keys of those that are kept.
"""

from array import array
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.changes import EVERY, CacheGroup
from cachemap.events import apply as apply_module
from cachemap.events.apply import EventApplier, in_pieces
from cachemap.events.groups import HASHED, MOST_PIECE
from cachemap.events.pending import MOST_PENDING
from cachemap.events.records import Blocks, Cleared, Removed
from cachemap.hashing import named_ahead

from ..publisher import BLOCK, CLEARED, removed, stored
from .test_events import TOKENS, apply, batch, held, setting

__all__ = ["setting"]

WINDOW = 2 * BLOCK  # the 7 tokens before the next one lie in 2 blocks
CHAIN = 4


def windowed(keys, blocks=CHAIN, group=0, parent=None, **fields):
    """Return the BlockStored event of a sliding-window group: `keys` of some of the first `blocks` blocks."""
    told = stored(keys, TOKENS[: blocks * BLOCK], parent, group_idx=group, **fields)
    return told | {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": WINDOW} | fields


def mamba(keys, blocks=CHAIN, group=0):
    return stored(keys, TOKENS[: blocks * BLOCK], group_idx=group, kv_cache_spec_kind="mamba")


def full(keys, group=1, **fields):
    return stored(keys, TOKENS[: len(keys) * BLOCK], group_idx=group, **fields)


def chain():
    from .test_events import hashes

    return hashes()


def hits(setting, most=None):
    return setting[0].match(chain(), 0.0, most).confirmed[0]


ALL = [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([windowed([3, 4]), full(ALL)], {None: 4, 3: 0}),  # a window needs its last blocks only
        ([windowed([3, 4]), full(ALL), removed(3, group_idx=0)], {None: 0}),  # nothing before can be resumed at
        ([windowed([3, 4]), full(ALL), windowed([2, 3], 3), full([1, 2, 3])], {None: 4, 3: 3}),
        ([windowed([3, 4, 4]), full(ALL), removed(4, group_idx=0)], {None: 0}),  # named twice, it is one copy
        ([windowed([1]), full(ALL)], {None: 1}),  # the first blocks are a hit in a window that reaches further back
        ([windowed([3, 4]), full(ALL), removed(1, group_idx=1)], {None: 0}),  # full attention needs every block
        ([mamba([2, 4]), full(ALL)], {1: 0, 2: 2, 3: 2, 4: 4}),  # Mamba needs the state after the last block
        ([mamba([1, 3]), windowed([1, 2, 4], group=1), full(ALL, 2)], {None: 1}),  # 3 has no window, 2 no state
        ([mamba([1, 3]), windowed([1, 2, 3, 4], group=1), full(ALL, 2)], {None: 3}),
        ([stored([1], TOKENS[:4], kv_cache_spec_kind="mla_attention")], {None: 1}),  # that is full attention
        ([windowed([], 1), full([1])], {None: 0}),  # a group is known before it holds anything
        ([windowed([3, 4]), full(ALL), CLEARED, full([1, 2], 0)], {None: 2}),  # a cleared cache has no groups
    ],
)
def test_a_hit_is_one_in_all_groups(setting, events, found):
    apply(setting, *events)
    assert {most: hits(setting, most) for most in found} == found and setting[1].fault is None


def test_a_second_group_of_full_attention_counts_like_the_first(setting):
    apply(setting, full([1, 2, 3], 0), full([1, 2, 3], 1), removed(2, group_idx=1))
    assert hits(setting) == 1
    assert list(setting[0].groups(0).values()) == [CacheGroup(1, EVERY)]


def test_another_applier_goes_on_with_the_groups_that_the_map_has(setting):
    """The gateway that follows the engine's events may be another one than before."""
    table, _ = setting
    apply(setting, windowed([3, 4]), full([1, 2, 3, 4]))
    other = table, EventApplier(table, 0, "m", BLOCK)
    apply(other, removed(3, group_idx=0))
    assert hits(setting) == 0
    apply(other, windowed([3], 3), full([1, 2, 3]), removed(1, group_idx=1))
    assert hits(setting) == 4  # there were two copies


@pytest.mark.parametrize(
    "event, why",
    [
        (windowed([1], 1, kv_cache_spec_kind="chunked_local_attention"), "not understood: chunked_local_attention"),
        (windowed([1], 1, kv_cache_spec_sliding_window=None), "not understood: sliding_window"),
        (windowed([1], 1, group=40_000), "or one of number 40000"),
        (mamba([1], 1, group=70_000), "or one of number 70000"),
        (windowed([1], 1, block_size=2), "blocks of one of the engine's cache groups have 2 tokens"),
    ],
)
def test_what_cannot_be_known_is_said(setting, event, why):
    apply(setting, event, full([1]))
    assert why in setting[1].fault


def test_the_highest_index_of_states_is_told_apart_from_windows(setting):
    apply(setting, mamba([1], 1, group=16_383), full([1], group=0))
    (group,) = setting[0].groups(0).values()
    assert (group.told_as, group.has_states, group.last) == (16_383, True, 1) and not setting[1].fault


def test_an_engine_without_full_attention_is_not_followed(setting):
    """The keys of a group with windows alone do not say which blocks they stand for."""
    apply(setting, windowed([3, 4]))
    assert setting[1].fault == "none of the engine's layers has full attention"


def test_copies_of_further_groups_in_slower_tiers_are_ignored(setting):
    apply(setting, windowed([3, 4]), full([1, 2, 3, 4]), windowed([3, 4], medium="CPU"))
    apply(setting, removed(3, group_idx=0, medium="CPU"))
    assert hits(setting) == 4 and setting[1].ignored == 3 and held(setting, chain()) == 4


def test_a_prompt_on_its_way_promises_hits_at_its_end_and_where_others_branched_off():
    table = CacheMap(1 << 20)
    table.attach("r", None, True)
    table.add_group(0, CacheGroup(0, 2))
    first, second, third = (list(range(1, 6)) + list(range(at, at + 5)) for at in (100, 200, 300))

    def predicted(hashes):
        return table.match(hashes, 1.0).held[0]

    assert predicted(first) == 0
    table.expect(0, first, 1.0)
    assert predicted([*first, 7, 8]) == 10 and predicted(second) == 0  # nobody keeps what ends in between ...
    table.match(second, 1.0, 9)
    table.expect(0, second, 1.0)  # whose prompt ends with a block, so that its last one is no hit
    assert predicted(third) == 5  # ... until somebody had use for it
    assert predicted([*second, 7]) == 9
    table.store(0, [*second, 7], [*second, 7], "gpu")
    assert predicted([*second, 7]) == 0  # events have come, and the other group keeps nothing of it
    table.store(0, second[3:5], second[3:5], CacheGroup(0, 2).tier)
    assert predicted([*second, 7]) == 5


LENGTH, SLOTS = 12, 3
block = st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 3), st.integers(0, LENGTH - 1), st.booleans())


@pytest.mark.parametrize("piece", [256, 3])
@given(changes=st.lists(block, max_size=150), most=st.integers(0, LENGTH), lasts=st.tuples(*[st.integers(1, 5)] * 3))
def test_the_hit_is_the_longest_that_every_group_would_grant(piece, changes, most, lasts):
    """Against vLLM's rule as it is stated: ask each group in turn for its longest hit within what is left, until all
    leave it as it is."""
    table = CacheMap(1 << 20)
    hashes = list(range(1, LENGTH + 1))
    tiers = ["gpu", *[CacheGroup(index, last).tier for index, last in enumerate(lasts)]]
    holding = [[[0] * LENGTH for _ in tiers] for _ in range(SLOTS)]
    for slot in range(SLOTS):
        table.attach(f"r{slot}", None, True)
        for index, last in enumerate(lasts[:slot]):  # the first replica has no further groups, the second has one
            table.add_group(slot, CacheGroup(index, last))
    for slot, group, at, gone in changes:
        if group > slot:
            continue
        if gone:
            holding[slot][group][at] = max(0, holding[slot][group][at] - 1)
            table.remove(slot, [1000 + at], tiers[group])
        else:
            holding[slot][group][at] += 1
            table.store(slot, [hashes[at]], [1000 + at], tiers[group], [(0, 0)])
    with patch("cachemap.table.groups.PIECE", piece):
        found = table.match(hashes, 0.0, most).held
    for slot in range(SLOTS):
        granted = grant(holding[slot][: slot + 1], [LENGTH, *lasts], LENGTH if not slot else most)
        assert found[slot] == granted
    assert sum(map(table.held, range(SLOTS))) == sum(count > 0 for slot in holding for group in slot for count in group)


def grant(groups, lasts, length):
    while True:
        before = length
        for blocks, last in zip(groups, lasts):
            while not all(blocks[max(0, length - last) : length]):
                length -= 1
        if length == before:
            return length


def states(keys, first, last, parent=None, **fields):
    """Return a BlockStored event of Mamba states: `keys` of the last of the blocks `first` to `last` - 1."""
    tokens = TOKENS[first * BLOCK : last * BLOCK]
    return stored(keys, tokens, parent, group_idx=1, kv_cache_spec_kind="mamba", **fields)


def wide(key, first=0, parent=None, **fields):
    """Return a BlockStored event of full attention, whose blocks are as large as two Mamba blocks."""
    tokens = TOKENS[first * BLOCK : (first + 2) * BLOCK]
    return stored([key], tokens, parent, group_idx=0, block_size=2 * BLOCK, **fields)


def part(key, block, parent):
    """Return a BlockStored event of a prompt that ends with this block, within a block of full attention."""
    return stored([key], TOKENS[block * BLOCK : (block + 1) * BLOCK], parent, group_idx=0)


SHARED = Blocks(2 * BLOCK, 0, BLOCK)


@pytest.mark.parametrize("parent", [2, 77])  # known, or told by nobody
def test_hits_end_within_a_block_of_full_attention_where_a_state_and_a_prompt_do(setting, parent):
    """As with decode context parallelism: the block before a prompt's end is named by a key that nobody told of."""
    apply(setting, wide(2), states([2], 0, 2), part(3, 2, parent), states([3], 2, 3, 2))
    assert hits(setting) == 3 and hits(setting, most=2) == 2 and hits(setting, most=1) == 0
    assert setting[1].stored_as == SHARED
    apply(setting, removed(3, group_idx=0))
    assert hits(setting) == 2
    apply(setting, part(3, 2, parent), removed(2, group_idx=0))
    assert hits(setting) == 0
    assert not setting[1].orphans and not setting[1].fault


def test_a_state_alone_or_a_prompts_end_alone_is_no_hit(setting):
    apply(setting, wide(2), states([1], 0, 1), states([3], 1, 3, 1))
    assert hits(setting) == 1  # full attention ends behind the second block, where no state is
    apply(setting, part(3, 2, 2), removed(3, group_idx=1))
    assert hits(setting) == 1
    apply(setting, states([2], 1, 2, 1))
    assert hits(setting) == 2


def test_states_named_by_tokens_behind_them_where_prompts_are_not_have_no_name(setting):
    """Each of their blocks took room for all these tokens: an event of 132 KB, 52 s."""
    apply(setting, wide(2), states([2], 0, 2), states([99], 2, 3, 2, lookahead_token_ids=[[7]]))
    assert setting[0].held(0) == 3 and not setting[1].fault and hits(setting) == 2


def test_a_prompts_end_becomes_a_whole_block(setting):
    apply(setting, wide(2), states([2], 0, 2), part(3, 2, 2), states([3], 2, 3, 2))
    apply(setting, removed(3, group_idx=0), wide(4, 2, 2), states([4], 3, 4, 3))
    assert hits(setting) == 4 and hits(setting, most=3) == 2


@pytest.mark.parametrize("states_first", [True, False])
def test_states_within_blocks_are_the_tenants_whose_salt_full_attention_tells(setting, states_first):
    from .test_events import hashes

    def step(salt, **keys):
        told = [wide(keys["whole"], extra_keys=[[salt]] if salt else None), states([keys["whole"]], 0, 2)]
        if states_first:
            told = [one | {"group_idx": 1 - one["group_idx"]} for one in reversed(told)]
        return told

    after = [one | {"group_idx": 1 - one["group_idx"]} if states_first else one
             for one in (part(13, 2, 12), states([13], 2, 3, 12))]  # fmt: skip
    apply(setting, *step("a", whole=12), *after)
    assert setting[0].match(hashes(cache_salt="a"), 0.0).confirmed[0] == 3 and hits(setting) == 0
    apply(setting, states([31], 0, 1) | {"group_idx": 0 if states_first else 1})  # whose, nobody tells
    assert hits(setting) == 0


def test_another_applier_goes_on_with_blocks_that_are_larger_than_states(setting):
    cache_map, _ = setting
    apply(setting, wide(2), states([2], 0, 2), part(3, 2, 2), states([3], 2, 3, 2))
    second = (cache_map, EventApplier(cache_map, 0, "m", BLOCK, 0, SHARED))
    apply(second, part(3, 2, 2))
    apply(second, removed(3, group_idx=0), removed(3, group_idx=0), wide(4, 2, 2), states([4], 3, 4, 3))
    assert hits(second) == 4 and not second[1].fault and second[1].stored_as == SHARED
    apply(second, removed(2, group_idx=0))
    assert hits(second) == 0


def test_groups_of_a_replica_that_is_not_observed_are_applied_without_a_fault_of_ours(setting):
    """The map of such a replica takes neither blocks nor groups."""
    setting[0].observed(0, False)
    apply(setting, full([1, 2]), windowed([1, 2], 2), windowed([1, 2], 2, group=2))
    assert setting[1].fault is None and setting[0].groups(0) == {}


@pytest.mark.parametrize("windows_first", [True, False])
def test_a_huge_event_comes_to_the_map_in_steps_between_which_others_may_look(setting, windows_first):
    """A million blocks in one event held up all clients for seconds, most of all where nobody knows their keys."""
    cache_map, applier = setting
    count, keys = 5 * MOST_PIECE, list(range(1, 5 * MOST_PIECE + 1))
    whole = {"keys": keys, "tokens": array("I", range(count * BLOCK)).tobytes()}
    (full_one, window) = batch(full([1], group=int(windows_first)), windowed([1], 1, group=int(not windows_first)))
    unknown = window._replace(keys=[count + key for key in keys], tokens=b"")
    events = [full_one._replace(**whole), window._replace(**whole), unknown]
    with patch.object(cache_map, "resolve", side_effect=cache_map.resolve) as resolved:
        for piece in in_pieces(events[1::-1] + events[2:] if windows_first else events):
            assert sum(len(event.keys) for event in piece) <= MOST_PIECE
            applier.apply(piece)
        steps, held_before = 0, cache_map.held(0)
        for _ in applier.flushing():
            assert cache_map.held(0) - held_before <= 2 * MOST_PENDING
            steps, held_before = steps + 1, cache_map.held(0)
    assert steps > 10 and resolved.call_count < 30
    assert cache_map.held(0) == 2 * count and applier.orphans == count
    assert [len(piece[0].keys) for piece in in_pieces([removed_all(keys, 1)]) if piece] == [MOST_PIECE] * 5
    for piece in in_pieces([removed_all(keys, 0), removed_all(keys, 1)]):
        applier.apply(piece)
        assert held_before - cache_map.held(0) <= MOST_PENDING + MOST_PIECE
        held_before = cache_map.held(0)
    applier.flush()
    assert cache_map.held(0) == 0 and applier.fault is None


def one_each(count, *events):
    """Return these events in turns, each with a key of its own."""
    return [events[at % len(events)]._replace(keys=[1000 + at // len(events)]) for at in range(count)]


def awkward(name, count=4 * MOST_PIECE):
    """Return a batch that takes long for another reason than many blocks in one event."""
    stored_one, window = batch(full([1], group=0), windowed([1], 1, group=1))
    nothing, alone = stored_one._replace(keys=[], tokens=b""), window._replace(tokens=b"")
    copy, below = stored_one._replace(tier="cpu", tokens=b""), stored_one._replace(tier="cpu", below=True)
    return {
        "cleared": [Cleared(), nothing] * (count // 2),
        "stored nothing": [nothing] * count,
        "tiers in turns": one_each(count, stored_one, copy),
        "stored and removed in turns": one_each(count, stored_one, removed_all([], 0)),
        "chunks": one_each(count, below),
        "stored twice": [stored_one] * count,
        "a group's in turns": one_each(count, window, removed_all([], 1)),
        "a group's, then one removed": [*one_each(count, alone), removed_all([1], 1)],
        "a group's among many": [*one_each(count, alone), *[nothing] * count],
        "wide blocks removed": [
            *[stored_one._replace(keys=[2], block_size=512 * BLOCK, tokens=bytes(512 * BLOCK * 4))]
            * 3,  # to be believed
            removed_all(list(range(2, 100)), 0),
        ],
    }[name]


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("cleared", 50), ("stored nothing", 4), ("tiers in turns", 4), ("stored and removed in turns", 50),
        ("chunks", 15), ("stored twice", 4), ("a group's in turns", 30), ("a group's, then one removed", 30),
        ("a group's among many", 30), ("wide blocks removed", 40),
    ],
)  # fmt: skip
def test_a_batch_of_many_events_is_applied_in_steps(setting, name, least):
    """Hundreds of thousands of events without keys, or each of which makes a call to the map, held up all for
    seconds."""
    cache_map, applier = setting
    apply(setting, full([1], group=0), windowed([1], 1, group=1))
    calls, blocks = [0], [0]

    def change(slot, change):
        calls[-1] += 1
        blocks[-1] += len(getattr(change, "tags", ()))
        return changed(slot, change)

    changed = cache_map.change
    with (
        patch.object(cache_map, "change", change),
        patch.object(cache_map, "resolve", side_effect=cache_map.resolve) as resolved,
    ):
        for _ in applier.applying(awkward(name)):
            calls[-1] += resolved.call_count
            resolved.reset_mock()
            calls.append(0)
            blocks.append(0)
    assert len(calls) > least and max(calls) < 200 and max(blocks) <= 2 * MOST_PENDING


def test_losses_of_everything_that_follow_one_another_are_one(setting):
    apply(setting, full([1]))
    with patch.object(setting[0], "change", side_effect=setting[0].change) as changed:
        steps = sum(1 for _ in setting[1].applying([Cleared()] * 200_000))
    assert setting[0].held(0) == 0 and changed.call_count < 200 and steps > 100


@contextmanager
def hashing():
    """Yield a list of how many blocks were hashed in each step; the caller appends a 0 when a step begins."""
    counts = [0]

    def hash_some(tokens, size, seed):
        counts[-1] += len(tokens) // (size * 4)
        return hash_blocks(tokens, size, seed)

    with patch.object(apply_module, "hash_blocks", hash_some):
        yield counts


@pytest.mark.parametrize("ahead", [0, 3])
def test_states_after_many_tokens_are_named_in_steps(ahead):
    """Eight million tokens of one event, in blocks of 1, held up all clients for 14 s and took 960 MB."""
    table = CacheMap(1 << 20)
    applier = EventApplier(table, table.attach("r", None, True), "m", BLOCK, ahead)
    tokens, most = [n % 997 for n in range(3 * HASHED * MOST_PIECE * BLOCK)], HASHED * MOST_PIECE
    behind = {"lookahead_token_ids": [[7] * ahead] * 2} if ahead else {}
    one = {"lookahead_token_ids": [tokens[BLOCK : BLOCK + ahead]]} if ahead else {}
    apply((table, applier), stored([1], tokens[:BLOCK], group_idx=0, **one))
    told = stored([8, 9], tokens[BLOCK:], 1, group_idx=1, kv_cache_spec_kind="mamba", **behind)
    with hashing() as hashed:
        for _ in applier.applying(batch(told)):
            hashed.append(0)
    assert max(hashed) <= most and sum(hashed) == len(tokens) // BLOCK - 1
    ids = array("I", [*tokens, *[7] * ahead]).tobytes()
    names = hash_blocks(ids[: 4 * len(tokens)], BLOCK, chain_seed("m", BLOCK))
    names = list(named_ahead(names, ids, BLOCK, ahead)) if ahead else names
    assert table.resolve(0, [8, 9]) == names[-2:]


def test_a_steps_states_are_hashed_once_however_many_prompts_end_beside_them(setting):
    apply(setting, wide(2), states([2], 0, 2))
    parts = [part(100 + number, 2, 77) for number in range(50)]
    with hashing() as hashed:
        apply(setting, *parts, states([3], 2, 4, 2))
    assert sum(hashed) < 10 and setting[0].resolve(0, [100, 149]) == chain()[2:3] * 2


def removed_all(keys, group):
    return Removed(keys, "gpu", group)


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_keys_that_nobody_knows_are_looked_up_together(setting, medium):
    """This holds also where they are of the group that prompts are found in, which then has no windows."""
    apply(setting, full([1], group=0), windowed([1], 1, group=1))
    keys = list(range(100, 100 + 5 * MOST_PIECE))
    (event,) = batch(windowed([1], 1, group=0, medium=medium))
    with patch.object(setting[0], "resolve", side_effect=setting[0].resolve) as resolved:
        for piece in in_pieces([event._replace(keys=keys, tokens=b"")]):
            setting[1].apply(piece)
        setting[1].flush()
    assert resolved.call_count < 30 and setting[1].orphans == len(keys)


def test_a_state_whose_parent_reached_the_map_in_the_same_batch_is_stored(setting):
    """What the map had when the batch began does not show to which blocks its later events may refer."""
    first = [wide(2), states([13], 0, 3), states([99], 0, 1)]
    apply(setting, *first, removed(99, group_idx=1), wide(4, 2, 2), states([15], 3, 5, 13))
    assert all(setting[0].resolve(0, [13, 15]))
