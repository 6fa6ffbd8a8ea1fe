"""TensorRT-LLM's events, in the forms that its own serializer writes."""

import json

import pytest

from cachemap.events import records
from cachemap.events.records import Cleared, EventError, Removed, Stored
from replicas.engines.tensorrt_llm import TRTLLM_SERVE


def decoder():
    return TRTLLM_SERVE.event_decoder(records, 4)


def block(key: int, *tokens: int, level: int = 0, **more) -> dict:
    ids = [{"type": "unique_token", "token_id": one, "token_extra_id": 0} for one in tokens]
    return {"type": "stored_block", "block_hash": key, "tokens": ids, "cache_level": level, "priority": 35, **more}


def stored(*blocks: dict, parent: int | None = None) -> dict:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def moved(key: int, old: int, new: int) -> dict:
    change = {"type": "event_diff", "new_value": new, "old_value": old}
    return {"type": "updated", "block_hash": key, "cache_level": change, "priority": None}


def numbered(*data: dict, start: int = 0, window: int = 4096, **more) -> bytes:
    return json.dumps(
        [{"event_id": start + i, "data": one, "window_size": window, **more} for i, one in enumerate(data)]
    ).encode()


def test_full_blocks_are_stored_in_a_chain_and_a_part_of_one_is_not():
    told = stored(block(7, 1, 2, 3, 4), block(8, 5, 6, 7, 8), block(9, 9), parent=3)
    batch = decoder()(numbered({"type": "created", "num_blocks_per_cache_level": [10, 0]}, told))
    assert [(list(one.keys), one.parent, one.block_size, one.tier) for one in batch.events] == [
        ([7], 3, 4, "gpu"), ([8], 7, 4, "gpu"),
    ]  # fmt: skip
    assert memoryview(batch.events[1].tokens).cast("I").tolist() == [5, 6, 7, 8] and not batch.passed_over


def test_a_block_that_moves_is_on_its_new_level_before_it_is_off_the_old_one_and_is_removed_where_it_is():
    decode = decoder()
    decode(numbered(stored(block(7, 1, 2, 3, 4))))
    to_host = decode(numbered(moved(7, 0, 1), start=1)).events
    assert [(type(one), one.tier) for one in to_host] == [(Stored, "cpu"), (Removed, "gpu")] and not to_host[0].tokens
    gone = decode(numbered({"type": "removed", "block_hashes": [7]}, start=2)).events
    assert [(list(one.keys), one.tier) for one in gone] == [([7], "cpu")]
    back = decode(numbered(stored(block(7, 1, 2, 3, 4)), {"type": "removed", "block_hashes": [7]}, start=3)).events
    assert [one.tier for one in back] == ["gpu", "gpu"]


def test_a_change_of_priority_is_none_of_the_cache():
    told = {"type": "updated", "block_hash": 7, "cache_level": None, "priority": {"new_value": 1, "old_value": 2}}
    assert decoder()(numbered(told)).events == []


@pytest.mark.parametrize("next_number", [0, 3], ids=["another process", "lost events"])
def test_numbers_that_do_not_follow_on_mean_that_nothing_is_known_any_more(next_number):
    decode = decoder()
    decode(numbered(stored(block(7, 1, 2, 3, 4)), stored(block(8, 1, 1, 1, 1))))
    found = decode(numbered(stored(block(9, 2, 2, 2, 2)), start=next_number)).events
    assert [type(one) for one in found] == [Cleared, Stored]


def test_the_first_answer_may_begin_anywhere():
    assert [type(one) for one in decoder()(numbered(stored(block(9, 2, 2, 2, 2)), start=900)).events] == [Stored]


def test_media_and_embeddings_are_part_of_a_blocks_key():
    other = block(8, 5, 6, 7, 8)
    other["tokens"][0]["token_extra_id"] = 12
    found = decoder()(numbered(stored(block(7, 1, 2, 3, 4, mm_keys=[{"hash": "ab"}]), other))).events
    assert all(one.extra and one.extra[0] for one in found)


def test_layers_with_windows_and_other_ranks_are_not_taken_for_all_of_the_cache():
    decode = decoder()
    decode(numbered({"type": "created", "num_blocks_per_cache_level": [1]}))
    assert decode(numbered(stored(block(7, 1, 2, 3, 4)), start=1, window=512)).events == []
    rank = decode(numbered(stored(block(7, 1, 2, 3, 4)), start=2, attention_dp_rank=1))
    assert rank.events == [] and "another rank" in rank.passed_over[0]


@pytest.mark.parametrize("payload", [b"no JSON", b"{}", b"\xff"])
def test_what_is_no_list_of_events_is_refused(payload):
    with pytest.raises(EventError):
        decoder()(payload)


@pytest.mark.parametrize("one", [3, {}, {"event_id": "x", "data": {}}, {"event_id": 1, "data": {"type": "new"}}])
def test_an_event_that_cannot_be_read_is_passed_over(one):
    batch = decoder()(json.dumps([one, {"event_id": 2, "data": stored(block(7, 1, 2, 3, 4))}]).encode())
    assert len(batch.passed_over) == 1 and isinstance(batch.events[-1], Stored)


def test_an_answer_tells_whether_events_went_to_another_reader():
    """One that starts over is another process."""
    decode = decoder()
    gone = {"type": "removed", "block_hashes": []}
    skips = [decode(numbered(gone, gone, start=start)).skipped for start in (3, 5, 9, 11, 0)]
    assert skips == [False, False, True, False, False]
