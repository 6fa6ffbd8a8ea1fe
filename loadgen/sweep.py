"""`loadgen sweep`: the highest request rate at which the SLO is kept.

A rate keeps it when at least a share, `--attainment`, of its requests is answered within every limit; failed and unsent
ones count as not. From the first rate on the rate is doubled while that is so, or halved until it is; then the gap
between the highest rate that kept it and the lowest that did not is halved (by factors), until they are within
`--precision` of each other. All steps ask the same load, its starts moved together or apart, with other tokens, so that
no step finds the caches warm from the one before.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from loadgen import options, run
from loadgen.drive import target
from loadgen.drive.client import Client
from loadgen.options import ATTAINMENT, BadOption
from loadgen.report import files, show
from loadgen.report.summary import Records, Report, setting, summarise
from loadgen.workload import datasets
from loadgen.workload.conversations import Workload

PRECISION = 0.05
_MOST_STEPS, _MOST_HALVINGS = 16, 5
_LEAST_SECONDS = 5.0  # what is sent in less is a burst and no rate


@dataclass(slots=True)
class Search:
    """Which rate to try next. Pure: it is told what became of each, and presumes that more load is not answered
    sooner."""

    first: float
    precision: float = PRECISION
    limit: float = math.inf  # rates above this cannot be measured
    kept: float | None = None  # the highest rate that keeps the SLO so far
    missed: float | None = None  # the lowest that does not
    steps: int = 0
    stopped: str = ""  # why there is no next rate

    @property
    def rate(self) -> float | None:
        """The next rate to try, None when the search is over."""
        if self.stopped:
            return None
        if self.kept is None:
            return min(self.first, self.limit) if self.missed is None else self.missed / 2
        return min(self.kept * 2, self.limit) if self.missed is None else math.sqrt(self.kept * self.missed)

    def tell(self, rate: float, keeps: bool) -> None:
        """What became of a rate, the one asked for or any other between `kept` and `missed`."""
        self.steps += 1
        if keeps:
            self.kept = rate
        else:
            self.missed = rate
        if self.kept and self.missed and self.missed / self.kept <= 1 + self.precision:
            self.stopped = f"Stopped where the highest rate that keeps it and the lowest that does not were within {self.precision * 100:g} %."
        elif self.missed is None and self.kept >= self.limit:
            self.stopped = (
                f"Stopped at {self.limit:.4g} requests/s: a higher rate would send all of this load in less than "
                f"{_LEAST_SECONDS:g} s. Ask more (--num-prompts)."
            )
        elif self.kept is None and self.missed <= self.first / 2**_MOST_HALVINGS:
            self.stopped = f"Stopped: not even {self.missed:.4g} requests/s keep it."
        elif self.steps >= _MOST_STEPS:
            self.stopped = f"Stopped after {_MOST_STEPS} steps."


@dataclass(slots=True)
class Sweep:
    """A search with what was measured on its way."""

    search: Search
    slo: Mapping[str, float]
    attainment: float
    steps: list[dict[str, object]]

    def add(self, rate: float, report: Report) -> dict[str, object]:
        """One rate's report, with limits that `summarise` was given."""
        share = report["goodput"]["share"]
        step = {"rate": rate, "share": share, "kept": share >= self.attainment, "report": report}
        self.steps.append(step)
        self.search.tell(rate, step["kept"])
        return step

    @property
    def answer(self) -> str:
        slo = f"{self.attainment * 100:g} % of requests within {show.limits(self.slo)}"
        if self.search.kept is None:
            return f"No rate that was tried kept the SLO: {slo}."
        return f"{self.search.kept:.4g} requests/s is the highest rate that kept the SLO: {slo}." + (
            f" {self.search.missed:.4g} did not." if self.search.missed else ""
        )

    def figures(self) -> dict[str, object]:
        """For `--json`, and for the page under `about["sweep"]`."""
        return {
            "rate": self.search.kept,
            "slo_ms": dict(self.slo),
            "attainment": self.attainment,
            "precision": self.search.precision,
            "answer": self.answer,
            "stopped": self.search.stopped,
            "steps": self.steps,
        }


def own_rate(work: Workload) -> float:
    """Requests a second that a load's own starts ask for. Raises BadOption where all begin at once."""
    if not work.starts or work.starts[-1] <= work.starts[0]:
        raise BadOption(
            "a sweep needs a load whose conversations begin at different times: more of them (--num-prompts), "
            "and a finite --request-rate"
        )
    return work.requests * (len(work.starts) - 1) / len(work.starts) / (work.starts[-1] - work.starts[0])


def at_rate(work: Workload, rate: float) -> Workload:
    """The same load with its starts moved together or apart, so that it asks `rate` requests a second."""
    factor = own_rate(work) / rate
    return replace(work, starts=[start * factor for start in work.starts])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_target(parser)
    group = parser.add_argument_group(
        "sweep", "from the load's own rate (--request-rate, or a trace's) to the highest that keeps --goodput"
    )
    options.flags(
        group,
        ("--attainment", options.attainment, "SHARE", ATTAINMENT, "share of the requests that must be within the limits (default %(default)g)"),
        ("--precision", options.positive, "P", PRECISION, "stop where kept and missed rates are this near, as a share (default %(default)g)"),
    )  # fmt: skip
    datasets.add_workload(parser)
    files.add_report(parser)


def check(args: argparse.Namespace) -> None:
    run.check(args)
    if not args.slo:
        raise BadOption("a sweep needs an SLO, e.g. --goodput ttft:500ms,tpot:50ms")
    for flag in ("users", "max_concurrency", "ramp_up_strategy"):
        if getattr(args, flag):
            raise BadOption(f"--{flag.replace('_', '-')}: a sweep is an open loop, and sets the rate itself")


async def sweep_verb(args: argparse.Namespace, console: Console) -> int:
    check(args)
    work = datasets.workload(args)
    own = own_rate(work)
    show.print_notes(console, work.notes)
    if isinstance(work.conversations[0].turns[0].messages[-1].get("content"), str):
        show.print_notes(
            console, ["The texts of this load are the same in every step, so caches may be warm from the step before."]
        )
    sweep = Sweep(
        Search(args.request_rate or own, args.precision, own * work.starts[-1] / _LEAST_SECONDS),
        files.slo(args),
        args.attainment,
        [],
    )
    client = Client(args.base_url, target.headers(args), args.timeout)
    model, records = await target.model_of(client, args.model), {}
    while (rate := sweep.search.rate) is not None:
        other_tokens = argparse.Namespace(**{**vars(args), "seed": args.seed + len(sweep.steps)})
        load = await run.ask(
            args, console, at_rate(work, rate), client, target.asking(other_tokens, model), f"{rate:.4g}/s"
        )
        if load.interrupted:
            sweep.search.stopped = "Stopped early, by hand."
            break
        step = sweep.add(rate, summarise(load, sweep.slo))
        records[name(step)] = load.done
        console.print(f"[dim]{rate:.4g} requests/s: {show.percent(step['share'])} within the SLO[/]")
        sweep.search.stopped = hopeless(step) or sweep.search.stopped
    client.close()
    conclude(
        args,
        console,
        sweep,
        records,
        {
            "target": client.base_url,
            "model": model.name,
            "workload": datasets.describe(args, work),
            "setting": setting(["loadgen", *sys.argv[1:]], args.seed),
        },
    )
    return 0 if sweep.search.kept else 1


def hopeless(step: Mapping[str, object]) -> str:
    """Why it makes no sense to go on, if so."""
    report = step["report"]
    if not report["completed"]:
        return f"Stopped: no request was answered ({', '.join(report['errors']) or 'none was sent'})."
    if not step["kept"] and report["generator"]["core_was_full"]:
        return f"Stopped: at {step['rate']:.4g} requests/s the generator's own core was full. Use more --processes."
    return ""


def name(step: Mapping[str, object]) -> str:
    return f"{step['rate']:.4g}/s"


def conclude(
    args: argparse.Namespace, console: Console, sweep: Sweep, records: Records, about: Mapping[str, object]
) -> None:
    console.print(table(sweep))
    console.print(f"[bold]{sweep.answer}[/]\n[dim]{sweep.search.stopped}[/]", soft_wrap=True)
    for step in sweep.steps:
        if trouble := show.errors(step["report"]) or show.caution(step["report"]):
            console.print(f"\n[bold]{name(step)}[/]")
            console.print(trouble)
    figures, steps = {**about, "sweep": sweep.figures()}, sorted(sweep.steps, key=lambda step: step["rate"])
    if not steps:
        return files.write_json(args.json, figures, console)
    files.write(
        args,
        figures,
        {name(step): step["report"] for step in steps},
        {name(step): records[name(step)] for step in steps},
        console,
        {**about, "sweep": {**sweep.figures(), "steps": steps}},
    )


def table(sweep: Sweep) -> Table:
    made = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for title in (
        "rate /s",
        "within the SLO",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "hit rate",
        "answered /s",
    ):
        made.add_column(title, justify="right")
    for step in sorted(sweep.steps, key=lambda step: step["rate"]):
        report = step["report"]
        ttft, tpot = report["ttft_ms"] or {}, report["tpot_ms"] or {}
        made.add_row(
            f"{step['rate']:.4g}",
            f"[{'green' if step['kept'] else 'red'}]{show.percent(step['share'])}[/]",
            *(
                show.milliseconds(value)
                for value in (ttft.get("p50"), ttft.get("p99"), tpot.get("p50"), tpot.get("p99"))
            ),
            show.percent(report["cache"]["hit_rate"]),
            f"{report['request_throughput']:.2f}",
        )
    return made
