"""What it costs to turn a request body into token ids and block hashes, and where each microsecond goes.

    python -m bench.prompt [--quick] [--model DIR] [--json FILE]

Each case is run on bodies never seen before; what is known of them are the prefixes that earlier
requests left. Columns: `prepare` is the whole of `Pipeline.prepare`, the others its parts, timed
inside the same calls: JSON, the search for known prefixes, tokenizing and hashing what is new.
`plain way` is the engine's on bodies like them: Jinja, fastokens on all of it, hashing all of it.
Figures are medians; a second table gives the lowest decile, which a busy machine disturbs less.
"""
from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import pydoc
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import orjson

from cachemap import hash_blocks
from gateway.prompt import pipeline as pipeline_module, prefixes as prefixes_module
from gateway.prompt.chat import from_chat
from gateway.prompt.pipeline import Pipeline
from replicas.simulated.model import sim_model_dir

CHAT = "/v1/chat/completions"
PARTS = ("json", "tokenize", "hash")
MODULES = ("argparse", "logging", "subprocess", "json", "asyncio", "collections", "typing", "pathlib", "http.client", "socket")


class Clock:
    """Times the parts of prepare() by standing in for what it calls."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        tokenizer = pipeline.tokenizer
        tokenizer.encode_many = self.timed("tokenize", tokenizer.encode_many)  # type: ignore[method-assign]
        prefixes_module.hash_blocks = self.timed("hash", hash_blocks)
        clock = self

        class Json:
            JSONDecodeError = orjson.JSONDecodeError
            loads = staticmethod(clock.timed("json", orjson.loads))

        pipeline_module.orjson = Json  # type: ignore[assignment]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun = time.perf_counter()
            result = function(*args)
            self.spent[name] += time.perf_counter() - begun
            return result
        return call


def prose(seed: int) -> Callable[[int], str]:
    """Pieces of the standard library's own documentation."""
    text = "".join(pydoc.render_doc(name, renderer=pydoc.plaintext) for name in MODULES)
    pick = random.Random(seed)

    def piece(size: int) -> str:
        start = pick.randrange(len(text) - size)
        return text[start:start + size]
    return piece


def body(messages: list[dict[str, Any]]) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 64})


def two(system: str, user: str) -> bytes:
    return body([{"role": "system", "content": system}, {"role": "user", "content": user}])


def growing(piece: Callable[[int], str], turns: int, size: int) -> list[bytes]:
    """One conversation, its body at each turn."""
    talk, bodies = [{"role": "system", "content": piece(size)}], []
    for _ in range(turns):
        talk.append({"role": "user", "content": piece(size)})
        bodies.append(body(talk))
        talk.append({"role": "assistant", "content": piece(size)})
    return bodies


def agents() -> list[bytes] | None:
    """tau-bench airline: tool calls and results, the body of every turn."""
    root = Path(os.environ.get("HITHERTO_DATA") or Path(__file__).parents[2] / "shared" / "data")
    path = root / "tau_bench_airline_gpt4o_conversations.jsonl.gz"
    if not path.is_file():
        return None
    with gzip.open(path) as lines:
        talks = [orjson.loads(line)["messages"] for line in lines]
    return [body(talk[:i]) for talk in talks for i, message in enumerate(talk) if message["role"] == "assistant"]


def cases(count: int) -> Iterator[tuple[str, list[bytes], list[bytes]]]:
    """(name, bodies sent before, bodies timed)."""
    piece = prose(7)
    system = piece(4000)
    yield "8 kB, system prompt known", [two(system, piece(4000)) for _ in range(300)], [two(system, piece(4000)) for _ in range(count)]
    yield "8 kB, nothing known", [], [two(piece(4000), piece(4000)) for _ in range(count)]
    again = two(system, piece(4000))
    yield "8 kB, all known", [again] * 3, [again] * count
    for turns, size in ((8, 2000), (20, 800)):
        talks = [growing(piece, turns, size) for _ in range(count // 8 + 3)]
        yield f"32 kB, turn {turns} of a conversation", [b for talk in talks for b in talk[:-1]], [talk[-1] for talk in talks]
    told = agents()
    if told is None:
        print("(agents: skipped, no tau_bench_airline_gpt4o_conversations.jsonl.gz under HITHERTO_DATA)")
    else:
        yield "agents with tools, in order", told[:200], told[200:200 + 4 * count]


def plain_way(pipeline: Pipeline, raw: bytes) -> float:
    begun = time.perf_counter()
    chat = from_chat(orjson.loads(raw))
    hash_blocks(pipeline.tokenizer.encode(pipeline.renderers["default"].text(chat)), 16, 1)
    return time.perf_counter() - begun


def measure(pipeline: Pipeline, clock: Clock, before: list[bytes], timed: list[bytes]) -> dict[str, dict[str, float]]:
    for raw in before:
        pipeline.prepare(CHAT, raw)
    taken: dict[str, list[float]] = defaultdict(list)
    apart = len(timed) // 5                 # the plain way gets bodies of its own: what one has seen warms the other
    taken["plain way"] = [plain_way(pipeline, raw) for raw in timed[:apart]]
    for raw in timed[apart:]:
        clock.spent.clear()
        begun = time.perf_counter()
        prompt = pipeline.prepare(CHAT, raw)
        taken["prepare"].append(time.perf_counter() - begun)
        assert prompt.mode == "exact", prompt.note
        for part in PARTS:
            taken[part].append(clock.spent[part])
        taken["rest"].append(taken["prepare"][-1] - sum(clock.spent[part] for part in PARTS))
        taken["tokens"].append(prompt.tokens / 1e6)
    return {key: {"p50": 1e6 * median(values), "p10": 1e6 * quantiles(values, n=10)[0]} for key, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer bodies")
    parser.add_argument("--model", type=Path, help="model folder (default: the bundled demo model)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pipeline = Pipeline(options.model or sim_model_dir(), "m", 16)
    clock = Clock(pipeline)
    results = {name: measure(pipeline, clock, before, timed) for name, before, timed in cases(150 if options.quick else 600)}
    columns = ("tokens", "prepare", *PARTS, "rest", "plain way")
    for which in ("p50", "p10"):
        print(f"\nus, {which}".ljust(37) + "".join(column.rjust(11) for column in columns) + "    ratio")
        for name, row in results.items():
            print(name.ljust(36) + "".join(f"{row[column][which]:11.1f}" for column in columns)
                  + f"{row['prepare'][which] / row['plain way'][which]:9.2f}")
    renderer = pipeline.renderers["default"]
    print(f"\nby plan {renderer.by_plan}, by Jinja {renderer.by_jinja}, {pipeline.prefixes.stats()}")
    if options.json:
        options.json.write_text(json.dumps({"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count(),
                                            "python": platform.python_version(), "us": results}, indent=1))


if __name__ == "__main__":
    main()
