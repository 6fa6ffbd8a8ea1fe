"""Decoding batches, and what each kind of event does to the map."""

from array import array
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemap import CacheMap, Span, chain_seed, hash_blocks, hash_with_media
from cachemap.events.apply import EventApplier
from cachemap.events.records import AGREEING, Blocks, Cleared, EventError, Removed
from cachemap.events.sequence import Order, classify
from cachemap.hashing import named_ahead

from ...calls import counting_calls
from ..publisher import BLOCK, decode, removed, stored

TOKENS = list(range(BLOCK * 4))


def hashes(tokens=TOKENS, **seed):
    return hash_blocks(array("I", tokens).tobytes(), BLOCK, chain_seed("m", BLOCK, **seed))


def batch(*events, timestamp=1.5):
    return decode(msgspec.msgpack.encode([timestamp, list(events), 0])).events


@pytest.fixture
def setting():
    table = CacheMap(1 << 20)
    slot = table.attach("r", None, True)
    return table, EventApplier(table, slot, "m", BLOCK)


def apply(setting, *events):
    setting[1].apply(batch(*events))
    setting[1].flush()


def held(setting, chain):
    return setting[0].match(chain, 0.0).confirmed[0]


def test_maps_and_arrays_say_the_same():
    as_map = batch(stored([1, 2], TOKENS[:8], 7), removed(3), {"type": "AllBlocksCleared"})
    as_array = batch(
        ["BlockStored", [1, 2], 7, TOKENS[:8], BLOCK, None, "GPU", None, [None, None], 0],
        ["BlockRemoved", [3], "GPU"],
        ["AllBlocksCleared"],
    )
    assert as_map[0].keys == as_array[0].keys and as_map[0].parent == 7
    assert as_map[1:] == as_array[1:] == [Removed([3], "gpu", 0), Cleared()]
    assert as_map[0]._replace(extra=None) == as_array[0]._replace(extra=None)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", msgspec.msgpack.encode(3), msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(["x", []]), msgspec.msgpack.encode([1.0, 5]),
    ],
)  # fmt: skip
def test_what_is_no_batch_is_refused(payload):
    with pytest.raises(EventError):
        decode(payload)


@pytest.mark.parametrize(
    "event, why",
    [
        ({"no": "type"}, "an event: Object missing required field `type`"),
        ([], "an event: Expected `array` of at least length 1"),
        (5, "an event: Expected `array`, got `int`"),
        ({"type": "BlockMoved"}, "an event: unknown type 'BlockMoved'"),
        (["BlockMoved", 1, 2], "an event: unknown type 'BlockMoved'"),
        (stored([1], [1, 2, 3]), "BlockStored: 3 tokens for 1 blocks of 4"),
        (stored("ab", []), "BlockStored: Expected `array`, got `str`"),
        (stored([1], [1, 2, 3, -4]), "BlockStored: "),
        (stored([1], [1, 2, 3, "4"]), "BlockStored: "),
        (stored([1], TOKENS[:4], extra_keys=[["x"], None]), "BlockStored: 2 extra keys for 1 blocks"),
        ({"type": "BlockStored", "keys": [1]}, "BlockStored: Object missing required field `block_hashes`"),
        ({"type": "BlockRemoved", "keys": [1]}, "BlockRemoved: Object missing required field `block_hashes`"),
    ],
)
def test_an_event_that_cannot_be_read_is_passed_over_and_says_why(event, why):
    got = decode(msgspec.msgpack.encode([1.0, [stored([1], TOKENS[:4]), event, stored([2], TOKENS[4:8], 1)]]))
    assert [one.keys for one in got.events] == [[1], [2]]
    assert len(got.passed_over) == 1 and got.passed_over[0].startswith(why)


def test_unknown_fields_are_ignored():
    got = decode(msgspec.msgpack.encode([1, [stored([1], [0] * 4, new=3)], 0, 9]))
    assert len(got.events) == 1 and not got.passed_over and got.timestamp == 1.0


def test_salt_and_adapter_name_another_chain(setting):
    apply(setting, stored([1, 2], TOKENS[:8], extra_keys=[["t1"], None]))
    apply(setting, stored([3, 4], TOKENS[8:], 2))
    lora = {"lora_name": "ad", "extra_keys": [["ad", "t1"], ["ad"]]}
    apply(setting, stored([11, 12], TOKENS[:8], **lora))
    assert held(setting, hashes()) == 0
    assert held(setting, hashes(cache_salt="t1")) == 4
    assert held(setting, hashes(adapter="ad")) == 0
    assert held(setting, hashes(adapter="ad", cache_salt="t1")) == 2


def test_blocks_of_an_adapter_without_a_name_are_not_the_base_models(setting):
    """The first array form of vLLM's events had the adapter's number only."""
    apply(setting, ["BlockStored", [1, 2], None, TOKENS[:8], BLOCK, 1, "GPU"])
    assert held(setting, hashes()) == 0 and setting[1].blocks_stored == 2
    apply(setting, ["BlockStored", [3], None, TOKENS[:4], BLOCK, None, "GPU"])
    assert held(setting, hashes()) == 1


def test_a_salt_spelled_like_the_adapter_is_a_salt(setting):
    """As vLLM 0.32 publishes it for model "ad" with cache_salt "ad": the name on every block, then the salt on the
    first."""
    apply(setting, stored([1, 2], TOKENS[:8], lora_id=1, lora_name="ad", extra_keys=[["ad", "ad"], ["ad"]]))
    apply(setting, stored([3], TOKENS[8:12], 2, lora_id=1, lora_name="ad", extra_keys=[["ad"]]))
    assert held(setting, hashes(adapter="ad", cache_salt="ad")) == 3
    assert held(setting, hashes(adapter="ad")) == 0
    apply(setting, stored([4], TOKENS[:4], extra_keys=[["ad"]]))
    assert held(setting, hashes(cache_salt="ad")) == 1


def test_blocks_that_cover_an_image_match_no_text_but_can_be_removed(setting):
    image = [["img", 3]]
    apply(setting, stored([1, 2, 3], TOKENS[:12], extra_keys=[None, image[0], None]))
    apply(setting, stored([4], TOKENS[12:], 3))
    assert held(setting, hashes()) == 1
    assert setting[0].stats()["blocks"] == 4 and setting[1].orphans == 0
    apply(setting, stored([9], TOKENS[:4], extra_keys=[[["img", 0]]]))
    apply(setting, removed(1), removed(2), removed(3), removed(4), removed(9))
    assert setting[0].stats()["blocks"] == 0


def with_media(*spans, **seed):
    ids = array("I", TOKENS).tobytes()
    return hash_with_media(ids, BLOCK, chain_seed("m", BLOCK, **seed), [Span(*span) for span in spans])


def test_a_prompt_meets_the_blocks_that_cover_the_same_items_at_the_same_places(setting):
    """As vLLM publishes two items, of which one begins where the other ends, inside the second of four blocks."""
    keys = [None, [["one", 1], ["two", 3]], [["two", -1]], None]
    apply(setting, stored([1, 2, 3, 4], TOKENS, extra_keys=keys))
    assert held(setting, with_media(("one", 5, 2), ("two", 7, 3))) == 4
    assert held(setting, with_media(("one", 5, 2), ("other", 7, 3))) == 1
    assert held(setting, with_media(("one", 4, 2), ("two", 7, 3))) == 1
    assert held(setting, with_media(("one", 5, 2), ("two", 7, 2))) == 4  # it ends in the same block
    assert held(setting, with_media(("one", 5, 2), ("two", 7, 1))) == 2


def test_no_function_is_called_for_each_block_that_an_item_covers():
    """A small request may declare items of a million tokens. Calls are counted, since the machine may be busy."""
    spans = [Span("one", 5, 3_000), Span("two", 3_005, 4_000)]
    found, calls = counting_calls(lambda: hash_with_media(bytes(4 * 8_000), BLOCK, 1, spans))
    assert len(found) == 2_000 and calls < 20


@pytest.mark.parametrize("adapter", [None, "ad"])
def test_an_item_and_a_tenants_salt_in_the_first_block(setting, adapter):
    first = [*filter(None, [adapter]), ["one", 1], "t1"]
    rest = [adapter] if adapter else None
    apply(setting, stored([1, 2], TOKENS[:8], lora_name=adapter, extra_keys=[first, rest]))
    assert held(setting, with_media(("one", 1, 2), adapter=adapter, cache_salt="t1")) == 2
    assert held(setting, with_media(("one", 1, 2), adapter=adapter)) == 0
    assert held(setting, with_media(("two", 1, 2), adapter=adapter, cache_salt="t1")) == 0


def test_a_block_whose_parent_is_unknown_is_left_out(setting):
    apply(setting, stored([5], TOKENS[:4], 77))
    assert setting[1].orphans == 1 and setting[0].stats()["blocks"] == 0


def test_branches_within_one_batch_find_their_parents(setting):
    apply(
        setting,
        stored([1, 2], TOKENS[:8]),
        stored([3], TOKENS[8:12], 2),
        stored([4], [7, 7, 7, 7], 1),
        stored([5], TOKENS[12:], 3),
    )
    assert held(setting, hashes()) == 4
    assert held(setting, hashes([*TOKENS[:4], 7, 7, 7, 7])) == 2


def test_removed_and_stored_again_in_one_batch_ends_as_it_was_sent(setting):
    apply(setting, stored([1, 2], TOKENS[:8]))
    apply(setting, removed(2), removed(1), stored([1], TOKENS[:4]))
    assert held(setting, hashes()) == 1
    apply(setting, stored([2], TOKENS[4:8], 1), removed(2))
    assert held(setting, hashes()) == 1


@pytest.mark.parametrize("together", [True, False])
def test_a_block_computed_twice_is_held_until_both_copies_went(setting, together):
    """Engines publish each copy's coming and going; seen at prompts that end on a block's edge."""
    first, second = stored([1, 2], TOKENS[:8]), stored([2], TOKENS[4:8], 1)
    if together:
        apply(setting, first, second)
    else:
        apply(setting, first)
        apply(setting, second)
    apply(setting, removed(2))
    assert held(setting, hashes()) == 2
    apply(setting, removed(2))
    assert held(setting, hashes()) == 1
    apply(setting, stored([2], TOKENS[4:8], 1), removed(2))
    assert held(setting, hashes()) == 1


def test_clearing_forgets_copies_too(setting):
    apply(setting, stored([1], TOKENS[:4]), stored([1], TOKENS[:4]), {"type": "AllBlocksCleared"})
    apply(setting, stored([1], TOKENS[:4]), removed(1))
    assert held(setting, hashes()) == 0


def test_a_copy_in_a_lower_tier_needs_no_tokens(setting):
    table, _ = setting
    apply(setting, stored([1, 2, 3], TOKENS[:12]))
    apply(setting, stored([1, 2, 3], [], medium="CPU"), removed(3), removed(2))
    assert held(setting, hashes()) == 1
    match = table.match(hashes(), 0.0)
    assert match.held == [1] and match.lower == {0: [("cpu", 2)]}
    apply(setting, removed(3, medium="CPU"))
    assert table.match(hashes(), 0.0).lower == {0: [("cpu", 1)]}


@pytest.mark.parametrize("size", [0, BLOCK * 8])
def test_a_copy_without_tokens_has_whatever_size_its_tier_tells(setting, size):
    """vLLM's offloading tells a size of 0 of them, or that of the chunks it moves."""
    table, applier = setting
    apply(setting, stored([1, 2, 3], TOKENS[:12]))
    apply(setting, *[stored([key], [], block_size=size, medium="CPU") for key in (1, 2, 99)])
    assert table.match(hashes(), 0.0).held == [3] and applier.fault is None and applier.orphans == 1
    apply(setting, removed(2), removed(3))
    assert table.match(hashes(), 0.0).lower == {0: [("cpu", 1)]}


def test_chunks_of_parts_of_blocks_in_a_lower_tier_leave_the_map_as_it_is(setting):
    apply(setting, stored([1], TOKENS[:4]), stored([7], TOKENS[:6], block_size=6, medium="CPU"))
    assert held(setting, hashes()) == 1 and setting[1].fault is None and setting[1].ignored == 1


def test_a_copy_is_of_the_block_that_has_its_key_whatever_is_left_out_of_its_event(setting):
    """vLLM's self-describing stores name no salt, so their tokens alone would be another tenant's block."""
    table, _ = setting
    apply(setting, stored([1], TOKENS[:4], extra_keys=[["salt"]]), stored([1], TOKENS[:4], medium="CPU"), removed(1))
    assert table.match(hashes(cache_salt="salt"), 0.0).lower == {0: [("cpu", 1)]}
    assert table.match(hashes(), 0.0).lower == {}


def test_a_lower_tier_may_tell_of_blocks_that_the_gateway_has_never_heard_of(setting):
    table, _ = setting
    apply(setting, stored([1, 2], TOKENS[:8], medium="CPU"))
    assert table.match(hashes(), 0.0).lower == {0: [("cpu", 2)]}


@pytest.mark.parametrize(
    ("told", "tier"),
    [
        ({"medium": "CPU"}, "cpu"), ({"medium": "CPU_TIER1"}, "cpu"), ({"medium": "CPU_TIER2"}, "disk"),
        ({"medium": "STORAGE"}, "disk"), ({"medium": "FS"}, "disk"), ({"medium": "OBJ"}, "remote"),
        ({"medium": "STORAGE", "locality": "REMOTE"}, "remote"), ({"medium": "CPU", "locality": "LOCAL"}, "cpu"),
    ],
)  # fmt: skip
def test_media_are_tiers(told, tier):
    assert batch(stored([1], [], **told))[0].tier == tier


@pytest.mark.parametrize(
    ("last", "number", "sent", "order"),
    [
        ((None, 0.0), 5, 1.0, Order.FIRST),
        ((4, 1.0), 5, 1.0, Order.CONTIGUOUS),
        ((4, 1.0), 6, 2.0, Order.GAP),
        ((4, 1.0), 4, 1.0, Order.STALE),
        ((4, 1.0), 3, 0.5, Order.STALE),
        ((4, 1.0), 0, 2.0, Order.RESTART),
        ((4, 1.0), 2, 2.0, Order.RESTART),
    ],
)
def test_order_of_batches(last, number, sent, order):
    assert classify(*last, number, sent) is order


def named(tokens, spans=()):
    ids, seed = array("I", tokens).tobytes(), chain_seed("m", BLOCK)
    own = hash_with_media(ids, BLOCK, seed, [Span(*span) for span in spans], ahead=1)
    return list(named_ahead(own, ids, BLOCK, 1))


def test_blocks_named_by_the_token_behind_them_are_met_where_that_is_the_same_too():
    """As vLLM publishes from 0.33 on with EAGLE or MTP: an image right behind a block is part of its name as well."""
    table = CacheMap(1 << 20)
    ahead = table, EventApplier(table, table.attach("r", None, True), "m", BLOCK, 1)
    apply(ahead, stored([1, 2, 3], TOKENS[:12], lookahead_token_ids=[[4], [8], [12]]))
    apply(ahead, stored([4], TOKENS[12:], 3, lookahead_token_ids=[[99]]))
    assert held(ahead, named([*TOKENS, 99, 5])) == 4 and held(ahead, named([*TOKENS, 98, 5])) == 3
    assert held(ahead, named(TOKENS[:12])) == 2 and held(ahead, named([*TOKENS[:8], 77, 78])) == 1
    apply(ahead, removed(4), removed(3))
    image = [None, [["img", 4]], [["img", 0]], None]
    apply(ahead, stored([1, 12, 13, 14], TOKENS, extra_keys=image, lookahead_token_ids=[[4], [8], [12], [99]]))
    assert held(ahead, named([*TOKENS, 99], [("img", 8, 2)])) == 4 and held(ahead, named([*TOKENS, 99])) == 2
    assert not ahead[1].fault and not ahead[1].orphans


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"block_size": 4 * BLOCK, "tokens": TOKENS}, (4 * BLOCK, 0, 0)),
        ({"tokens": TOKENS[:BLOCK], "lookahead_token_ids": [[1, 2]]}, (BLOCK, 2, 0)),
    ],
)
def test_events_tell_what_blocks_are_where_prompts_are_hashed_otherwise(setting, event, told):
    fields = {name: value for name, value in event.items() if name != "tokens"}
    apply(setting, stored([1], event["tokens"], **fields))
    assert setting[1].fault and setting[1].stored_as == told


@pytest.mark.parametrize("odd", [{"block_size": 4 * BLOCK}, {"block_size": 5}, {"lookahead_token_ids": [[1, 2]]}])
def test_what_one_odd_event_told_first_is_taken_back_once_three_agree(setting, odd):
    apply(setting, stored([1], list(range(odd.get("block_size", BLOCK))), **odd))
    for _ in range(AGREEING):
        assert setting[1].fault and setting[1].stored_as != (BLOCK, 0, 0)
        apply(setting, stored([2], TOKENS[:BLOCK]))
    assert not setting[1].fault and setting[1].stored_as == (BLOCK, 0, 0)


ODD = [
    {"block_size": 4 * BLOCK},
    {"block_size": 5},
    {"block_size": 2},
    {"block_size": 2 * BLOCK},
    {"ahead": 2},
    {"ahead": 1},
]


@given(st.lists(st.sampled_from([*ODD, *[{}] * 4]), max_size=40))
def test_odd_events_change_nothing_before_three_agree(events):
    table = CacheMap(1 << 20)
    applier = EventApplier(table, table.attach("r", None, True), "m", BLOCK, told=Blocks(BLOCK))
    since: list[dict] = []
    for number, odd in enumerate(events):
        since = [*since, odd] if odd else []
        if since.count(odd) >= AGREEING:
            return
        size, ahead = odd.get("block_size", BLOCK), odd.get("ahead", 0)
        more = {"lookahead_token_ids": [[7] * ahead]} if ahead else {}
        apply((table, applier), stored([100 + number], list(range(size)), block_size=size, **more))
        assert not applier.fault and applier.stored_as == (BLOCK, 0, 0)
        assert held((table, applier), hashes(list(range(BLOCK)))) == ({} in events[: number + 1])


one_change = st.tuples(st.sampled_from([stored, removed]), st.sampled_from(["GPU", "CPU"]), st.integers(0, 5))


@given(st.lists(one_change, max_size=40))
def test_events_of_one_batch_do_what_they_would_do_one_by_one(changes):
    """The changes of a batch reach the map together, whatever the order in which it names tiers and keys."""
    events = [
        removed(key, medium=medium) if kind is removed else stored([key], [key] * BLOCK, medium=medium)
        for kind, medium, key in changes
    ]
    contents = []
    for batches in ([[one] for one in events], [events]):
        table = CacheMap(1 << 20)
        setting = table, EventApplier(table, table.attach("r", None, True), "m", BLOCK)
        for one in batches:
            apply(setting, *one)
        held = {tier: dict(zip(*map(np.ndarray.tolist, both))) for tier, both in table.contents(0).held.items()}
        contents.append(({tier: blocks for tier, blocks in held.items() if blocks}, table.contents(0).copies))
    assert contents[0] == contents[1]


def test_an_engine_step_that_evicts_and_fills_in_turn_reaches_the_map_in_one_call_for_each_kind_and_tier(setting):
    apply(setting, *[stored([key], TOKENS[:BLOCK]) for key in range(100, 140)])
    told = []
    for key in range(1, 21):
        told += [removed(98 + 2 * key), removed(99 + 2 * key), stored([key], [key] * BLOCK)]
        told.append(stored([key], [key] * BLOCK, medium="CPU"))
    with (
        patch.object(setting[0], "change", side_effect=setting[0].change) as change,
        patch.object(setting[0], "resolve", side_effect=setting[0].resolve) as resolve,
    ):
        apply(setting, *told)
    assert change.call_count == 3 and resolve.call_count == 1
    assert setting[0].held(0) == 40
