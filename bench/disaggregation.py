"""One leg or two, in virtual time: the gateway's rule and the field's, over ratios of prefillers to decoders and loads.

    python -m bench.disaggregation [--quick] [--seeds 1] [--parts trace,...] [--json FILE] [--processes 2]

Engines are `gpu-8b`; a transfer moves 128 KiB a token at 100 Gbit/s and takes 10 ms beside that. A fleet is written
prefill:both:decode, so 2:0:6 has two engines that only compute prompts for others and 0:8:0 nobody with a role. Rules
are those of `policies.leg_rules`; with `never` prefillers idle, which is the floor of a fleet. `llmd:100`
comes with llm-d's weights for the choice of replicas, all others with `least_time`. `queue` and `queue:1000` are a
global prefill queue of which whoever is free takes the next (`bench.rules.prefill_queue`), the second as
Dynamo had it.

trace   Mooncake's conversations (13,700 tokens of prompt and 340 of answer) on eight engines, at several rates:
        `good` is the share of requests with a first token within 2 s and 50 ms a token after that.
limits  the same where the gateway knows these limits (`when_full: observe`, so that all is sent).
ratios  the same at one rate, with more prefillers.
lengths prompts of one length, each its own, and answers of 300 tokens, on eight engines: as many tokens a second of
        each.
pulls   the first on engines with host memory for 1.6 million tokens, which "pulls" may fetch from one another.
faults  the first again, while a prefiller is lost from the 20th to the 50th second.
speeds  the same on four engines that are faster, from the left of the fleet, by the measure of an H100 beside an A100
        (Splitwise's: prompts take 0.51 and steps of decoding 0.70 of the time), and four that are not; "slow" are eight
        of these. What such a fleet brings is how much more requests a second it keeps within the SLO.
chats   chats at 20 requests a second on four engines, with and without a prompt of 100,000 tokens every 5 s: the time
        between tokens of the chats. All figures but `good` and those of transfers are of the chats alone. What chats
        have on two and three engines without the long prompts is what they would have if one of the three decoders, or
        one of four engines, answered those and nothing else.

`--quick` has one rate and fewer fleets, within 60 s. With several `--seeds` all figures are means over them, and the
share within the SLO is told of each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.conversations import DATA
from bench.field_cells import MOONCAKE
from loadgen.report.summary import machine, meets
from loadgen.simulate import Outage, Outcome, Setting, simulate
from loadgen.workload import generators, limits
from loadgen.workload.arrivals import conversation_starts
from loadgen.workload.conversations import Conversation, Turn, Workload, span
from loadgen.workload.datasets import DATASETS
from policies import Slo
from policies.classes import NO_LIMITS
from replicas.simulated.profile import load_profile

PROFILE = load_profile("gpu-8b")
STEP = PROFILE.step
FAST = replace(
    PROFILE,
    step=replace(
        STEP,
        **{
            name: 0.51 * getattr(STEP, name)
            for name in ("prefill", "prefill_token", "prefill_token_squared", "attention")
        },
        **{
            name: 0.70 * getattr(STEP, name)
            for name in (
                "base",
                "decode",
                "decode_least",
                "decode_sequence",
                "decode_context_token",
                "decode_usage",
                "decode_usage_squared",
            )
        },
    ),
)
LOST = Outage(0, 20.0, 50.0)
SLO = {"ttft": 2000.0, "tpot": 50.0}
SEED = 1  # the first
ROLES = ("prefill", "both", "decode")
LONG, EVERY, NAMES = 100_000, 5.0, 1 << 41  # tokens of the long prompts, seconds between them, names nobody else has
CHATS = 20.0  # requests a second
RULES = ("seconds", "pauses:1", "pauses:10", "never", "always", "over:8192", "llmd:100", "queue", "queue:1000")
MODES = ("seconds", "over:8192", "queue", "queue:1000")  # the price, a threshold, and a global queue beside them
TOKENS = 26_000  # of prompts, a second: what all lengths of a prompt have in common


@dataclass(frozen=True)
class Run:
    part: str  # trace, limits, ratios, lengths, pulls, faults, speeds, slow or chats
    fleet: str
    rule: str = "seconds"
    policy: str = "least_time"
    rate: float = 6.0
    long: bool = True
    requests: int = 400
    length: int = 0  # of prompts, where they have one
    pulls: bool = False
    seed: int = SEED

    @property
    def named(self) -> str:
        if self.pulls:
            return "pulls"
        return f"{self.policy}, no roles" if self.fleet.split(":")[1] == str(self.engines) else self.rule

    @property
    def engines(self) -> int:
        return sum(map(int, self.fleet.split(":")))


class Figures(NamedTuple):
    good: float  # share of the requests within the SLO
    ttft: float  # ms
    ttft_p99: float
    e2e: float
    tpot_p99: float
    itl_p99: float  # of the chats
    itl_p999: float
    legs: float  # share of the requests
    transfer: float  # ms, mean
    transfer_p99: float
    overhead: float  # seconds of all transfers by those of all answers


def trace(rate: float, requests: int, seed: int) -> Workload:
    rng = random.Random(seed)
    load = DATASETS["mooncake"](rng, requests, dataset_path=DATA / MOONCAKE, trace_jitter=3.0)
    pace = (len(load.starts) - 1) / load.starts[-1] / rate
    load.starts = [start * pace for start in load.starts]
    return load


def chats(requests: int, long: bool, seed: int) -> Workload:
    rng = random.Random(seed)
    asked = generators.chat(rng, requests, think_time=2.0)
    starts = conversation_starts([one.requests for one in asked], CHATS, rng)
    if long:
        at = [EVERY * number for number in range(int(requests / CHATS / EVERY))]
        asked += [
            Conversation(f"long-{number}", [Turn([generators.say("user", span(NAMES + number, LONG))], 100)])
            for number in range(len(at))
        ]
        starts += at
    return Workload(asked, starts)


def prompts(length: int, rate: float, requests: int, seed: int) -> Workload:
    """Nothing is asked twice."""
    rng = random.Random(seed)
    asked = [
        Conversation(f"prompt-{number}", [Turn([generators.say("user", span(NAMES + number, length))], 300)])
        for number in range(requests)
    ]
    return Workload(asked, conversation_starts([1] * requests, rate, rng))


def setting(run: Run) -> Setting:
    counts = [*map(int, run.fleet.split(":"))]
    roles = [role for role, count in zip(ROLES, counts) for _ in range(count)]
    fast = run.engines // 2 if run.part == "speeds" else 0
    slow = replace(PROFILE, cpu_blocks=100_000) if run.part == "pulls" else PROFILE
    return Setting(
        run.policy,
        [FAST] * fast + [slow] * (run.engines - fast),
        run.seed,
        outages=[LOST] if run.part == "faults" else [],
        engine_replies=True,
        roles=roles,
        legs=run.rule,
        timed=run.part == "chats",
        pulls=run.pulls,
        admission="observe" if run.part == "limits" else None,
        slo=Slo(SLO["ttft"] / 1e3, SLO["tpot"] / 1e3) if run.part == "limits" else NO_LIMITS,
    )


def play(run: Run) -> Figures:
    if run.part == "chats":
        load = chats(run.requests, run.long, run.seed)
    elif run.part == "lengths":
        load = prompts(run.length, run.rate, run.requests, run.seed)
    else:
        load = trace(run.rate, run.requests, run.seed)
    limits.set_limits(load.conversations, "mixed", run.seed)
    return figures(simulate(load, setting(run)))


def figures(outcome: Outcome) -> Figures:
    good = [record for record in outcome.done if record.error is None]
    short = [record for record in good if not record.conversation.startswith("long")]
    moved = np.array([one.waited + one.seconds for one in outcome.transfers]) * 1e3
    gaps = np.array([gap for record in short for gap in record.gaps]) * 1e3
    ttft = np.array([record.ttft for record in short]) * 1e3
    tpot = np.array([record.tpot for record in short if record.tpot is not None]) * 1e3
    answers = sum(record.e2e for record in good) * 1e3
    found = Figures(
        sum(meets(record, SLO) for record in good) / len(outcome.done),
        ttft.mean(),
        np.percentile(ttft, 99),
        np.mean([record.e2e for record in short]) * 1e3,
        np.percentile(tpot, 99),
        np.percentile(gaps, 99) if gaps.size else 0.0,
        np.percentile(gaps, 99.9) if gaps.size else 0.0,
        len(moved) / len(outcome.done),
        moved.mean() if moved.size else 0.0,
        np.percentile(moved, 99) if moved.size else 0.0,
        moved.sum() / answers,
    )
    return Figures(*[round(float(value), 4) for value in found])


def runs(quick: bool) -> list[Run]:
    found = []
    for rate in (4.0,) if quick else (4.0, 6.0, 8.0):
        base = Run("trace", "0:8:0", rate=rate, requests=200 if quick else 400)
        ratios = ("2:0:6",) if quick else ("1:0:7", "2:0:6")
        found += [base, replace(base, policy="least_load"), *by_rule(base, ratios)]
        found += by_rule(base, ("0:4:4",), ("seconds", "pauses:1"))
    if not quick:
        found += beside()
    base = Run("chats", "0:4:0", requests=300 if quick else 1200)
    with_long = [base, replace(base, fleet="0:2:2"), *by_rule(base, ("1:0:3",))]
    if not quick:
        with_long += [replace(base, fleet=fleet) for fleet in ("0:2:0", "0:3:0")]
    return found + [replace(run, long=long) for run in with_long for long in (True, False)]


def beside() -> list[Run]:
    """What is asked of a few rules alone."""
    found = [Run("limits", fleet, rate=rate) for rate in (4.0, 6.0, 8.0) for fleet in ("0:8:0", "0:4:4")]
    found += by_rule(Run("ratios", "", rate=6.0), ("3:0:5", "4:0:4"), MODES)
    for length in (2_000, 8_000, 32_000):
        base = Run("lengths", "0:8:0", rate=TOKENS / length, requests=300, length=length)
        found += [base, *by_rule(base, ("2:0:6",), MODES)]
    for rate in (4.0, 6.0, 8.0):
        base = Run("pulls", "0:8:0", rate=rate)
        found += [base, replace(base, pulls=True)]
    for rate in (4.0, 6.0):
        base = Run("faults", "0:8:0", rate=rate)
        found += [base, *by_rule(base, ("2:0:6",), MODES)]
    for rate in (4.0, 6.0, 8.0, 10.0, 12.0):
        base = Run("speeds", "0:8:0", rate=rate)
        found += [replace(base, part="slow"), base, *by_rule(base, ("4:0:4",), ("always", *MODES))]
    return found


def by_rule(base: Run, fleets: Iterable[str], rules: Iterable[str] = RULES) -> list[Run]:
    """Each rule on each fleet; llm-d's with its own choice of replicas."""
    return [
        replace(base, fleet=fleet, rule=rule, policy="llmd_weights" if rule.startswith("llmd") else base.policy)
        for fleet in fleets
        for rule in rules
    ]


def over_seeds(done: dict[Run, Figures]) -> dict[Run, list[Figures]]:
    """The figures of each seed, by the run of the first."""
    found: dict[Run, list[Figures]] = {}
    for run, told in done.items():
        found.setdefault(replace(run, seed=SEED), []).append(told)
    return found


def table(played: dict[Run, Figures]) -> str:
    by_seed = over_seeds(played)
    done = {run: Figures(*np.mean(told, axis=0).tolist()) for run, told in by_seed.items()}
    lines, heading = [], ""
    for run, told in done.items():
        if not run.long:
            continue
        about = f"{run.part}, {CHATS if run.part == 'chats' else run.rate:g} requests/s"
        about += f" of {run.length:,} tokens" if run.length else ""
        if about != heading:
            lines += ["", about, f"{'fleet':7} {'rule':20} {'good':>6} {'TTFT':>7} {'p99':>7} {'E2E':>7} {'TPOT p99':>8} {'legs':>6} "
                      f"{'transfer':>8} {'p99':>6} {'of E2E':>6}" + "  ITL p99, p99.9 (without long prompts)" * (run.part == "chats")]  # fmt: skip
            heading = about
        line = (f"{run.fleet:7} {run.named:20} {told.good:6.1%} {told.ttft:7,.0f} {told.ttft_p99:7,.0f} {told.e2e:7,.0f} {told.tpot_p99:8.1f} "
                f"{told.legs:6.1%} {told.transfer:8.1f} {told.transfer_p99:6.0f} {told.overhead:6.1%}")  # fmt: skip
        if (alone := done.get(replace(run, long=False))) is not None:
            line += f"  {told.itl_p99:.1f}, {told.itl_p999:.1f} ({alone.itl_p99:.1f}, {alone.itl_p999:.1f})"
        if len(seeds := by_seed[run]) > 1:
            line += f"  good: {', '.join(f'{one.good:.1%}' for one in seeds)}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one rate, fewer fleets and requests")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="play each cell with the seeds 1 to N")
    parser.add_argument("--parts", default="", help="only these of the parts above, by comma")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not (DATA / MOONCAKE).exists():
        print(f"skipped: no {MOONCAKE} in {DATA}; set HITHERTO_DATA to the folder that has it")
        return 0
    parts = args.parts.split(",") if args.parts else ()
    todo = [
        replace(run, seed=SEED + number)
        for run in runs(args.quick)
        if not parts or run.part in parts
        for number in range(args.seeds)
    ]
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("fork")) as pool:
        done = {}
        for run, told in zip(todo, pool.map(play, todo)):
            done[run] = told
            print(f"{len(done)} of {len(todo)}", end="\r", file=sys.stderr, flush=True)
    print(table(done))
    if args.json:
        told = [{**asdict(run), **found._asdict()} for run, found in done.items()]
        args.json.write_text(json.dumps({"machine": machine(), "slo_ms": SLO, "runs": told}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
