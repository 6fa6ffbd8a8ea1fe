"""What vLLM's offloading connector publishes, recorded of its own classes by tests/vllm/offload_events.py."""

import json
from array import array
from pathlib import Path

import pytest

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.events import records
from cachemap.events.apply import EventApplier
from policies import CostGroup, Demand, Ledger, Router, make
from replicas.engines.vllm.events import Decoder

RECORDED = json.loads((Path(__file__).parent / "offload_events.json").read_text())
SIZE, BLOCKS = 16, 4


def told(payloads):
    """A map after these, the applier, and after each prompt what is held of it in slower tiers."""
    cache_map, decode = CacheMap(1 << 20), Decoder(records).decode
    slot, found = cache_map.attach("r", None, True), []
    applier = EventApplier(cache_map, slot, "m", SIZE)
    for number, payload in enumerate(payloads):
        batch = decode(bytes.fromhex(payload))
        assert not batch.passed_over
        applier.apply(batch.events)
        applier.flush()
        if number % 3 == 2:  # it came, it was copied, it went
            found.append(held(cache_map, number // 3))
    return cache_map, applier, found


def held(cache_map, text):
    ids = array("I", [text * 1000 + n for n in range(SIZE * BLOCKS)])
    match = cache_map.match(hash_blocks(ids.tobytes(), SIZE, chain_seed("m", SIZE)), 0.0)
    assert match.held == [0], "no longer on the GPU"
    return match.lower.get(0, [])


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize(
    "form", ["self-describing", "self-describing, chunks of 2", "self-describing, chunks of 4", "by key"]
)
def test_copies_are_known_block_by_block(version, form):
    cache_map, applier, found = told(RECORDED[version][form])
    assert found == [[("cpu", BLOCKS)]] * 3
    assert [held(cache_map, text) for text in range(3)] == [[], [("cpu", BLOCKS)], [("cpu", BLOCKS)]], "room for two"
    assert applier.fault is None and not applier.orphans and not applier.ignored


@pytest.mark.parametrize("version", RECORDED)
def test_of_chunks_told_by_key_nothing_is_promised(version):
    _, applier, found = told(RECORDED[version]["by key, chunks of 2"])
    assert found == [[]] * 3 and applier.fault is None


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize(
    "form, chunk", [("self-describing, chunks of 2", 2), ("self-describing, chunks of 4", 4), ("by key", 1)]
)
def test_what_is_promised_is_what_its_lookup_finds(version, form, chunk):
    """Prompts that end anywhere, and of which the GPU holds any part."""
    cache_map, _, _ = told(RECORDED[version][form])
    router = Router(make("least_time"), cache_map, Ledger(), CostGroup())
    targets, many = router.targets([router.add("r", 0)]), 0
    for now, (text, blocks, tokens, local, found) in enumerate(RECORDED[version][f"found, chunks of {chunk}"]):
        ids = array("I", [text * 1000 + n + (500 if n >= blocks * SIZE else 0) for n in range(tokens)])
        hashes = hash_blocks(ids.tobytes(), SIZE, chain_seed("m", SIZE))
        keys = [f"here {n}".encode() for n in range(local // SIZE)]
        cache_map.store(0, hashes[: len(keys)], keys)
        minutes = 60.0 * now  # nothing is expected any more of the one before
        placed = router.place(Demand(tokens, SIZE, 1, hashes=hashes, now=minutes), targets, minutes)
        router.abandon(placed)
        cache_map.remove(0, keys)
        assert placed.predicted == local + found, (text, blocks, tokens, local)
        many += found > 0
    assert many >= 4
