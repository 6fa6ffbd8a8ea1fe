"""How `least_time` learns what its replicas are like: predicted against observed TTFT, in virtual time.

    python -m bench.learning [--quick] [--json FILE] [--txt FILE] [--seed N]

Eight simulated engines, conversations behind shared system prompts, 65 % of what round robin gets through. For each
case the relative error |predicted / observed - 1| of the request's replica, p50 and p90, over the requests since the
start or since the change; and what learning is for: TTFT with learned costs, with the priors alone (nothing is
learned), and of `least_load`.

Then shadow mode: what a policy in shadow is said to save, beside what it is when it acts on the same load.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.play import Conversation, backlog, pace
from gateway.ops.metrics import Metrics
from gateway.proxy.observers.shadow import Seen, Shadows, told
from loadgen.simulate import Fleet, Record, Turn
from policies import Costs
from replicas.simulated.profile import Profile, StepDurations, load_profile

REPLICAS, BLOCK, LOAD = 8, 16, 0.65
PROMPTS, OPEN = 12, 160  # system prompts; conversations open at a time
FULL = 4000  # requests of the backlog that tells what saturation is
WINDOWS = (0, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120)  # requests
FLEETS = ("learned", "priors alone", "least_load")


def conversations(requests: int, rng: random.Random) -> list[Conversation]:
    """Turns that extend the one before, behind system prompts of which some are asked for far more than others."""

    def blocks(mean: float) -> list[int]:
        return [rng.getrandbits(62) + 1 for _ in range(1 + int(rng.expovariate(1 / mean)))]

    prompts = [blocks(60) for _ in range(PROMPTS)]
    weights = [1 / (1 + rank) for rank in range(PROMPTS)]
    made: list[Conversation] = []
    left = requests
    while left > 0:
        said, turns = list(rng.choices(prompts, weights)[0]), []
        for _ in range(min(left, rng.randrange(2, 7))):
            said = said + blocks(24)
            reply = blocks(6)
            turns.append(Turn(said, BLOCK * len(said) + 5, BLOCK * len(reply), said + reply))
            said = said + reply
        made.append(turns)
        left -= len(turns)
    return made


def load(profile: Profile, requests: int, seed: int) -> tuple[list[Conversation], float]:
    """The work, and how many of its requests come a second."""
    fleet = Fleet([profile] * REPLICAS, "round_robin", seed, event_delay=None)
    return conversations(requests, random.Random(seed)), LOAD * backlog(
        fleet, conversations(FULL, random.Random(seed + 1)), 32 * REPLICAS
    )


class Unlearning(Costs):
    """Costs that stay as they were given."""

    def observe_ttft(self, *seen) -> None: ...

    def observe_itl(self, *seen) -> None: ...


@dataclass(frozen=True)
class Case:
    """`after`: the profile that the first replica has from the middle of the run on."""

    title: str
    profile: Profile
    after: Profile | None = None


def cases() -> Iterator[Case]:
    gpu, cpu = load_profile("gpu-8b"), load_profile("cpu-tiny")
    yield Case("cold start, engines like the priors", gpu)
    yield Case("cold start, engines of another kind (cpu-tiny)", cpu)
    yield Case("noise: steps off by a factor of 1.6", replace(gpu, step=replace(gpu.step, spread=0.5)))
    yield Case("one replica turns half again as slow", gpu, replace(gpu, speedup=1 / 1.5))
    yield Case("one replica turns three times as slow", gpu, replace(gpu, speedup=1 / 3))
    yield Case("one replica turns twice as fast", gpu, replace(gpu, speedup=2))


def run(case: Case, fleet: str, work: Sequence[Conversation], rate: float, seed: int) -> list[Record]:
    made = Fleet([case.profile] * REPLICAS, "least_time" if fleet in FLEETS[:2] else fleet, seed)
    if fleet == "priors alone":
        for candidate in made.gateways[0].candidates:
            candidate.costs = Unlearning(candidate.costs.group)
    if case.after is not None:
        made.at(middle(work, rate), lambda: setattr(made.replicas[0].engine, "durations", StepDurations(case.after)))
    return pace(made, work, rate, OPEN, seed).records


def middle(work: Sequence[Conversation], rate: float) -> float:
    return sum(map(len, work)) / 2 / rate


def errors(records: Sequence[Record]) -> list[dict]:
    """p50 and p90 of the relative error, window by window."""
    rows, ordered = [], sorted(records, key=lambda record: record.sent)
    for first, last in itertools.pairwise(WINDOWS):
        part = ordered[first:last]
        if len(part) >= (last - first) / 2:
            error = np.array([abs(one.expected_ttft / (one.first - one.sent) - 1) for one in part])
            rows.append({"requests": [first, first + len(part)], "p50": round(float(np.percentile(error, 50)), 4),
                         "p90": round(float(np.percentile(error, 90)), 4)})  # fmt: skip
    return rows


def ttft(records: Sequence[Record]) -> dict[str, float]:
    ms = 1e3 * np.array([one.first - one.sent for one in records])
    return {
        "mean_ms": round(float(ms.mean()), 2),
        **{f"p{q}_ms": round(float(np.percentile(ms, q)), 2) for q in (50, 90, 99)},
    }


def study(case: Case, requests: int, seed: int) -> dict:
    """One case: the curves and what came of them."""
    work, rate = load(case.profile, requests, seed)
    records = {fleet: run(case, fleet, work, rate, seed) for fleet in FLEETS}
    since = middle(work, rate) if case.after is not None else 0.0
    after = {fleet: [one for one in of if one.sent >= since] for fleet, of in records.items()}
    curves = {"learned": after["learned"], "priors alone": after["priors alone"]}
    if case.after is not None:
        curves = {"replica that changed": [one for one in after["learned"] if one.replica == 0],
                  "the others": [one for one in after["learned"] if one.replica != 0],
                  "priors alone": after["priors alone"]}  # fmt: skip
    return {"title": case.title, "rate": round(rate, 2), "requests": requests, "since_s": round(since, 1),
            "error": {name: errors(of) for name, of in curves.items()},
            "ttft": {fleet: ttft(of) for fleet, of in after.items()}}  # fmt: skip


class Watched:
    """A policy that acts, with others in its shadow."""

    def __init__(self, policy, shadows: Shadows) -> None:
        self.policy, self.shadows = policy, shadows

    def choose(self, demand, candidates, explain: bool = False):
        choice = self.policy.choose(demand, candidates)
        self.shadows.judge(Seen(demand, list(candidates)), choice.index)
        return choice


def shadow(
    requests: int, seed: int, names: Sequence[str] = ("round_robin", "least_load", "overlap_cost", "least_time")
) -> list[dict]:
    """Each policy acts once, with all others in shadow: what they are said to save a request, and do when they act."""
    profile = load_profile("gpu-8b")
    work, rate = load(profile, requests, seed)
    acted, said = {}, {}
    for name in names:
        metrics, others = Metrics(), [one for one in names if one != name]
        fleet = Fleet([profile] * REPLICAS, name, seed)
        gateway = fleet.gateways[0]
        gateway.policy = Watched(gateway.policy, Shadows(others, metrics))
        records = pace(fleet, work, rate, OPEN, seed).records
        acted[name] = {
            "uncached": float(np.mean([one.tokens - one.cached for one in records])),
            "ms": ttft(records)["mean_ms"],
        }
        said[name] = told(metrics, others)
    return [
        {"acting": name, "shadow": one["policy"], "same": round(one["same"] / one["decisions"], 3),
         "tokens_said": round(one["saved_prefill_tokens"] / one["decisions"], 1),
         "tokens_so": round(acted[name]["uncached"] - acted[one["policy"]]["uncached"], 1),
         "ms_said": round(1e3 * one["saved_ttft_seconds"] / one["decisions"], 2),
         "ms_so": round(acted[name]["ms"] - acted[one["policy"]]["ms"], 2)}
        for name in names for one in said[name]
    ]  # fmt: skip


def told_case(case: dict) -> Iterator[str]:
    yield f"\n{case['title']}: {case['requests']} requests, {case['rate']:g} a second"
    windows = max(case["error"].values(), key=len)
    yield f"{'error p50 / p90, requests':28}" + "".join(f"{'%d-%d' % tuple(row['requests']):>13}" for row in windows)
    for name, rows in case["error"].items():
        yield f"{name:28}" + "".join(f"{row['p50']:7.0%}/{row['p90']:5.0%}" for row in rows)
    yield f"{'TTFT ms':28}{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>9}"
    for name, row in case["ttft"].items():
        yield f"{name:28}" + "".join(f"{row[key]:9.1f}" for key in ("mean_ms", "p50_ms", "p90_ms", "p99_ms"))


def told_shadow(rows: Sequence[dict]) -> Iterator[str]:
    yield "\nshadow: a request saves, by its prediction / when that policy acts on the same load"
    yield f"{'acting':14}{'in shadow':14}{'same choice':>12}{'prefill tokens':>22}{'TTFT ms':>22}"
    for row in rows:
        yield (f"{row['acting']:14}{row['shadow']:14}{row['same']:12.0%}{row['tokens_said']:+12.0f} / {row['tokens_so']:+7.0f}"
               f"{row['ms_said']:+12.1f} / {row['ms_so']:+7.1f}")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--txt", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    requests = 1280 if args.quick else 5120
    said: list[str] = []

    def tell(lines: Iterator[str]) -> None:
        for line in lines:
            said.append(line)
            print(line, flush=True)

    studied = []
    for case in cases():
        studied.append(study(case, requests, args.seed))
        tell(told_case(studied[-1]))
    compared = shadow(requests // 2, args.seed)
    tell(told_shadow(compared))
    report = {"cases": studied, "shadow": compared, "seed": args.seed, "quick": args.quick,
              "command": " ".join(["python -m bench.learning", *(argv or sys.argv[1:])]),
              "machine": f"{platform.machine()}, Python {platform.python_version()}"}  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.txt:
        args.txt.write_text("\n".join(said).lstrip("\n") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
