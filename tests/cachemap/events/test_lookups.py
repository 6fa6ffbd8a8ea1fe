"""What vLLM's own cache managers found of prompts, and what the map predicts of them by the events that they published.

Recorded by `python -m tests.vllm.lookups` of 0.28, 0.32 and 0.33: full attention with decode context parallelism,
sliding windows and Mamba layers, each with and without a speculator that reads hidden states (EAGLE, MTP).
"""

import gzip
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.events import records
from cachemap.events.apply import EventApplier
from cachemap.events.records import Blocks
from cachemap.hashing import named_ahead
from replicas.engines.vllm.events import Decoder
from replicas.engines.vllm.versions import finds_all

from ...vllm.managers import asks, texts

LEARNED = 40  # batches, the first ones, by which it is known what blocks are
RECORDED = Path(__file__).with_name("lookups.gz")
Answer = tuple[int, bytes]  # tokens that were found, and the events' payload


def recorded() -> dict[str, tuple[dict, list[Answer]]]:
    told = msgspec.msgpack.decode(gzip.decompress(RECORDED.read_bytes()))
    return {_name(job): (job, answers) for job, answers in told}


def _name(job: dict) -> str:
    return "-".join(
        [job["vllm"], job["kind"], f"dcp{job['dcp']}", *([f"drops-ahead{job['ahead']}"] if job["drops"] else [])]
    )


def followed(job: dict, answers: list[Answer]) -> Iterator[tuple[int, int]]:
    """For each prompt the tokens that the map predicts, and those that the manager found. The map learns what blocks
    are from the events alone; that a speculator is there, from elsewhere."""
    decode = Decoder(records).decode
    size, looks_ahead, told = job["size"], 0, Blocks(job["size"])
    while True:  # until prompts are hashed as the engine's blocks are
        cache_map = CacheMap(1 << 22)
        slot = cache_map.attach("r", None, True)
        applier = EventApplier(cache_map, slot, "m", size, looks_ahead, told)
        for _, payload in answers[:LEARNED]:
            applier.apply(decode(payload).events)
        told = applier.stored_as
        before, size = (size, looks_ahead), told.parts if told.parts and finds_all(job["vllm"]) else told.size
        looks_ahead = told.ahead
        if before == (size, looks_ahead):
            break
    cache_map.clear(slot)
    cache_map.drop(slot, job["drops"] and not looks_ahead, finds_all(job["vllm"]))
    applier = EventApplier(cache_map, slot, "m", size, looks_ahead, told)
    written = texts(job["seed"], job["longest"] + 60)
    for (text, prompt, _), (found, payload) in zip(
        asks(job["seed"], job["requests"], job["longest"]), answers, strict=True
    ):
        ids, most = array("I", written[text][:prompt]).tobytes(), (prompt - 1) // size
        hashes = hash_blocks(ids, size, chain_seed("m", size))
        named = named_ahead(hashes, ids, size, looks_ahead) if looks_ahead else hashes
        yield min(cache_map.match(named, 0.0, most).held[slot], most) * size, found
        batch = decode(payload)
        assert not batch.passed_over
        applier.apply(batch.events)
        applier.flush()
        assert not applier.fault and not applier.orphans
    assert applier.blocks_removed > 30, "hardly anything was evicted"


def test_the_recording_is_of_each_version():
    assert {job["vllm"].rpartition(".")[0] for job, _ in recorded().values()} == {"0.28", "0.32", "0.33"}


def test_versions_between_those_that_were_recorded_look_as_their_sources_do():
    """0.29 to 0.31 still bound the lookup with the length that 0.28 bounds it with."""
    looks = {version: finds_all(version) for version in ("0.28.1", "0.29.0", "0.30.2", "0.31.0", "0.32.0", None)}
    assert [version for version, found in looks.items() if found] == ["0.32.0", None]


@pytest.mark.parametrize("name", recorded())
def test_what_the_map_predicts_is_what_the_engines_own_manager_finds(name):
    job, answers = recorded()[name]
    compared = list(followed(job, answers))
    wrong = [pair for pair in compared if pair[0] != pair[1]]
    assert not wrong, f"{len(wrong)} of {len(compared)}: {wrong[:5]}"
    assert sum(found > 0 for _, found in compared) > len(compared) / 5
