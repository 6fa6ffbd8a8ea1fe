"""Dynamo's own prefix index on the events of `bench.scale`, run by Dynamo's Python: see `bench.scale`.

    DYNAMO/bin/python -P bench/dynamo_index.py BLOCKS REPLICAS     (prints JSON)

`RadixTree` of ai-dynamo-runtime takes events as JSON bytes and handles them in a thread of its own; that thread's CPU
time is what `stored_per_s` is made of, decoding included, as that is how Python reaches it. A lookup waits for its
answer, a dict.
"""

import json
import random
import resource
import statistics
import sys
import time

from dynamo._core import RadixTree

LENGTH, SHARED, CALL, LOOKUPS = 2048, 32, 512, 400


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def hashes(number: int) -> list[int]:
    rng, shared = random.Random(number + 1), random.Random(0)
    return [shared.getrandbits(63) | 1 for _ in range(SHARED)] + [
        rng.getrandbits(63) | 1 for _ in range(LENGTH - SHARED)
    ]


def holders(number: int, replicas: int) -> list[tuple[int, int]]:
    first = number % replicas
    if number % 64 == 1:
        return [(first, LENGTH)] + [((first + 37 * i) % replicas, LENGTH // 2) for i in range(1, min(8, replicas))]
    if number % 8 == 0:
        return [(first, LENGTH), ((first + 5) % replicas, LENGTH // 2)]
    return [(first, LENGTH)]


def main() -> None:
    blocks, replicas = int(sys.argv[1]), int(sys.argv[2])
    count, before = blocks // LENGTH, resident()
    tree, times, stored, known = RadixTree(), [], 0, set()
    others = time.process_time() - time.thread_time()
    for number in range(count):
        whole = hashes(number)
        for replica, length in holders(number, replicas):
            begin = SHARED if replica in known else 0
            known.add(replica)
            for start in range(begin, length, CALL):
                part = whole[start : min(start + CALL, length)]
                event = {
                    "stored": {
                        "parent_hash": whole[start - 1] if start else None,
                        "blocks": [{"block_hash": h, "tokens_hash": h} for h in part],
                    }
                }
                encoded = json.dumps({"event_id": stored, "data": event}).encode()
                begun = time.thread_time()
                tree.apply_event(replica, encoded)
                times.append(time.thread_time() - begun)
                stored += len(part)
    tree.find_matches([1])  # which is answered when all before it is done
    others = time.process_time() - time.thread_time() - others + sum(times)
    held = count * (LENGTH - SHARED) + SHARED
    result = {
        "blocks": held,
        "replicas": replicas,
        "stored_per_s": stored / others,
        "resident_bytes_per_block": (resident() - before) / held,
    }
    picks = random.Random(7)
    for length in (CALL, LENGTH):
        took = []
        for _ in range(LOOKUPS):
            number = picks.randrange(count)
            prompt = hashes(number)[:length]
            begun = time.perf_counter()
            scores = tree.find_matches(prompt).scores
            took.append((time.perf_counter() - begun) * 1e6)
            assert scores[number % replicas, 0] == length
        ordered = sorted(took)
        result |= {
            f"match_{length}_us_p50": statistics.median(took),
            f"match_{length}_us_p99": ordered[int(0.99 * len(ordered))],
        }
    took = []
    for replica in range(8):
        begun = time.perf_counter()
        tree.remove_worker(replica)
        tree.find_matches([1])
        took.append((time.perf_counter() - begun) * 1e3)
    print(json.dumps(result | {"leave_ms_p50": statistics.median(took), "leave_ms_longest": max(took)}))


if __name__ == "__main__":
    main()
