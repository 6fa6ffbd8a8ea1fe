"""What an engine publishes of LMCache's chunks, recorded of the own classes of LMCache 0.5.6. The program that recorded
it is in this repository's history, as `tests/vllm/lmcache_events.py`."""

from array import array

import msgspec
import pytest

from replicas.simulated.profile import load_profile
from replicas.simulated.publisher import Publisher
from replicas.simulated.steps import EngineRequest, Removed, Stored

from .recorded import SIZE, Told, recorded

RECORDED = recorded("lmcache_events.json")
CHUNK = 256


def chunks(told, text):
    """How many chunks of a long prompt are found in host memory."""
    (_, blocks), *others = told.lower(text, CHUNK * 3) or [("cpu", 0)]
    assert blocks * SIZE % CHUNK == 0 and not others
    return blocks * SIZE // CHUNK


def after_each(payloads):
    """The map, and after each prompt how many chunks of all of them are found."""
    told = Told(payloads, lambda told, _: [chunks(told, text) for text in range(3)])
    return told, told.found


@pytest.mark.parametrize("version", RECORDED)
def test_chunks_of_its_server_are_known_from_store_to_eviction(version):
    told, found = after_each(RECORDED[version]["server"])
    # room for four chunks; the last prompt takes three, so of the third its last chunk goes, and the second one
    assert found == [[2, 0, 0], [2, 2, 0], [0, 2, 2], [3, 0, 1]]
    assert not told.applier.orphans and not told.applier.ignored and not told.passed_over


@pytest.mark.parametrize("version", RECORDED)
def test_a_worker_that_tells_of_no_evictions_is_found_out_by_the_first_chunk_that_it_stores_again(version):
    told, found = after_each(RECORDED[version]["worker"])
    assert found == [[2, 0, 0], [2, 2, 0], [2, 2, 2], [0, 0, 0]]
    assert told.applier.ignored == 3 * CHUNK // SIZE and not told.passed_over


@pytest.mark.parametrize("version", RECORDED)
def test_of_what_lmcache_tells_in_the_engines_process_nothing_is_promised(version):
    """All chunks but a prompt's last one come with a token too many (`convert_tokens_to_list` takes the end with it),
    the first chunk of every further store names chunk 0 as the one before it, and none is ever told to be gone."""
    told, found = after_each(RECORDED[version]["in process"])
    assert found == [[0, 0, 0]] * 4
    assert told.passed_over == ["BlockStored: 257 tokens for 1 blocks of 256"] * 3
    assert told.applier.orphans == 4 * CHUNK // SIZE


@pytest.mark.parametrize("version", RECORDED)
def test_the_simulated_engine_tells_the_same(version):
    _, (removed, _, second), _ = msgspec.msgpack.decode(bytes.fromhex(RECORDED[version]["server"][7]))
    request, chunk, ids = EngineRequest("r", [], 512, 1), CHUNK // SIZE, second["token_ids"]
    keys = list(range(1, 2 * chunk + 1))
    publisher = Publisher("127.0.0.1", 0, 0, load_profile("gpu-8b", cpu_blocks=640, chunk_blocks=chunk, lmcache=True))
    events = [Stored(request, 0, keys, None, "cpu"), Removed(keys, "cpu")]
    *told, gone = publisher._told(events, lambda _: (array("I", [0] * CHUNK + ids), None, None, None))
    publisher.close()
    for ours, real in ((told[1], second), (gone, removed)):
        assert ours.keys() == real.keys()
        names = ("block_hashes", "parent_block_hash")  # keys of their own
        assert [ours[name] for name in ours if name not in names] == [real[name] for name in real if name not in names]
    assert told[0]["parent_block_hash"] is None and told[1]["parent_block_hash"] == told[0]["block_hashes"][0]
