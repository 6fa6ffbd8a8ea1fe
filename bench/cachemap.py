"""The cache map against a dict of hash -> bitmask: bytes a block, blocks in, look-ups.

    python -m bench.cachemap [--quick] [--json FILE]

The map is filled as 64 replicas would fill it: conversations of 2,048 blocks that share a
system prompt of 32, stored 512 blocks a call with the engine's own keys, which the map must
keep to understand removals and the dict does not. Look-ups are of whole conversations (or
their first 512 blocks) picked at random, so they find cold memory.
"""

import argparse
import gc
import json
import os
import platform
import resource
import time
from array import array

import msgspec
import numpy as np

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.apply import EventApplier
from cachemap.events import decode

REPLICAS = 64
CHAIN = 2048
SHARED = 32
CALL = 512
LOOKUPS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 M blocks instead of 10 M")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    result = run(2_000_000 if options.quick else 10_000_000)
    report(result)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)


def run(blocks: int) -> dict:
    conversations = Conversations(blocks // CHAIN)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"
    result = {"blocks": blocks, "replicas": REPLICAS, "machine": machine}
    result["load_average"] = os.getloadavg()[0]  # other work on the machine when it began
    result |= measure_map(conversations, blocks)
    result |= measure_small_map() | measure_events()
    result |= {f"dict_{name}": value for name, value in measure_dict(conversations).items()}
    return result


class Conversations:
    """Hashes of `count` conversations, made when asked for: memory is what is measured."""

    def __init__(self, count: int):
        self.count = count
        self._shared = np.random.default_rng(0).integers(1, 1 << 64, SHARED, np.uint64)

    def hashes(self, number: int) -> np.ndarray:
        own = np.random.default_rng(number + 1).integers(1, 1 << 64, CHAIN, np.uint64)
        own[:SHARED] = self._shared
        return own

    def replica(self, number: int) -> int:
        return number % REPLICAS

    def samples(self, length: int) -> list[np.ndarray]:
        picks = np.random.default_rng(7).choice(self.count, LOOKUPS)
        return [self.hashes(pick)[:length] for pick in picks]


def measure_map(conversations: Conversations, blocks: int) -> dict:
    before = resident()
    table = CacheMap(64 * blocks)
    for replica in range(REPLICAS):
        table.attach(f"r{replica}", -(-conversations.count // REPLICAS) * CHAIN, True)
    spent, slowest = 0.0, 0.0
    for number in range(conversations.count):
        hashes = conversations.hashes(number)
        keys = ((hashes ^ np.uint64(number % REPLICAS)) * np.uint64(3)).tolist()
        hashes = hashes.tolist()
        for start in range(0, CHAIN, CALL):
            part = hashes[start : start + CALL]
            heads = [(0, hashes[start - 1] if start else 0)]
            begun = time.perf_counter()
            table.store(conversations.replica(number), part, keys[start : start + CALL], "gpu", heads)
            took = time.perf_counter() - begun
            spent += took
            slowest = max(slowest, took)
    stats = table.stats()
    assert stats["evicted"] == stats["refused"] == 0
    result = {
        "blocks_stored": stats["blocks"],
        "blocks_per_s": conversations.count * CHAIN / spent,
        "slowest_store_ms": slowest * 1e3,
        "bytes_per_block": stats["bytes_per_block"],
        "resident_bytes_per_block": (resident() - before) / stats["blocks"],
    }
    for length in (CALL, CHAIN):
        for hashes in conversations.samples(length)[:3]:
            assert max(table.match(hashes.tolist(), 0.0).confirmed) == length
        result |= latency(f"match_{length}_us", table.match, conversations.samples(length))
    removals = []
    for number in range(0, conversations.count, max(1, conversations.count // LOOKUPS)):
        hashes = conversations.hashes(number)[CALL:]
        keys = ((hashes ^ np.uint64(number % REPLICAS)) * np.uint64(3)).tolist()
        begun = time.perf_counter()
        known = table.remove(conversations.replica(number), keys[:CALL], "gpu")
        removals.append((time.perf_counter() - begun) / CALL)
        assert known == CALL
    return result | {"removed_per_s": 1 / float(np.median(removals))}


def measure_small_map() -> dict:
    """What a request pays on an everyday map: 8 replicas, 110 blocks, some only predicted."""
    table = CacheMap(1 << 26)
    chains = np.random.default_rng(1).integers(1, 1 << 64, (160, 160), np.uint64)
    chains[:, :16] = chains[0, :16]
    for slot in range(8):
        table.attach(f"r{slot}", 8192, True)
    for number, chain in enumerate(chains):
        table.store(number % 8, chain[:100].tolist(), (chain[:100] + np.uint64(5)).tolist(), "gpu")
        if number % 2:
            table.expect(number % 8, chain[:108].tolist(), 0.0)
    return latency("match_110_us", table.match, [chain[:110] for chain in chains] * 5)


def measure_events(batches: int = 2000) -> dict:
    """Payloads as the engine sends them, 4 events of 16 blocks of 16 tokens each: decoding,
    hashing and storing together."""
    rng = np.random.default_rng(2)
    payloads, key = [], 0
    for number in range(batches):
        events = []
        for _ in range(4):
            keys = rng.integers(0, 1 << 63, 16).tolist()
            events.append({
                "type": "BlockStored", "block_hashes": keys, "parent_block_hash": None,
                "token_ids": rng.integers(0, 150_000, 256).tolist(), "block_size": 16,
                "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None] * 16,
                "group_idx": 0, "kv_cache_spec_kind": "full_attention",
            })  # fmt: skip
        payloads.append(msgspec.msgpack.encode([float(number), events, 0]))
    table = CacheMap(1 << 28)
    applier = EventApplier(table, table.attach("r", batches * 64, True), "m", 16)
    begun = time.perf_counter()
    for start in range(0, batches, 32):
        turn = [decode(payload) for payload in payloads[start : start + 32]]
        applier.apply([event for batch in turn for event in batch.events])
        applier.flush()
    spent = time.perf_counter() - begun
    assert applier.stored == table.stats()["blocks"] == batches * 64
    tokens = array("I", range(16 * 1024)).tobytes()
    seed = chain_seed("m", 16)
    begun = time.perf_counter()
    for _ in range(20):
        hash_blocks(tokens, 16, seed)
    hashing = (time.perf_counter() - begun) / 20 / 1024
    return {"events_blocks_per_s": applier.stored / spent, "hash_block_ns": hashing * 1e9}


def by_dict(table: dict[int, int], replicas: int, hashes: list[int]) -> list[int]:
    """The plain way: `table` has a bit a replica for each block. How many leading blocks each of them holds."""
    lengths, alive = [0] * replicas, (1 << replicas) - 1
    for i, block in enumerate(hashes):
        lost = alive & ~table.get(block, 0)
        if lost:
            alive ^= lost
            while lost:
                low = lost & -lost
                lengths[low.bit_length() - 1] = i
                lost ^= low
            if not alive:
                return lengths
    for slot in range(replicas):
        if alive >> slot & 1:
            lengths[slot] = len(hashes)
    return lengths


def measure_dict(conversations: Conversations) -> dict:
    """The plain way: a dict of hash -> int with a bit a replica. It knows no engine keys."""
    gc.collect()
    before = resident()
    table: dict[int, int] = {}
    spent = 0.0
    for number in range(conversations.count):
        hashes = conversations.hashes(number).tolist()
        bit = 1 << conversations.replica(number)
        begun = time.perf_counter()
        for block in hashes:
            table[block] = table.get(block, 0) | bit
        spent += time.perf_counter() - begun

    result = {
        "blocks_per_s": conversations.count * CHAIN / spent,
        "resident_bytes_per_block": (resident() - before) / len(table),
    }
    for length in (CALL, CHAIN):
        result |= latency(f"match_{length}_us", lambda hashes, now: by_dict(table, REPLICAS, hashes), conversations.samples(length))
    return result


def latency(name: str, match, samples: list[np.ndarray]) -> dict:
    """Median and 99th percentile of `match` over the samples, in microseconds. Hashes are
    made ints just before, as they come fresh from hashing a prompt."""
    gc.collect()
    gc.disable()
    times = []
    for sample in samples:
        hashes = sample.tolist()
        begun = time.perf_counter()
        match(hashes, 0.1)
        times.append(time.perf_counter() - begun)
    gc.enable()
    p50, p99 = np.percentile(times, (50, 99)) * 1e6
    return {f"{name}_p50": p50, f"{name}_p99": p99}


def resident() -> int:
    """Bytes of memory this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def report(result: dict) -> None:
    print(f"{result['blocks']:,} blocks, {REPLICAS} replicas, {os.cpu_count()} cores, "
          f"load {result['load_average']:.1f}\n")  # fmt: skip
    print(f"{'':28}{'map':>12}{'dict':>12}{'map / dict':>12}")
    for name in (
        "blocks_per_s", "resident_bytes_per_block", "match_512_us_p50", "match_512_us_p99",
        "match_2048_us_p50", "match_2048_us_p99",
    ):  # fmt: skip
        ours, plain = result[name], result[f"dict_{name}"]
        print(f"{name:28}{ours:>12,.1f}{plain:>12,.1f}{ours / plain:>12.2f}")
    for name in (
        "bytes_per_block", "slowest_store_ms", "removed_per_s", "match_110_us_p50",
        "match_110_us_p99", "events_blocks_per_s", "hash_block_ns",
    ):  # fmt: skip
        print(f"{name:28}{result[name]:>12,.1f}")


if __name__ == "__main__":
    main()
