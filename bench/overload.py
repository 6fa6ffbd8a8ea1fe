"""What admission is worth when more is asked for than a fleet can answer, in virtual time.

    python -m bench.overload [--quick] [--json FILE] [--seed N]

Four simulated engines (gpu-8b), requests that come at random: prompts of 1,700 tokens on average, a third of them a
tenant's own instructions, answers of 150. Saturation is what the fleet answers while more is always waiting. Goodput is
requests a second that were answered within TTFT 2 s and TPOT 50 ms. Each load begins with 15 s at half of saturation.

Beside the two modes of the gateway: no admission; a limit on the engines' waiting requests, as last scraped; a limit on
requests on a replica; and early rejection by the load that is there now, without a look at what the prompts ahead make
of it (the naive form in Mooncake's paper, section 7.3), which admits too many and too few by turns, as `uneven` shows:
how much the requests that came in one second and were answered within limits differ from those of another, as a share
of their mean (chance alone makes 0.13). `kept`: the share of the admitted that was answered within the limits.

Then classes: premium (4 % of saturation), standard (16 %) and free, once with free at 48 %, so that the fleet has four
fifths of what it can answer within the limits, and once with free at ten times saturation. Premium has 10 % reserved
and is 6 % of what is admitted on the ordinary day, so it is within its reserve also while more of it happen to come.
`premium_p99_change` compares premium's p99 TTFT in the two. Of the 130 requests of `--quick` that is the second
slowest, which differs by up to 14 % from seed to seed. So it is taken of all sums of what one prompt takes alone and
what another request waited besides (`premium_p99`), which have hardly to do with each other; that differs by 2 %.
A refused request counts as if it had waited its limit.

Then a fleet with roles: one of the four engines computes prompts for the others (`roles`), with and without admission.

Then one engine turns slow (`bench.chaos`), with the control of overload: `premium_kept_while_slow` is the share of
premium's requests that kept their limits meanwhile. With `--quick` its windows are of 15 s in the place of 30.

`goodput_share_at_200`: the gateway's goodput (`wait`) at twice saturation, by the highest of any rule at any load.
`roles_goodput_share_at_200`: the same where replicas have roles, by the highest there.
`calibration`: of the requests that it admitted there, the share that was answered within the limits as predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.simulate import Fleet, Record, Turn
from loadgen.simulate.gateway import Gateway
from policies import Admission, AdmissionDecision, Candidate, Classes, Estimate, QosClass, QueuedRequest, Rules
from replicas.simulated.profile import StepDurations, load_profile

from .chaos import chaos
from .chaos import table as chaos_table
from .overload_load import CLASSES, REPLICAS, SLO, met, turns

WARM, SETTLE = 15.0, 10.0  # seconds at half of saturation, and of the load before what is counted
ORDINARY = {"premium": 0.04, "standard": 0.16, "free": 0.48}  # of saturation
FLOOD = {**ORDINARY, "free": 10.0}
ROLES = ("prefill", "decode", "decode", "decode")
WAITING, CONCURRENT = (2, 8), (64, 48)  # limits that are tried, the better one first


# --- other rules, in the place of the gateway's


class Limit(Admission):
    """Sends a request to the candidates that `takes` it, and refuses it where there are none."""

    def __init__(self, candidates: Sequence[Candidate], takes: Callable[[Candidate, Estimate], bool]) -> None:
        super().__init__(Classes((QosClass("default", slo=SLO),)), Rules())
        self._candidates, self._takes = candidates, takes

    def ask(
        self, ticket: QueuedRequest, tokens: int, estimates: Sequence[Estimate], *besides: Any
    ) -> AdmissionDecision:
        """By the candidates and their estimates alone."""
        pairs = enumerate(zip(self._candidates, estimates, strict=True))
        if among := [index for index, (one, estimate) in pairs if self._takes(one, estimate)]:
            return AdmissionDecision("admitted", "room", among)
        return AdmissionDecision("refused", "full")


def queue_length(most: int, candidate: Candidate, estimate: Estimate) -> bool:
    return candidate.load.waiting <= most


def concurrency(most: int, candidate: Candidate, estimate: Estimate) -> bool:
    return candidate.load.requests < most


def early_rejection(candidate: Candidate, estimate: Estimate) -> bool:
    """By the queue and the streams that are there now."""
    return estimate.ttft <= SLO.ttft and candidate.costs.step_seconds(candidate.load) <= SLO.tpot


def rule(name: str, limit: int, gateway: Gateway) -> Admission:
    if name in ("wait", "reject"):
        return Admission(Classes((QosClass("default", slo=SLO),)), Rules((name,)))
    if name == "classes":
        return Admission(Classes(CLASSES), Rules(("wait",)))
    takes = {"queue length": partial(queue_length, limit), "concurrency": partial(concurrency, limit)}
    return Limit(gateway.candidates, takes.get(name, early_rejection))


# --- load


def played(
    load: Sequence[tuple[float, Turn]],
    name: str,
    limit: int,
    seed: int,
    gateways: int = 1,
    until: float = float("inf"),
    roles: Sequence[str] | None = None,
) -> list[Record]:
    admission = partial(rule, name, limit) if name != "none" else None
    profiles = [load_profile("gpu-8b")] * REPLICAS
    fleet = Fleet(profiles, "least_time", seed, admission=admission, gateways=gateways, roles=roles)
    for when, turn in load:
        fleet.at(when, fleet.send, turn)
    return fleet.run(until).records


def saturation(seed: int) -> float:
    """Requests a second that are answered while more is always waiting."""
    end = 60.0
    records = played(turns(30.0 * REPLICAS, 0.0, end, 1, seed), "none", 0, seed, until=end)
    return sum([0.5 * end <= record.end for record in records]) / (0.5 * end)


def goodput(
    job: tuple[str, int, float],
    full: float,
    seconds: float,
    seed: int,
    gateways: int = 1,
    roles: Sequence[str] | None = None,
) -> dict[str, Any]:
    """One rule under one load, as a share of saturation."""
    name, limit, share = job
    end = WARM + SETTLE + seconds
    load = turns(0.5 * full, 0.0, WARM, 2, seed) + turns(share * full, WARM, end, 3, seed)
    records = played(load, name, limit, seed, gateways, roles=roles)
    counted = [one for one in records if WARM + SETTLE <= one.sent < end]
    admitted = [one for one in counted if one.error is None]
    each = Counter(int(one.sent) for one in admitted if met(one))
    good = [each[second] for second in range(int(WARM + SETTLE), int(end))]
    return {
        "rule": name + (", roles" if roles else ""),
        "limit": limit,
        "load": share,
        "goodput": sum(map(met, counted)) / seconds,
        "admitted": len(admitted) / seconds,
        "kept": sum(map(met, admitted)) / max(1, len(admitted)),
        "ttft_p99": quantile([one.first - one.sent for one in admitted], 0.99),
        "tpot_p99": quantile([(one.end - one.first) / max(1, one.output - 1) for one in admitted], 0.99),
        "uneven": statistics.pstdev(good) / max(1e-9, statistics.mean(good)),
        "legs": sum(one.prefilled_by >= 0 for one in admitted) / max(1, len(admitted)),
    }


def classes(free: str, full: float, seconds: float, seed: int) -> dict[str, Any]:
    """TTFT by class. The load of the classes above free is the same whatever free asks for."""
    end, shares, load = WARM + SETTLE + seconds, {"ordinary": ORDINARY, "flood": FLOOD}.get(free, {}), []
    for kind, one in enumerate(CLASSES, 4):
        name = one.name
        if free == "alone":  # free has nobody above it
            load += turns(10.0 * full, WARM, end, kind, seed, name) if name == "free" else []
        elif free == "without":
            load += turns(ORDINARY[name] * full, 0.0, end, kind, seed, name) if name != "free" else []
        elif name == "free":
            load += turns(ORDINARY[name] * full, 0.0, WARM, kind, seed, name)
            load += turns(shares[name] * full, WARM, end, kind + 10, seed, name)
        else:
            load += turns(shares[name] * full, 0.0, end, kind, seed, name)
    counted = [one for one in played(load, "classes", 0, seed) if WARM + SETTLE <= one.sent < end]
    found: dict[str, Any] = {"free": free}
    durations = StepDurations(load_profile("gpu-8b"))
    for one in CLASSES:
        mine = [record for record in counted if record.turn.qos == one.name]
        alone = [prompt_seconds(durations, record) for record in mine]
        found[one.name] = {
            "asked": len(mine) / seconds,
            "good": sum(map(met, mine)) / seconds,
            "refused": sum([record.error is not None for record in mine]) / max(1, len(mine)),
            "ttfts": [record.first - record.sent for record in mine if record.error is None],
            "alone": alone,
            "besides": [
                record.first - record.sent - own if record.error is None else SLO.ttft
                for own, record in zip(alone, mine, strict=True)
            ],
        }
    return found


def prompt_seconds(durations: StepDurations, record: Record) -> float:
    """Return what its prompt takes on an engine that does nothing else."""
    computed = record.tokens - record.cached
    return durations.seconds(computed, computed * (record.cached + 0.5 * computed), 1, record.tokens)


def premium_p99(runs: Sequence[dict[str, Any]]) -> float:
    """Return the p99 of what each prompt takes alone with what each request waited besides, of several seeds together.
    One that was refused counts as if it had waited its limit."""
    alone, besides = [[value for run in runs for value in run["premium"][key]] for key in ("alone", "besides")]
    return float(np.quantile(np.add.outer(alone, besides), 0.99))


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


# --- all together


def jobs(quick: bool) -> list[tuple[str, int, float]]:
    loads = (1.0, 2.0) if quick else (0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0)
    tried, others = (1, loads[-1:]) if quick else (2, loads)
    rules = [("none", 0), ("early rejection", 0)]
    rules += [("queue length", limit) for limit in WAITING[:tried]]
    rules += [("concurrency", limit) for limit in CONCURRENT[:tried]]
    ours = [(name, 0, load) for name in ("wait", "reject") for load in loads]
    return ours + [(*one, load) for one in rules for load in others]


def measure(quick: bool, seed: int, processes: int) -> dict[str, Any]:
    seconds, kinds = (15.0, ("ordinary", "flood")) if quick else (120.0, ("without", "ordinary", "flood", "alone"))
    by_class_for, window = (22.0, 15.0) if quick else (144.0, 30.0)
    seeds = range(seed, seed + (2 if quick else 4))
    full = saturation(seed)
    with ProcessPoolExecutor(processes) as pool:
        by_class = {
            kind: [pool.submit(classes, kind, full, by_class_for, one) for one in seeds] for kind in reversed(kinds)
        }
        cells = [pool.submit(goodput, job, full, seconds, seed) for job in jobs(quick)]
        shared = pool.submit(goodput, ("wait", 0, 2.0), full, seconds, seed, 2)
        parted = [
            pool.submit(goodput, (name, 0, load), full, seconds, seed, 1, ROLES)
            for name, load in [
                *[("wait", load) for load in ((1.0, 2.0) if quick else (1.0, 1.5, 2.0))],
                *[("none", load) for load in ((2.0,) if quick else (1.0, 1.5, 2.0))],
            ]
        ]
        slowed = pool.submit(chaos, full, seed, window)
        runs = {kind: [one.result() for one in by_class[kind]] for kind in kinds}
        found = [one.result() for one in cells]
        two, faulty, legs = shared.result(), slowed.result(), [one.result() for one in parted]
    ours = next(one for one in found if (one["rule"], one["load"]) == ("wait", 2.0))
    peak, peak_of_legs = [max(one["goodput"] for one in cells) for cells in (found, legs)]
    ours_in_legs = next(one for one in legs if (one["rule"], one["load"]) == ("wait, roles", 2.0))
    return {
        "goodput_share_at_200": ours["goodput"] / peak,
        "premium_p99_change": premium_p99(runs["flood"]) / premium_p99(runs["ordinary"]) - 1.0,
        "calibration": ours["kept"],
        "two_gateways_share_at_200": two["goodput"] / peak,
        "premium_kept_while_slow": faulty["premium_kept_while_slow"],
        "roles_goodput_share_at_200": ours_in_legs["goodput"] / peak_of_legs,
        "saturation": full,
        "goodput": found + legs,
        "classes": {kind: _merged(runs[kind]) for kind in kinds},
        "chaos": faulty,
    }


def _merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several seeds: means, and quantiles of all requests together."""
    found: dict[str, Any] = {}
    for one in CLASSES:
        ttfts = [value for run in runs for value in run[one.name]["ttfts"]]
        found[one.name] = {
            **{name: statistics.mean([run[one.name][name] for run in runs]) for name in ("asked", "good", "refused")},
            "ttft_p50": quantile(ttfts, 0.5),
            "ttft_p99": quantile(ttfts, 0.99),
            "requests": len(ttfts),
        }
    return found


def tables(found: dict[str, Any]) -> str:
    lines = [f"saturation: {found['saturation']:.1f} requests/s on {REPLICAS} engines", ""]
    lines += [
        f"{'rule':<18}{'load':>6}{'goodput':>9}{'admitted':>10}{'kept':>7}{'TTFT p99':>10}{'TPOT p99':>10}{'uneven':>8}"
    ]
    for one in found["goodput"]:
        name = one["rule"] + (f" {one['limit']}" if one["limit"] else "")
        lines.append(
            f"{name:<18}{one['load']:>5.0%}{one['goodput']:>10.1f}{one['admitted']:>10.1f}{one['kept']:>7.0%}"
            f"{one['ttft_p99']:>9.2f}s{1e3 * one['tpot_p99']:>8.0f}ms{one['uneven']:>8.2f}"
        )
    lines += ["", f"{'free':<10}{'class':<10}{'asked/s':>9}{'good/s':>8}{'refused':>9}{'TTFT p50':>10}{'p99':>8}"]
    for kind, by_class in found["classes"].items():
        for name, one in by_class.items():
            if one["asked"]:
                lines.append(
                    f"{kind:<10}{name:<10}{one['asked']:>9.1f}{one['good']:>8.1f}{one['refused']:>9.0%}"
                    f"{1e3 * one['ttft_p50']:>8.0f}ms{1e3 * one['ttft_p99']:>6.0f}ms"
                )
    lines += ["", chaos_table(found["chaos"])]
    keys = (
        "goodput_share_at_200", "two_gateways_share_at_200", "premium_p99_change", "calibration",
        "premium_kept_while_slow", "roles_goodput_share_at_200",
    )  # fmt: skip
    return "\n".join([*lines, "", *[f"{key}: {found[key]:.3f}" for key in keys]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer loads, limits and seeds, and shorter: within 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    found = measure(args.quick, args.seed, args.processes)
    print(tables(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
