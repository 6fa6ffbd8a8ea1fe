"""The cache map at the size of a large fleet: 50 M blocks over 1,024 replicas, and what its cost depends on.

    [DYNAMO=VENV/bin/python] python -m bench.scale [--blocks N] [--json FILE]

Conversations of 2,048 blocks that share a system prompt of 32; of every eight, one is held by a second replica to its
half, and of every 64, one by eight. They come as events would, 512 blocks a call, made on the fly. Timed is each call
by itself, the longest one most of all: by the wall clock and, since other work may hold that up, by the CPU's. Then a
replica leaves, and its conversations are no longer found. Beside it, with 4 M blocks, a dict of bit masks on the same
events, and Dynamo's index on events of the same shape: VENV has ai-dynamo-runtime, installed with --no-deps.

Calls that others' work holds up look slow by the clock alone: `longest` is CPU time, `longest_wall` the clock's. What
the machine below takes for others counts as CPU time, too: `same` are calls in between that always do the same.
"""

import argparse
import gc
import json
import os
import platform
import resource
import subprocess
import time
from pathlib import Path

import numpy as np

from cachemap import CacheMap

LENGTH = 2048
SHARED = 32
CALL = 512
LOOKUPS = 400
LONGEST = 65_536
LONG_ONES = 8
SAME = np.random.default_rng(3).integers(0, 1 << 64, 1 << 14, np.uint64)  # sorting these takes about as long as a call
CURVE_REPLICAS = (8, 64, 256, 1024)
CURVE_LENGTHS = (64, 256, 512, 2048, 8192, 32_768, 65_536)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--blocks", type=int, default=50_000_000, help="over 1,024 replicas; each other fleet has at most 4 M"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    blocks, curve = options.blocks, min(4_000_000, options.blocks // 4)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}",
        "load_average": os.getloadavg()[0],
        "by_replicas": [at_size(curve, replicas) for replicas in CURVE_REPLICAS],
        "dict": measure_dict(Fleet(curve, 1024)),
        "dynamo": measure_dynamo(curve),
        "whole": at_size(blocks, 1024, by_length=True),
    }
    report(result)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)


class Fleet:
    """Conversations and who holds them."""

    def __init__(self, blocks: int, replicas: int):
        self.replicas = replicas
        self.count = blocks // LENGTH
        self._shared = np.random.default_rng(0).integers(1, 1 << 64, SHARED, np.uint64)

    def hashes(self, number: int, length: int = LENGTH) -> np.ndarray:
        own = np.random.default_rng(number + 1).integers(1, 1 << 64, length, np.uint64)
        own[:SHARED] = self._shared
        return own

    def holders(self, number: int) -> list[tuple[int, int]]:
        """Replicas and how many blocks each has."""
        first = number % self.replicas
        if number % 64 == 1:
            return [(first, LENGTH)] + [
                ((first + 37 * i) % self.replicas, LENGTH // 2) for i in range(1, min(8, self.replicas))
            ]
        if number % 8 == 0:
            return [(first, LENGTH), ((first + 5) % self.replicas, LENGTH // 2)]
        return [(first, LENGTH)]

    def keys(self, replica: int, hashes: np.ndarray) -> list[int]:
        return ((hashes ^ np.uint64(replica)) * np.uint64(3)).tolist()

    def calls(self, number: int):
        """Each call of `store` that tells of a conversation: replica, hashes, keys, hash before them."""
        whole = self.hashes(number)
        for replica, length in self.holders(number):
            # the shared blocks are told once a replica; later they are known
            begin = SHARED if number >= self.replicas else 0
            keys, hashes = self.keys(replica, whole), whole.tolist()
            for start in range(begin, length, CALL):
                end = min(start + CALL, length)
                yield replica, hashes[start:end], keys[start:end], hashes[start - 1] if start else 0


class Clock:
    """Times of calls, by the wall and by the CPU."""

    def __init__(self):
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self, call, *arguments):
        cpu, wall = time.thread_time(), time.perf_counter()
        result = call(*arguments)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)
        return result

    def milliseconds(self, name: str) -> dict:
        return {
            f"{name}_ms_p50": float(np.median(self.cpu)) * 1e3, f"{name}_ms_p99": float(np.percentile(self.cpu, 99)) * 1e3,
            f"{name}_ms_longest": max(self.cpu) * 1e3, f"{name}_ms_longest_wall": max(self.wall) * 1e3,
        }  # fmt: skip

    def microseconds(self, name: str) -> dict:
        (p50, p99), (cpu50, cpu99) = (np.percentile(times, (50, 99)) * 1e6 for times in (self.wall, self.cpu))
        return {f"{name}_us_p50": p50, f"{name}_us_p99": p99, f"{name}_us_cpu_p50": cpu50, f"{name}_us_cpu_p99": cpu99}


def at_size(blocks: int, replicas: int, by_length: bool = False) -> dict:
    fleet, before = Fleet(blocks, replicas), resident()
    table = CacheMap(64 * blocks + (1 << 28))
    for replica in range(replicas):
        table.attach(f"r{replica}", int(1.15 * blocks / replicas), True)
    gc.collect()
    gc.freeze()
    told, same, stored = Clock(), Clock(), 0
    for number in range(fleet.count):
        for replica, hashes, keys, parent in fleet.calls(number):
            told(table.store, replica, hashes, keys, "gpu", [(0, parent)])
            stored += len(hashes)
        same(np.sort, SAME)  # how long the machine makes work take that is always the same
    stats = table.stats()
    assert stats["evicted"] == stats["refused"] == 0
    result = {
        "blocks": stats["blocks"], "replicas": replicas, "held": stored, "bytes_per_block": stats["bytes_per_block"],
        "resident_bytes_per_block": (resident() - before) / stats["blocks"], "stored_per_s": stored / sum(told.cpu),
    } | told.milliseconds("store") | same.milliseconds("same")  # fmt: skip
    for length in (CALL, LENGTH):
        result |= matches(table, fleet, length)
    if by_length:
        result["by_length"] = lengths(table, fleet)
    result |= removals(table, fleet) | leave(table, fleet)
    gc.unfreeze()
    return result


def matches(table: CacheMap, fleet: Fleet, length: int) -> dict:
    picks = np.random.default_rng(7).choice(fleet.count, LOOKUPS)
    samples = [fleet.hashes(pick)[:length].tolist() for pick in picks]
    whole = sum(
        table.match(sample, 0.1).confirmed[pick % fleet.replicas] == length for pick, sample in zip(picks, samples)
    )
    assert whole > 0.9 * LOOKUPS  # two keys of a replica in 35 bits: one block in 200,000 is not told apart
    clock = Clock()
    gc.disable()
    for sample in samples:
        clock(table.match, [*sample], 0.1)
    gc.enable()
    return clock.microseconds(f"match_{length}")


def lengths(table: CacheMap, fleet: Fleet) -> list[dict]:
    """Look-ups of prompts of each length, of which all is held by one replica."""
    prompts = [fleet.hashes(1 << 40 | i, LONGEST) for i in range(LONG_ONES)]
    for i, prompt in enumerate(prompts):
        hashes, keys = prompt.tolist(), fleet.keys(i, prompt)
        for start in range(SHARED, LONGEST, CALL):
            end = min(start + CALL, LONGEST)
            table.store(i, hashes[start:end], keys[start:end], "gpu", [(0, hashes[start - 1])])
    result = []
    for length in CURVE_LENGTHS:
        clock = Clock()
        gc.disable()
        for turn in range(20 * LONG_ONES):
            sample = prompts[turn % LONG_ONES][:length].tolist()
            assert clock(table.match, sample, 0.1).confirmed[turn % LONG_ONES] > 0.1 * length
        gc.enable()
        result.append({"blocks": length} | clock.microseconds("match"))
    return result


def removals(table: CacheMap, fleet: Fleet) -> dict:
    clock, count = Clock(), min(LOOKUPS, fleet.count // 2)
    for number in range(fleet.count - count, fleet.count):  # not of those that `leave` looks at
        replica = fleet.holders(number)[0][0]
        keys = fleet.keys(replica, fleet.hashes(number)[-CALL:])
        assert clock(table.remove, replica, keys, "gpu") > 0.99 * CALL
    return {"removed_per_s": CALL * count / sum(clock.cpu)} | clock.milliseconds("remove")


def leave(table: CacheMap, fleet: Fleet) -> dict:
    """Replicas leave, and others' events go on: their calls do what is left to do."""
    leaving, after, held = Clock(), Clock(), []
    for replica in range(min(8, fleet.replicas - 1)):
        held.append(table.held(replica))
        sample = fleet.hashes(replica)[:CALL].tolist()
        assert table.match(sample, 0.1).confirmed[replica] > 0
        leaving(table.detach, replica)
        assert table.match(sample, 0.1).confirmed[replica] == 0
        while table._gpu.capacity._left:
            after(table.remove, fleet.replicas - 1, [1], "gpu")
    result = {"leaving_held": sum(held) / len(held)} | leaving.milliseconds("leave")
    return result | (
        {"left_ms_each": sum(after.cpu) / len(held) * 1e3} | after.milliseconds("left") if after.cpu else {}
    )


def resident() -> int:
    """Bytes of memory this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


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


def measure_dict(fleet: Fleet) -> dict:
    """The plain way: a dict of hash -> int with a bit a replica. It knows no engine keys, so it cannot understand
    removals."""
    gc.collect()
    before, table, told = resident(), {}, Clock()

    def store(replica: int, hashes: list[int]) -> None:
        bit = 1 << replica
        for block in hashes:
            table[block] = table.get(block, 0) | bit

    stored = 0
    for number in range(fleet.count):
        for replica, hashes, _, _ in fleet.calls(number):
            told(store, replica, hashes)
            stored += len(hashes)
    result = {
        "blocks": len(table),
        "resident_bytes_per_block": (resident() - before) / len(table),
        "stored_per_s": stored / sum(told.cpu),
    }
    result |= told.milliseconds("store")
    for length in (CALL, LENGTH):
        clock, picks = Clock(), np.random.default_rng(7).choice(fleet.count, LOOKUPS)
        for pick in picks:
            clock(by_dict, table, fleet.replicas, fleet.hashes(pick)[:length].tolist())
        result |= clock.microseconds(f"match_{length}")
    return result


def measure_dynamo(blocks: int) -> dict:
    """Dynamo's index, where there is one."""
    python = os.environ.get("DYNAMO")
    if not python:
        return {}
    arguments = [python, "-P", str(Path(__file__).with_name("dynamo_index.py")), str(blocks), "1024"]
    return json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def report(result: dict) -> None:
    columns = [*result["by_replicas"], result["whole"], result["dict"], result["dynamo"]]
    names = [f"{one['replicas']:,}" for one in columns[:-2]] + ["dict", "dynamo"]
    print(f"{'replicas':28}" + "".join(f"{name:>12}" for name in names))
    for name in result["whole"]:
        if name not in ("by_length", "replicas") and "cpu" not in name:
            print(f"{name:28}" + "".join(f"{one[name]:>12,.1f}" if name in one else f"{'':>12}" for one in columns))
    print("\nprompt, blocks" + "".join(f"{one['blocks']:>10,}" for one in result["whole"]["by_length"]))
    for name in ("match_us_p50", "match_us_p99"):
        print(f"{name:14}" + "".join(f"{one[name]:>10,.0f}" for one in result["whole"]["by_length"]))


if __name__ == "__main__":
    main()
