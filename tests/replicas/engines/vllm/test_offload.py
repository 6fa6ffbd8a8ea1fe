"""What vLLM's offloading connector publishes, recorded of its own classes by tests/vllm/offload_events.py."""

import pytest

from policies import CostGroup, Demand, Ledger, Router, make

from .recorded import SIZE, Told, hashes_of, recorded

RECORDED = recorded("offload_events.json")
BLOCKS = 4


def told(payloads):
    made = Told(payloads, lambda told, text: told.lower(text, SIZE * BLOCKS))
    assert not made.passed_over
    return made


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize(
    "form", ["self-describing", "self-describing, chunks of 2", "self-describing, chunks of 4", "by key"]
)
def test_copies_are_known_block_by_block(version, form):
    made = told(RECORDED[version][form])
    assert made.found == [[("cpu", BLOCKS)]] * 3
    left = [made.lower(text, SIZE * BLOCKS) for text in range(3)]
    assert left == [[], [("cpu", BLOCKS)], [("cpu", BLOCKS)]], "room for two"
    assert not made.applier.orphans and not made.applier.ignored


@pytest.mark.parametrize("version", RECORDED)
def test_of_chunks_told_by_key_nothing_is_promised(version):
    assert told(RECORDED[version]["by key, chunks of 2"]).found == [[]] * 3


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize(
    "form, chunk", [("self-describing, chunks of 2", 2), ("self-describing, chunks of 4", 4), ("by key", 1)]
)
def test_what_is_promised_is_what_its_lookup_finds(version, form, chunk):
    """Prompts that end anywhere, and of which the GPU holds any part."""
    cache_map = told(RECORDED[version][form]).map
    router = Router(make("least_time"), cache_map, Ledger(), CostGroup())
    targets, many = router.targets([router.add("r", 0)]), 0
    for now, (text, blocks, tokens, local, found) in enumerate(RECORDED[version][f"found, chunks of {chunk}"]):
        hashes = hashes_of(text * 1000 + n + (500 if n >= blocks * SIZE else 0) for n in range(tokens))
        keys = [f"here {n}".encode() for n in range(local // SIZE)]
        cache_map.store(0, hashes[: len(keys)], keys)
        minutes = 60.0 * now  # nothing is expected any more of the one before
        placed = router.place(Demand(tokens, SIZE, 1, hashes=hashes, now=minutes), targets, minutes)
        router.abandon(placed)
        cache_map.remove(0, keys)
        assert placed.predicted == local + found, (text, blocks, tokens, local)
        many += found > 0
    assert many >= 4
