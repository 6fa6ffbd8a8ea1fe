"""Head to head on real engines: two vLLM replicas on the CPU, every gateway in front of them in turn.

    HITHERTO_VLLM=~/.cache/hitherto/vllm-0.28.0 python -m bench.real_engines [--quick] [--gateways A,B] [--json FILE]

Work: tau-bench airline conversations (tools, one long system prompt), open loop: conversations begin as a Poisson
process and go on after a think time; the replies in them are the file's, so all gateways get the same prompts. Engines:
real scheduler, real prefix cache, a random model of 2 layers; both caches together hold CACHES x the work's distinct
blocks, so a gateway that spreads a conversation runs out of room. Caches are emptied before each run and every gateway
is started afresh, knowing nothing.

A cell is a number of output tokens and a share of saturation: of the requests a second that the engines answer behind
`least_time` when all conversations begin at once and nobody pauses, measured first for each number of tokens.

  hit     cached / looked-up prompt tokens, by the engines' own counters; "ideal": one infinite cache, same order
  TTFT    ms at the client; so are TPOT, the time per output token after the first, and E2E, that of the whole answer
  share   requests answered by the first engine, by the engines' own counters
  busy    CPU seconds of the engines' processes a second and engine, while load was full: the later half of the arrivals

With --gpu: GPU_REPLICAS engines share the machine's one GPU and have a model of 8B parameters with random weights, from
an environment whose `bin/vllm` is the CUDA build; they are started once, for all cells, and the last cells are left out
when --minutes are over.

Runs of a FILE that is there are kept and added to, so that a long measurement can be made in parts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import mean

from bench.contenders import Contender, choose, ours, say_hello
from bench.conversations import DATA, TAU, missing
from bench.head_to_head import head_to_head
from gateway.prompt.pipeline import Pipeline
from loadgen.demo.tiny_model import tiny_model
from loadgen.drive.client import Client
from loadgen.drive.records import Record
from loadgen.drive.run import CHAT, Asking
from loadgen.drive.stack import free_ports
from loadgen.report.summary import machine
from loadgen.workload.arrivals import conversation_starts
from loadgen.workload.conversations import Conversation
from loadgen.workload.traces import conversation_file
from tests.vllm.engines import Engine

REPLICAS, BLOCK, CACHES = 2, 16, 1.0
SECONDS, THINK = 30.0, 1.0  # of arrivals, and between an answer and the next turn
OUTPUTS, LOADS = (16, 256), (0.4, 0.7)
FLOOD = 600  # requests that saturation is measured with, without a pause between turns
# Qwen3-8B's shape but for its vocabulary, and what a token's keys and values take in bytes.
GPU_REPLICAS, GPU_FLOOD, GPU_THINK = 4, 260, 0.3  # fewer requests and shorter pauses: a GPU costs more by the hour
GPU_FLAGS = os.environ.get("HITHERTO_VLLM_FLAGS", "").split()  # for vLLM's builds that lack a part
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
QWEN3_8B_KV_BYTES = 36 * 2 * 8 * 128 * 2
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


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes the work of a cell out of the file of conversations."""

    asking: Asking
    pipeline: Pipeline

    def make(self, seed: int, output: int, rate: float, requests: int, think: float = THINK) -> Work:
        rng = random.Random(seed)
        conversations = conversation_file(DATA / TAU, requests, output, think, rng)
        starts = conversation_starts([len(item.turns) for item in conversations], rate, rng)
        return Work(seed, conversations, starts, prompts_of(conversations, self.asking, self.pipeline))


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
    return {
        **told,
        "seed": work.seed,
        "ideal_hit_rate": round(work.ideal(run.done), 4),
        "answers_a_second": answers_a_second(run.done),
    }


def answers_a_second(records: Sequence[Record]) -> float:
    """Between the tenth and the sixth in ten of the answers: neither the start nor the last conversations, alone."""
    ends = sorted(record.sent + record.e2e for record in records)
    first, last = len(ends) // 10, len(ends) * 6 // 10
    return round((last - first) / (ends[last] - ends[first]), 3)


HEAD = (
    f"{'gateway':45} {'hit %':>18} {'TTFT mean ms':>14} {'p99':>15} {'TPOT mean':>14} {'E2E mean':>17} {'p99':>17} "
    f"{'share':>11} {'busy':>11} {'failed':>6}"
)


def line(runs: Sequence[dict]) -> str:
    """One gateway's runs, in the order of their seeds, side by side."""
    each = lambda form, read: " / ".join(form.format(read(run)) for run in runs)  # noqa: E731
    ms = lambda form, kind, name: each(form, lambda run: run[kind][name] or math.nan)  # noqa: E731
    share = each("{:.0f}", lambda run: 100 * run["shares"][0])
    busy = each("{:.0f}", lambda run: 100 * mean(run["busy"]))
    hits = each("{:.1f}", lambda run: 100 * run["hit_rate"])
    return (
        f"{runs[0]['gateway']:45} {hits:>18} {ms('{:.0f}', 'ttft_ms', 'mean'):>14} {ms('{:.0f}', 'ttft_ms', 'p99'):>15} "
        f"{ms('{:.1f}', 'tpot_ms', 'mean'):>14} {ms('{:.0f}', 'e2el_ms', 'mean'):>17} {ms('{:.0f}', 'e2el_ms', 'p99'):>17} "
        f"{share:>11} {busy:>11} {sum(run['failed'] for run in runs):6d}"
    )


def cell_name(output: int, load: float) -> str:
    return f"{output} tokens out, {load:.0%} of saturation"


def tables(runs: Sequence[dict]) -> str:
    """A table for each cell; in it the gateways by their mean E2E over the seeds."""
    cells: dict[tuple[int, float], dict[str, list[dict]]] = {}
    for run in sorted(runs, key=lambda one: (one["output"], one["load"], one["seed"])):
        cells.setdefault((run["output"], run["load"]), {}).setdefault(run["gateway"], []).append(run)
    parts = []
    for cell, rows in cells.items():
        ideals = {run["seed"]: 100 * run["ideal_hit_rate"] for row in rows.values() for run in row}
        ordered = sorted(rows.values(), key=lambda row: mean(run["e2el_ms"]["mean"] or math.inf for run in row))
        ideal = " / ".join(f"{ideals[seed]:.1f}" for seed in sorted(ideals))
        parts += [cell_name(*cell), HEAD, *map(line, ordered), f"{'an infinite cache':45} {ideal:>18}", ""]
    return "\n".join(parts)


class GpuEngine(Engine):
    """One `vllm serve` of an 8B model on a GPU that it shares with others."""

    def __init__(self, model: Path, *, log: Path, blocks: int):
        self.model, self.name, self.log, self.blocks, self.block_size = model, "tiny", log, blocks, BLOCK
        self.port, *publishing = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in publishing)
        self.replica_url = f"{self.url}#events={self.events},replay={self.replay}"
        events = {"enable_kv_cache_events": True, "publisher": "zmq",
                  **dict(zip(("endpoint", "replay_endpoint"), (f"tcp://*:{port}" for port in publishing)))}  # fmt: skip
        self.command = [
            f"{os.environ['HITHERTO_VLLM']}/bin/vllm", "serve", str(model), "--served-model-name", self.name,
            "--host", "127.0.0.1", "--port", str(self.port), "--load-format", "dummy", "--dtype", "bfloat16",
            "--block-size", str(BLOCK), "--max-model-len", str(min(32768, (blocks - 1) * BLOCK)),
            "--kv-cache-memory-bytes", str(blocks * BLOCK * QWEN3_8B_KV_BYTES), "--num-gpu-blocks-override", str(blocks),
            "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events), *GPU_FLAGS,
        ]  # fmt: skip
        self.env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
        self.process = None
        self.start()


@asynccontextmanager
async def fleet(model: Path, works: Sequence[Work], logs: Path, gpu: bool = False) -> AsyncIterator[list[Engine]]:
    """Fresh engines whose caches together hold CACHES x the largest work's distinct blocks."""
    count, kind = (GPU_REPLICAS, GpuEngine) if gpu else (REPLICAS, Engine)
    blocks = math.ceil(CACHES * max(work.blocks for work in works) / count)
    engines = [kind(model, log=logs / f"engine{n}.log", blocks=blocks) for n in range(count)]
    try:
        for engine in engines:
            await asyncio.to_thread(engine.wait)
        yield engines
    finally:
        for engine in engines:
            engine.stop()


async def saturation(maker: Maker, output: int, model: Path, logs: Path) -> float:
    """Requests a second that the engines answer when all conversations begin at once and nobody pauses."""
    work = maker.make(0, output, math.inf, FLOOD, think=0.0)
    async with fleet(model, [work], logs) as engines:
        return (await play(ours("least_time"), engines, work, maker.asking, logs / "gateway.log"))["answers_a_second"]


async def measure(args: argparse.Namespace, chosen: Sequence[Contender], kept: dict) -> None:
    """Adds the runs asked for to those kept, in place of earlier ones of the same cell, seed and gateway."""
    with tempfile.TemporaryDirectory(prefix="real-engines-") as folder:
        logs = Path(folder)
        model = tiny_model(logs / "model")
        (model / "chat_template.jinja").write_text(TEMPLATE)
        maker = Maker(Asking("tiny", ignore_eos=True), Pipeline(model, "tiny", BLOCK))
        for output in args.outputs:
            if str(output) not in kept["saturation"]:
                kept["saturation"][str(output)] = await saturation(maker, output, model, logs)
            for load in args.loads:
                rate = load * kept["saturation"][str(output)]
                works = [maker.make(seed, output, rate, round(rate * args.seconds)) for seed in args.seeds]
                print(
                    f"{cell_name(output, load)}: {round(rate * args.seconds)} requests, {rate:.1f}/s\n{HEAD}",
                    flush=True,
                )
                async with fleet(model, works, logs) as engines:
                    await play_cell(
                        chosen,
                        engines,
                        works,
                        maker.asking,
                        logs / "gateway.log",
                        {"output": output, "load": load},
                        kept["runs"],
                    )
                write(args.json, kept)


async def measure_on_gpu(args: argparse.Namespace, chosen: Sequence[Contender], kept: dict) -> None:
    """All cells on the same engines, whose start takes longer than a run, until --minutes are over."""
    end = time.monotonic() + 60 * args.minutes
    logs = args.logs or Path(tempfile.mkdtemp(prefix="real-engines-"))
    logs.mkdir(parents=True, exist_ok=True)
    model = tiny_model(logs / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    tiny = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(tiny | QWEN3_8B))
    maker = Maker(Asking("tiny", ignore_eos=True), Pipeline(model, "tiny", BLOCK))
    floods = {output: maker.make(0, output, math.inf, GPU_FLOOD, think=0.0) for output in args.outputs}
    async with fleet(model, list(floods.values()), logs, gpu=True) as engines:
        print(f"{len(engines)} engines of {engines[0].blocks} blocks, {end - time.monotonic():.0f} s left", flush=True)
        for output, flood in floods.items():
            if str(output) not in kept["saturation"]:
                warm = maker.make(99, output, math.inf, 120, think=0.0)
                await play(ours("round_robin"), engines, warm, maker.asking, logs / "gateway.log")  # compiles kernels
                first = await play(ours("least_time"), engines, flood, maker.asking, logs / "gateway.log")
                kept["saturation"][str(output)] = first["answers_a_second"]
                print(
                    f"saturation: {first['answers_a_second']:.1f} answers/s, {end - time.monotonic():.0f} s left",
                    flush=True,
                )
        for seed, load, output in itertools.product(args.seeds, args.loads, args.outputs):
            rate = load * kept["saturation"][str(output)]
            work = maker.make(seed, output, rate, min(GPU_FLOOD, round(rate * args.seconds)), GPU_THINK)
            for contender in chosen:
                if time.monotonic() + 2.2 * args.seconds > end:
                    return
                cell = {"output": output, "load": load}
                await play_cell([contender], engines, [work], maker.asking, logs / "gateway.log", cell, kept["runs"])
                write(args.json, kept)


async def play_cell(
    chosen: Sequence[Contender],
    engines: Sequence[Engine],
    works: Sequence[Work],
    asking: Asking,
    log: Path,
    cell: dict,
    runs: list,
) -> None:
    same = itemgetter("gateway", "seed", "output", "load")
    for number, work in enumerate(works):
        at = number * len(chosen) // len(works)  # no gateway is always first
        for contender in [*chosen[at:], *chosen[:at]]:
            run = {**await play(contender, engines, work, asking, log), **cell}
            runs[:] = [*(one for one in runs if same(one) != same(run)), run]
            print(line([run]), *run["errors"].values(), sep="\n  ", flush=True)


def write(file: Path | None, kept: dict) -> None:
    if file:
        setting = {"think_s": THINK, "caches": CACHES}
        file.write_text(json.dumps({"setting": setting, "machine": machine(), **kept}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="15 s of one cell and one seed")
    parser.add_argument("--gateways", metavar="A,B", help="those whose names contain one of these; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--outputs", type=int, nargs="+", default=OUTPUTS, metavar="TOKENS", help="of each answer")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, metavar="SHARE", help="of saturation")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="that requests arrive in a run")
    parser.add_argument("--gpu", action="store_true", help="engines share the machine's GPU")
    parser.add_argument("--minutes", type=float, default=60, help="with --gpu: begin no run that would end later")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="with --gpu: keep the engines' logs there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.outputs, args.loads, args.seconds = args.seeds[:1], args.outputs[:1], args.loads[-1:], 15.0
    why = missing() or (
        ""
        if os.environ.get("HITHERTO_VLLM")
        else "skipped: set HITHERTO_VLLM to an environment with vLLM, e.g. what tests/vllm/install.sh 0.28.0 prints"
    )
    if why:
        print(why)
        return 3
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    kept = {"saturation": before.get("saturation", {}), "runs": before.get("runs", [])}
    asyncio.run((measure_on_gpu if args.gpu else measure)(args, choose(args.gateways), kept))
    print(f"\n{tables(kept['runs'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
