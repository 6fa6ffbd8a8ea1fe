"""SGLang's events as its versions write them."""

from array import array

import msgspec
import pytest

from cachemap.events import records
from cachemap.events.records import Cleared, Removed
from replicas.engines.sglang import SGLANG

decode = SGLANG.event_decoder(records)


def batch(*events, rank=(0,)):
    return decode(msgspec.msgpack.encode([1.5, list(events), *rank]))


def ids(event):
    return array("I", event.tokens).tolist()


def page(key, parent, *tokens, **fields):
    return {"type": "BlockStored", "block_hashes": [key], "parent_block_hash": parent, "token_ids": list(tokens),
            "block_size": len(tokens), "lora_id": None, "medium": "GPU", **fields}  # fmt: skip


@pytest.mark.parametrize("medium", [(), ("GPU",)], ids=["five fields", "with its medium"])
def test_arrays_that_leave_out_what_says_nothing(medium):
    first = ["BlockStored", [-5], None, [7], 1, None, *medium]
    found = batch(first, ["BlockRemoved", [-5, 6]], ["AllBlocksCleared"], rank=())
    stored, removed, cleared = found.events
    assert (stored.keys, stored.parent, ids(stored), stored.block_size, stored.tier) == ([-5], None, [7], 1, "gpu")
    assert (removed, cleared, found.passed_over) == (Removed([-5, 6], "gpu", 0), Cleared(), [])


def test_pages_that_follow_on_become_one_event():
    copied = page(8, 9, 14, medium="CPU_PINNED")
    found = batch(page(1, None, 10), page(2, 1, 11), page(3, 2, 12), page(9, 2, 13), copied)
    assert [(one.keys, one.parent, ids(one), one.tier) for one in found.events] == [
        ([1, 2, 3], None, [10, 11, 12], "gpu"), ([9], 2, [13], "gpu"), ([8], 9, [14], "cpu"),
    ]  # fmt: skip


def test_pages_of_others_between_them_are_kept_in_order():
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    found = batch(page(1, None, 10), page(2, 1, 11), removed, page(1, None, 10), page(3, 1, 12, lora_name="sql"))
    assert [one.keys for one in found.events] == [[1, 2], [1], [1], [3]]
    assert found.events[-1].adapter == "sql"


def test_a_salt_is_what_a_prompt_begins_with():
    first, second = batch(page(1, None, 10, cache_salt="mine"), page(2, 1, 11, cache_salt="mine")).events
    assert (first.extra, second.extra) == ([["mine"]], None)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("GPU", "gpu"), ("CPU_PINNED", "cpu"), ("CPU_TIER1", "cpu"), ("DISK", "disk"), ("CPU_TIER2", "disk"), ("EXTERNAL", "remote")],
)  # fmt: skip
def test_media(medium, tier):
    (stored,) = batch(page(1, None, 10, medium=medium)).events
    assert stored.tier == tier


def test_what_cannot_be_read_is_passed_over():
    found = batch({"type": "BlockStored", "block_hashes": [1]}, {"type": "PageMoved"}, page(1, None, 10))
    assert len(found.events) == 1 and len(found.passed_over) == 2
