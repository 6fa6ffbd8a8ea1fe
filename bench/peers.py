"""The real peers, and the same rules in virtual time: every gateway in front of the same simulated engines, with the
same loads.

    python -m bench.peers [--quick] [--loads trace,agents] [--gateways A,B] [--json FILE]

Four engines as processes, started afresh for each run, and a gateway that knows nothing; open loop, chat with words.
Where `bench.rules` (or ours) has the gateway's rule, the same load is played by `loadgen simulate` too, with
the same engines on a virtual clock: figures read "wall / virtual", so that one sees whether the rules simulated are
those that real gateways follow.

trace    90 s of Mooncake's conversation trace, 2.6 times as fast: long prompts, little to share. Replies are cut to
         OUTPUT tokens: whole ones keep engines so busy decoding that 40 seconds hold hardly a prompt twice. Caches of
         gpu-8b at its speed, together half of what the prompts hold
agents   tool loops that fork, behind six system prompts; caches together as large as what the prompts hold. Engines at
         half of their speed: 10 ms a request for sockets and tokenizers are then little beside what engines take

  hit      found / looked-up prompt tokens, by the engines' own counters; "one infinite cache": virtual, of the same
           load
  TTFT     ms at the client
  busiest  % of the requests answered by the engine that answered most, by the engines' own counters
  cores    CPU seconds a second of engines, gateway and generator, while load was full; there are as many as `machine`
           says

Runs of a FILE that is there are kept and added to, so that a long measurement can be made in parts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from bench.contenders import Contender, choose, say_hello
from bench.conversations import DATA
from bench.head_to_head import head_to_head
from bench.simulated import NAME, engines
from loadgen.drive.client import Client
from loadgen.drive.run import Asking
from loadgen.report.summary import machine, summarise
from loadgen.simulate import Setting, simulate
from loadgen.workload import synthetic
from loadgen.workload.arrivals import conversation_starts
from loadgen.workload.conversations import Conversation, Message, Turn, Workload
from loadgen.workload.datasets import DATASETS
from loadgen.workload.generators import agents
from replicas.simulated.profile import PROFILES, Profile, load_profile

ENGINES, PROFILE, SEED = 4, "gpu-8b", 1
TRACE, OUTPUT = DATA / "mooncake_conversation_blk512.jsonl.gz", 32
LOADS = ("trace", "agents")
ENDLESS = 1 << 20  # blocks


def trace(seconds: float) -> Workload:
    return DATASETS["mooncake"](random.Random(SEED), None, dataset_path=TRACE, trace_start=420.0, trace_seconds=seconds,
                                trace_speed=2.6, trace_jitter=3.0, output_len=OUTPUT)  # fmt: skip


def made_up(requests: int) -> Workload:
    rng = random.Random(SEED)
    made = agents(rng, requests, num_prefixes=6, turns=5, suffix_len=500, output_len=24, think_time=0.5, forks=2)
    return Workload(made, conversation_starts([one.requests for one in made], 12.0, rng))


def in_words(conversation: Conversation) -> Conversation:
    """Spans as the words that are sent for them, so that wall and virtual clock see the same tokens."""

    def put(message: Message) -> Message:
        return (
            {**message, "content": synthetic.text(message["content"])}
            if isinstance(message["content"], tuple)
            else message
        )

    def said(turn: Turn) -> Turn:
        return replace(
            turn,
            messages=[*map(put, turn.messages)],
            reply=turn.reply and put(turn.reply),
            forks=tuple(map(in_words, turn.forks)),
        )

    return replace(conversation, turns=[*map(said, conversation.turns)])


@dataclass
class Load:
    """One load and the engines for it."""

    name: str
    work: Workload
    speedup: float = 1.0
    caches: float = 1.0  # of all engines together, x what the prompts hold
    virtual: dict[str, dict] = field(default_factory=dict)  # figures by rule

    @classmethod
    def make(cls, name: str, quick: bool) -> Load:
        work, *shape = (
            (trace(30 if quick else 90), 1.0, 0.5) if name == "trace" else (made_up(120 if quick else 360), 0.5, 1.0)
        )
        return cls(name, Workload([*map(in_words, work.conversations)], work.starts), *shape)

    @cached_property
    def infinite(self) -> dict:
        """What one infinite cache finds of the prompts."""
        endless = load_profile(PROFILE, num_blocks=ENDLESS)
        return summarise(simulate(self.work, Setting("round_robin", [endless])))["cache"]

    @property
    def profile(self) -> Profile:
        engine = load_profile(PROFILE, speedup=self.speedup)
        held = self.infinite["prefill_tokens"] // engine.block_size
        return replace(engine, num_blocks=math.ceil(self.caches * held / ENGINES))

    def on_virtual_clock(self, rule: str) -> dict:
        if rule not in self.virtual:
            report = summarise(simulate(self.work, Setting(rule, [self.profile] * ENGINES, SEED)))
            busiest = max(one["requests"] for one in report["replicas"].values()) / report["requests"]
            self.virtual[rule] = {"hit_rate": report["cache"]["hit_rate"], "ttft_ms": report["ttft_ms"],
                                  "tpot_ms": report["tpot_ms"], "shares": [round(busiest, 3)]}  # fmt: skip
        return self.virtual[rule]

    @property
    def setting(self) -> dict:
        return {"requests": self.work.requests, "arrivals_s": round(self.work.starts[-1], 1), "engines": ENGINES, "profile": PROFILE,
                "speedup": self.speedup, "num_blocks": self.profile.num_blocks, "prompt_tokens": self.infinite["prompt_tokens"],
                "infinite_hit_rate": self.infinite["hit_rate"]}  # fmt: skip


async def play(contender: Contender, load: Load) -> dict:
    """One run on the wall clock, and one on the virtual one if there is a rule for it."""
    profile, asking = load.profile, Asking(NAME, ignore_eos=True)
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder, flags = Path(name), ("--num-blocks", str(profile.num_blocks), "--speedup", str(profile.speedup))
        async with engines(ENGINES, (PROFILES / f"{PROFILE}.yaml").read_text(), folder, *flags) as fleet:
            for engine in fleet:
                client = Client(engine.url)
                await say_hello(client, engine.name)  # the first use of a tokenizer takes 0.1 s
                client.close()
            _, told = await head_to_head(
                contender, fleet, load.work.conversations, load.work.starts, asking, folder / "gateway.log"
            )
    virtual = load.on_virtual_clock(contender.rule) if contender.rule else None
    return {"load": load.name, **told, "rule": contender.rule, "virtual": virtual, "setting": load.setting}


HEAD = (f"{'gateway':46} {'hit %':>11} {'TTFT mean ms':>13} {'p50':>11} {'p90':>11} {'p99':>11} {'TPOT p99 ms':>12} {'busiest %':>10} "
        f"{'failed':>6} {'cores':>6}")  # fmt: skip


def line(run: dict) -> str:
    def both(form: str, read: Callable[[dict], float | None]) -> str:
        return " / ".join(
            form.format(math.nan if (value := read(one)) is None else value) for one in (run, run["virtual"]) if one
        )

    ttft = [both("{:.0f}", lambda one, name=name: one["ttft_ms"][name]) for name in ("mean", "p50", "p90", "p99")]
    tpot, busiest = (
        both("{:.0f}", lambda one: one["tpot_ms"]["p99"]),
        both("{:.0f}", lambda one: 100 * max(one["shares"])),
    )
    cores = sum(run["busy"]) + run["gateway_busy"] + run["generator_busy"]
    return (f"{run['gateway']:46} {both('{:.1f}', lambda one: 100 * one['hit_rate']):>11} {ttft[0]:>13} {ttft[1]:>11} {ttft[2]:>11} {ttft[3]:>11} "
            f"{tpot:>12} {busiest:>10} {run['failed']:6d} {cores:6.2f}{'  the generator was late' if run['generator_was_the_limit'] else ''}")  # fmt: skip


def table(runs: Sequence[dict]) -> str:
    """A part for each load, the least mean TTFT first."""
    parts = []
    for name in LOADS:
        mine = sorted((run for run in runs if run["load"] == name), key=lambda run: run["ttft_ms"]["mean"] or math.inf)
        if mine:
            parts += ["", about(name, mine[0]["setting"]), HEAD, *map(line, mine),
                      f"{'one infinite cache':46} {100 * mine[0]['setting']['infinite_hit_rate']:11.1f}"]  # fmt: skip
    return "\n".join(parts)


def about(name: str, setting: dict) -> str:
    return (f"{name}: {setting['requests']} requests of {setting['prompt_tokens'] / setting['requests']:,.0f} tokens in {setting['arrivals_s']:g} s, "
            f"{setting['engines']} engines {setting['profile']} x {setting['speedup']:g} of {setting['num_blocks']:,} blocks; wall / virtual")  # fmt: skip


async def measure(args: argparse.Namespace, contenders: Sequence[Contender], keep: list[dict]) -> None:
    for name in args.loads:
        load = Load.make(name, args.quick)
        print(f"\n{about(name, load.setting)}\n{HEAD}", flush=True)
        for contender in contenders:
            run = await play(contender, load)
            keep[:] = [one for one in keep if (one["load"], one["gateway"]) != (name, contender.name)] + [run]
            print(line(run), *run["errors"].values(), sep="\n  ", flush=True)
            if args.json:
                args.json.write_text(json.dumps({"machine": machine(), "runs": keep}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of each load")
    parser.add_argument(
        "--loads", type=lambda text: text.split(","), default=list(LOADS), metavar="A,B", help=f"of {', '.join(LOADS)}"
    )
    parser.add_argument("--gateways", metavar="A,B", help="those whose names contain one of these; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if unknown := set(args.loads) - set(LOADS):
        parser.error(f"--loads: there is no {', '.join(unknown)}")
    if "trace" in args.loads and not TRACE.exists():
        print(f"the trace is left out: no {TRACE}; set HITHERTO_DATA to the folder that has it")
        args.loads.remove("trace")
    keep = json.loads(args.json.read_text())["runs"] if args.json and args.json.exists() else []
    asyncio.run(measure(args, choose(args.gateways), keep))
    print(table(keep))
    return 0


if __name__ == "__main__":
    sys.exit(main())
