"""Compute the figures of a run from its records: the report, which is the dictionary that `--json` writes.

TTFT, ITL, TPOT and E2E are defined as in `vllm bench serve`; percentiles interpolate linearly. Keys end in `_ms` where
the value is in milliseconds; other times are seconds.
"""

from __future__ import annotations

import os
import platform
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import NamedTuple

import numpy as np

from loadgen.drive.records import Load, Record
from loadgen.options import INTERRUPTED, BadOption
from loadgen.report.shares import share

# The generator was the limit when it kept a core busier than BUSY_CORE, or when its lateness at p50, p90 or p99 was
# more than LATE_MS and more than LATE_SHARE of the TTFT at the same percentile. p99 counts from ENOUGH_FOR_P99 requests
# on: with fewer it is the latest single request, which any other process on the machine can delay.
BUSY_CORE = 0.85
LATE_MS, LATE_SHARE = 10.0, 0.1
ENOUGH_FOR_P99 = 100
PERCENTILES = (50.0, 90.0, 99.0)  # in every report
_SLO_KEYS = ("ttft", "tpot", "e2el")
_UNITS = {"ms": 1.0, "s": 1000.0, "": 1.0}


class Latency(NamedTuple):
    """A kind of latency, such as TTFT, in reports, tables and plots.

    A report has its mean and percentiles under `key` + "_ms".
    """

    name: str
    key: str
    about: str
    read: Callable[[Record], Iterable[float | None]]  # its values, in seconds, in one request


LATENCIES = (
    Latency("TTFT", "ttft", "to the first token", lambda record: (record.ttft,)),
    Latency("ITL", "itl", "between chunks", lambda record: record.gaps),
    Latency("TPOT", "tpot", "per token after the first", lambda record: (record.tpot,)),
    Latency("E2E", "e2el", "to the last token", lambda record: (record.e2e,)),
)
Report = Mapping[str, object]  # as `summarise` makes it
Reports = Mapping[str, Report]  # by the name of the target or policy
Records = Mapping[str, Sequence[Record]]


def parse_slo(text: str) -> dict[str, float]:
    """Read an SLO: `ttft:500ms,tpot:50ms` -> {"ttft": 500.0, "tpot": 50.0}, in milliseconds. Raises BadOption.

    A bare number is milliseconds and blanks separate like commas, as in `vllm bench serve --goodput`; `=` works like a
    colon, as in `hitherto serve --slo`.
    """
    slo = {}
    for part in text.replace(",", " ").split():
        key, _, value = part.replace("=", ":", 1).partition(":")
        key = {"e2e": "e2el"}.get(key, key)
        number = value.rstrip("ms")
        try:
            limit = float(number) * _UNITS[value[len(number) :]]
        except (ValueError, KeyError):
            limit = -1.0
        if key not in _SLO_KEYS or not limit > 0:
            raise BadOption(f"{part!r}: an SLO reads ttft:500ms, tpot:50ms or e2el:10s, joined by commas")
        slo[key] = limit
    if not slo:
        raise BadOption("an SLO reads ttft:500ms, tpot:50ms or e2el:10s, joined by commas")
    return slo


def began(records: Sequence[Record]) -> float:
    """Return when the first request of a run was due (seconds); reports measure times from then."""
    return min((record.due for record in records), default=0.0)


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """Return whether a request that succeeded was answered within every limit (ms).

    A reply of one token has a TPOT of 0, as in `vllm bench serve`.
    """
    values = {"ttft": record.ttft or 0.0, "tpot": record.tpot or 0.0, "e2el": record.e2e}
    return all(values[key] * 1000 <= limit for key, limit in slo.items())


def percentile_name(percentile: float) -> str:
    return f"p{percentile:g}"


def spread(seconds: Iterable[float | None], percentiles: Iterable[float] = ()) -> dict[str, float] | None:
    """Return mean, p50, p90, p99, further `percentiles` and max of these times, in ms; None if there are no values."""
    values = np.array([value for value in seconds if value is not None])
    if not values.size:
        return None
    values *= 1000
    asked = sorted({*PERCENTILES, *percentiles})
    return {
        "mean": round(float(values.mean()), 3),
        **{percentile_name(one): round(float(at), 3) for one, at in zip(asked, np.percentile(values, asked))},
        "max": round(float(values.max()), 3),
    }


def summarise(
    run: Load, slo: Mapping[str, float] | None = None, percentiles: Sequence[float] = PERCENTILES
) -> dict[str, object]:
    """Compute all figures of one run, and return them as a report.

    A figure is None if the server did not send what it is computed from, such as usage or headers. `slo`: limits in
    milliseconds, as from `parse_slo`; `percentiles`: the percentiles of latencies that tables show.
    """
    good = [record for record in run.done if record.error is None]
    seconds = max(run.ended - run.began, 1e-9)
    examples = {record.error: record.detail for record in reversed(run.done) if record.error}
    output = sum(record.outputs for record in good)
    goodput = None
    if slo:  # a request that failed, or was never sent because the turn before it failed, counts as missed
        met = sum(meets(record, slo) for record in good)
        met_share = share(met, len(run.done) + (0 if run.interrupted else run.not_sent)) or 0.0
        goodput = {"slo_ms": dict(slo), "met": met, "share": met_share, "request_goodput": round(met / seconds, 3)}
    return {
        "duration_s": round(seconds, 3),
        "interrupted": run.interrupted,
        "requests": len(run.done),
        "completed": len(good),
        "failed": len(run.done) - len(good),
        "not_sent": run.not_sent,
        "conversations": len(run.conversations),
        "offered": {
            "rate": run.offered.rate and round(run.offered.rate, 3),
            "seconds": round(run.offered.seconds, 3),
            "later_turns": run.offered.later,
            "think_s": round(run.offered.think, 3),
        },
        "percentiles": [percentile_name(one) for one in percentiles],
        "errors": dict(Counter(record.error for record in run.done if record.error)),
        "error_examples": examples,
        "request_throughput": round(len(good) / seconds, 3),
        "output_throughput": round(output / seconds, 3),
        "total_output_tokens": output,
        **{
            f"{one.key}_ms": spread((value for record in good for value in one.read(record)), percentiles)
            for one in LATENCIES
        },
        "ttft_from_due_ms": spread(
            (record.ttft + record.lateness for record in good if record.first is not None), percentiles
        ),
        "goodput": goodput,
        "cache": cache_figures(good),
        "replicas": _replicas(run.done, run.replicas),
        "generator": _generator(run, seconds),
    }


def cache_figures(records: Sequence[Record]) -> dict[str, object]:
    """Return how many prompt tokens the requests had, and how many of them were cached.

    There are two counts of cached tokens, with a hit rate each: those that engines reported, and those that a gateway
    predicted. Each hit rate covers only the requests for which its count is known. `prefill_tokens`: the prompt tokens
    that engines had to compute, in requests whose cached tokens were reported.
    """
    told = [one for one in records if one.prompt_tokens is not None]
    reported = [(one.prompt_tokens, one.cached_tokens) for one in told if one.cached_tokens is not None]
    predicted = [(one.prompt_tokens, one.predicted_tokens) for one in told if one.predicted_tokens is not None]
    prompt, cached = map(sum, zip(*reported)) if reported else (None, None)
    hoped_of, hoped = map(sum, zip(*predicted)) if predicted else (None, None)
    return {
        "prompt_tokens": sum(one.prompt_tokens for one in told) if told else None,
        "reported_on": len(reported),
        "predicted_on": len(predicted),
        "cached_tokens": cached,
        "predicted_tokens": hoped,
        "hit_rate": share(cached, prompt),
        "predicted_hit_rate": share(hoped, hoped_of),
        "prefill_tokens": None if prompt is None else prompt - cached,
    }


def _replicas(records: list[Record], known: Iterable[str]) -> dict[str, dict[str, object]]:
    """Return the numbers of requests and the cache figures by replica, including `known` replicas without requests.

    The response header `x-hitherto-replica` names the replica; without it and without `known` the result is empty.
    """
    by_name: dict[str, list[Record]] = {name: [] for name in known}
    for record in records:
        if record.replica is not None:
            by_name.setdefault(record.replica, []).append(record)
    found = {}
    for name, mine in sorted(by_name.items(), key=lambda item: (len(item[0]), item[0])):
        good = [record for record in mine if record.error is None]
        found[name] = {"requests": len(mine), "failed": len(mine) - len(good), **cache_figures(good)}
    return found


def _generator(run: Load, seconds: float) -> dict[str, object]:
    """Return how late and how busy the generator was, and whether it, not the server, was the limit.

    `seconds`: duration of the run. In a run under a second, the busiest second's CPU share is the average share.
    """
    late = spread(record.lateness for record in run.done)
    busy = run.cpu_seconds / seconds
    ttft = spread(record.ttft for record in run.done if record.error is None)
    judged = ("p50", "p90", "p99") if len(run.done) >= ENOUGH_FOR_P99 else ("p50", "p90")
    matters = late and any(late[key] > max(LATE_MS, LATE_SHARE * ttft[key] if ttft else 0.0) for key in judged)
    full = max(busy, run.busiest_second) > BUSY_CORE
    return {
        "loop": "closed" if run.users else "bounded" if run.max_concurrency else "open",
        "users": run.users,
        "max_concurrency": run.max_concurrency,
        "lateness_ms": late,
        "cpu_share": round(busy, 3),
        "cpu_busiest_second": round(max(busy, run.busiest_second), 3),
        "connections": run.connections,
        "was_the_limit": busy > BUSY_CORE or bool(matters),
        "core_was_full": full,
    }


def fair_share(report: Report) -> float | None:
    """Return the busiest replica's requests over the mean (1.0 is even), or None with fewer than two replicas."""
    counts = [figures["requests"] for figures in report["replicas"].values()]
    return max(counts) * len(counts) / sum(counts) if len(counts) > 1 and sum(counts) else None


def exit_code(reports: Iterable[Report], whole: bool) -> int:
    """Return the exit code: 130 if the user stopped the command, 1 if a target answered no request, else 0.

    `whole`: whether there is a report for every target and every seed; if not, the user stopped the command.
    """
    reports = list(reports)
    if not whole or any(report["interrupted"] for report in reports):
        return INTERRUPTED
    return 0 if all(report["completed"] for report in reports) else 1


def now() -> str:
    """Return the wall-clock date and time as reports show it."""
    return datetime.now().astimezone().isoformat(" ", "seconds")


def setting(command: list[str], seed: int, seeds: int = 1, date: str | None = None) -> dict[str, object]:
    """Return how figures were made: machine, versions, command, seed, and for measurements when they began (`date`)."""
    versions = {name: version(name) for name in ("hitherto", "uvloop", "httptools")}
    return {
        "command": shlex.join(command),
        **({"date": date} if date else {}),
        "seed": seed,
        **({"seeds": seeds} if seeds > 1 else {}),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions},
    }


def machine() -> str:
    """Return cores, processor and kernel in one line."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass  # not Linux
    return (
        f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores, "
        f"{model}, {platform.system()} {platform.release()}"
    )
