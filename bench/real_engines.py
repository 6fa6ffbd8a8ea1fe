"""Head to head on real engines: two vLLM replicas on the CPU, every gateway in front of them in turn.

    HITHERTO_VLLM=~/.cache/hitherto/vllm-0.28.0 python -m bench.real_engines [--quick] [--gateways A,B] [--json FILE]

Work: tau-bench airline conversations (tools, one long system prompt), open loop: conversations begin as a Poisson
process and go on after a think time; the replies in them are the file's, so all gateways get the same prompts. Engines:
real scheduler, real prefix cache, a random model of 2 layers; both caches together hold CACHES x the work's distinct
blocks, so a gateway that spreads a conversation runs out of room. RATE keeps the engines about 65 % busy when prefixes
are found. Caches are emptied before each run and every gateway is started afresh, knowing nothing.

  hit     cached / looked-up prompt tokens, by the engines' own counters; "ideal": one infinite cache, same order
  TTFT    ms at the client
  share   requests answered by the first engine, by the engines' own counters
  busy    CPU seconds of the engines' processes a second and engine, while load was full: the later half of the arrivals

Runs of a FILE that is there are kept and added to, so that a long measurement can be made in parts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from bench.contenders import Contender, choose, say_hello
from bench.conversations import DATA, TAU, missing
from bench.head_to_head import head_to_head
from gateway.prompt.pipeline import Pipeline
from loadgen.demo.tiny_model import tiny_model
from loadgen.drive.client import Client
from loadgen.drive.records import Record
from loadgen.drive.run import CHAT, Asking
from loadgen.report.summary import machine
from loadgen.workload.arrivals import conversation_starts
from loadgen.workload.conversations import Conversation
from loadgen.workload.traces import conversation_file
from tests.vllm.engines import Engine

REPLICAS, BLOCK, CACHES = 2, 16, 1.0
REQUESTS, RATE, THINK, OUTPUT = 570, 13.0, 1.0, 16
# ChatML that shows tool calls. With a vocabulary of 4,096 a decode step is 2 ms and not 6, so that prefill is the work
# to save.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(slots=True)
class Work:
    """One seed's conversations, when they begin, and each prompt's length and blocks."""

    seed: int
    conversations: list[Conversation]
    starts: list[float]
    prompts: dict[tuple[str, int], tuple[int, list[int]]]

    @property
    def blocks(self) -> int:
        return len({block for _, hashes in self.prompts.values() for block in hashes})

    def ideal(self, records: Sequence[Record]) -> float:
        """The hit rate of one infinite cache that sees these requests as they were sent."""
        seen: set[int] = set()
        hit = total = 0
        for record in sorted(records, key=lambda one: one.sent):
            tokens, hashes = self.prompts[record.conversation, record.turn]
            held = next((n for n, block in enumerate(hashes) if block not in seen), len(hashes))
            hit += min(held, (tokens - 1) // BLOCK) * BLOCK
            total += tokens
            seen.update(hashes)
        return hit / total


def make_work(seed: int, requests: int, asking: Asking, model: Path) -> Work:
    rng = random.Random(seed)
    conversations = conversation_file(DATA / TAU, requests, OUTPUT, THINK, rng)
    starts = conversation_starts([len(item.turns) for item in conversations], RATE, rng)
    return Work(seed, conversations, starts, prompts_of(conversations, asking, Pipeline(model, "tiny", BLOCK)))


def prompts_of(
    conversations: Sequence[Conversation], asking: Asking, pipeline: Pipeline
) -> dict[tuple[str, int], tuple[int, list[int]]]:
    """Tokens and block hashes of every turn's prompt."""
    prompts = {}
    for item in conversations:
        messages = []
        for number, turn in enumerate(item.turns):
            messages += turn.messages
            prompt = pipeline.prepare(CHAT, asking.body(messages, turn, item.extra))
            prompts[item.id, number] = prompt.tokens, list(prompt.hashes)
            messages.append(turn.reply)
    return prompts


async def empty(engines: Sequence[Engine]) -> None:
    """Forget all prefixes. vLLM says so to who listens with its next step only: hence a request."""
    for engine in engines:
        client = Client(engine.url, timeout=10)
        record = Record("", 0, 0.0)
        await client.ask("/reset_prefix_cache", b"{}", record)
        hello = await say_hello(client, engine.name)
        client.close()
        if record.status != 200 or hello != 200:
            raise RuntimeError(f"the engine's cache was not emptied ({record.status}, {hello})")


async def play(contender: Contender, engines: Sequence[Engine], work: Work, asking: Asking, log: Path) -> dict:
    """One run: fresh gateway, empty caches, the whole load."""
    await empty(engines)
    run, told = await head_to_head(contender, engines, work.conversations, work.starts, asking, log)
    return {**told, "seed": work.seed, "ideal_hit_rate": round(work.ideal(run.done), 4)}


HEAD = (
    f"{'gateway':45} {'hit %':>12} {'TTFT mean ms':>13} {'p50':>9} {'p99':>11} {'share':>11} {'busy':>9} {'failed':>6}"
)


def line(runs: Sequence[dict]) -> str:
    """One gateway's runs, in the order of their seeds, side by side."""
    each = lambda form, read: " / ".join(form.format(read(run)) for run in runs)  # noqa: E731
    latency = lambda name: each("{:.0f}", lambda run: run["ttft_ms"][name] or math.nan)  # noqa: E731
    share = each("{:.0f}", lambda run: 100 * run["shares"][0])
    busy = each("{:.0f}", lambda run: 100 * mean(run["busy"]))
    hits = each("{:.1f}", lambda run: 100 * run["hit_rate"])
    return (
        f"{runs[0]['gateway']:45} {hits:>12} {latency('mean'):>13} {latency('p50'):>9} {latency('p99'):>11} {share:>11} "
        f"{busy:>9} {sum(run['failed'] for run in runs):6d}"
    )


def table(runs: Sequence[dict]) -> str:
    rows = {}
    for run in sorted(runs, key=lambda one: one["seed"]):
        rows.setdefault(run["gateway"], []).append(run)
    ideals = {run["seed"]: 100 * run["ideal_hit_rate"] for run in runs}
    ordered = sorted(rows.values(), key=lambda row: mean(run["ttft_ms"]["mean"] or math.inf for run in row))
    ideal = " / ".join(f"{ideals[seed]:.1f}" for seed in sorted(ideals))
    return "\n".join([HEAD, *map(line, ordered), f"{'an infinite cache':45} {ideal:>12}"])


async def measure(args: argparse.Namespace, chosen: Sequence[Contender], keep: list[dict]) -> list[dict]:
    asking = Asking("tiny", ignore_eos=True)
    with tempfile.TemporaryDirectory(prefix="real-engines-") as folder:
        logs = Path(folder)
        model = tiny_model(logs / "model")
        (model / "chat_template.jinja").write_text(TEMPLATE)
        works = [make_work(seed, args.requests, asking, model) for seed in args.seeds]
        blocks = math.ceil(CACHES * max(work.blocks for work in works) / REPLICAS)
        engines = [Engine(model, log=logs / f"engine{n}.log", blocks=blocks) for n in range(REPLICAS)]
        try:
            for engine in engines:
                engine.wait()
            print(
                f"{args.requests} requests, {RATE:g}/s, {THINK:g} s think time, {OUTPUT} tokens out; "
                f"{REPLICAS} engines of {blocks} blocks\n{HEAD}",
                flush=True,
            )
            for number, work in enumerate(works):
                at = number * len(chosen) // len(works)  # no gateway is always first
                for contender in [*chosen[at:], *chosen[:at]]:
                    run = await play(contender, engines, work, asking, logs / "gateway.log")
                    keep = [one for one in keep if (one["gateway"], one["seed"]) != (run["gateway"], run["seed"])] + [
                        run
                    ]
                    print(line([run]), *run["errors"].values(), sep="\n  ", flush=True)
        finally:
            for engine in engines:
                engine.stop()
    return keep


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="160 requests of one seed")
    parser.add_argument("--gateways", metavar="A,B", help="those whose names contain one of these; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.requests = args.seeds[:1], 160
    why = missing() or (
        ""
        if os.environ.get("HITHERTO_VLLM")
        else "skipped: set HITHERTO_VLLM to an environment with vLLM, e.g. what tests/vllm/install.sh 0.28.0 prints"
    )
    if why:
        print(why)
        return 3
    keep = json.loads(args.json.read_text())["runs"] if args.json and args.json.exists() else []
    runs = asyncio.run(measure(args, choose(args.gateways), keep))
    print(f"\n{table(runs)}")
    if args.json:
        settings = {
            "requests": args.requests,
            "rate": RATE,
            "think_s": THINK,
            "output_tokens": OUTPUT,
            "caches": CACHES,
        }
        args.json.write_text(json.dumps({"setting": settings, "machine": machine(), "runs": runs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
