"""`loadgen sweep`: the highest request rate at which the SLO is kept.

A rate keeps the SLO when at least the share `--attainment` of its requests is answered within every limit; failed and
unsent requests count as missed. Starting from the first rate, the rate is doubled as long as it keeps the SLO, or
halved until it does. Then the geometric mean of the highest rate that kept the SLO and the lowest that missed it is
tried, until the two are within `--precision` of each other. With `--rates` only the given rates are tried, lowest
first.

A step is one rate that is tried. All steps send the same conversations, with their start times stretched or compressed.
Each step has other made-up tokens, so that it does not find its prompts cached by the step before.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from loadgen import options, run
from loadgen.drive import target
from loadgen.drive.client import Client
from loadgen.options import ATTAINMENT, BadOption
from loadgen.report import files, rates, seeds, show
from loadgen.report.summary import Records, Report, now, setting
from loadgen.report.tables import Grid, drawn
from loadgen.workload import datasets
from loadgen.workload.conversations import Workload, at_rate, is_text, offer

PRECISION = 0.05
_MOST_STEPS, _MOST_HALVINGS = 16, 5
_LEAST_SECONDS = 5.0  # a load sent in less time is a burst, not a rate
BY_HAND = "Stopped early, by hand."


@dataclass(slots=True)
class Search:
    """A search for the highest rate that keeps the SLO: which rate to try next, given the results so far.

    Performs no I/O. Assumes that a higher rate never makes replies faster.
    """

    first: float
    precision: float = PRECISION
    limit: float = math.inf  # rates above this would send the whole load in too short a time to measure them
    kept: float | None = None  # the highest rate that keeps the SLO so far
    missed: float | None = None  # the lowest rate so far that does not keep it
    steps: int = 0  # rates tried so far
    stopped: str = ""  # why there is no next rate
    given: Sequence[float] = ()  # the only rates to try, ascending; empty: the search chooses them

    @property
    def rate(self) -> float | None:
        """The next rate to try, or None when the search is over."""
        if self.stopped:
            return None
        if self.given:
            return self.given[self.steps]
        if self.kept is None:
            return min(self.first, self.limit) if self.missed is None else self.missed / 2
        return min(self.kept * 2, self.limit) if self.missed is None else math.sqrt(self.kept * self.missed)

    def tell(self, rate: float, keeps: bool) -> None:
        """Record whether `rate`, the next rate to try, keeps the SLO; set `stopped` if the search is over now."""
        self.steps += 1
        if self.given:
            if not keeps:
                self.missed = self.missed or rate
            elif not self.missed:
                self.kept = rate
            if self.steps == len(self.given):
                self.stopped = "All rates that were asked for have been tried."
            return
        if keeps:
            self.kept = rate
        else:
            self.missed = rate
        if self.kept and self.missed and self.missed / self.kept <= 1 + self.precision:
            near = f"within {self.precision * 100:g} %"
            self.stopped = f"Stopped where the highest rate that keeps it and the lowest that does not were {near}."
        elif self.missed is None and self.kept >= self.limit:
            why = f"a higher rate would send all of this load in less than {_LEAST_SECONDS:g} s"
            self.stopped = f"Stopped at {self.limit:.4g} requests/s: {why}. Ask more (--num-prompts)."
        elif self.kept is None and self.missed <= self.first / 2**_MOST_HALVINGS:
            self.stopped = f"Stopped: not even {self.missed:.4g} requests/s keep it."
        elif self.steps >= _MOST_STEPS:
            self.stopped = f"Stopped after {_MOST_STEPS} steps."


@dataclass(slots=True)
class Sweep:
    """A search and the reports of the rates it tried."""

    search: Search
    slo: Mapping[str, float]
    attainment: float
    steps: list[dict[str, object]]

    def add(self, rate: float, report: Report) -> dict[str, object]:
        """Record the report of one rate, and return the step, a dictionary with `rate`, `share`, `kept` and `report`.

        `share` is the share of the requests within the SLO, and `kept` whether this is enough. `report`: as `summarise`
        makes it with the SLO's limits, so that it has `goodput`.
        """
        share = report["goodput"]["share"]
        step = {"rate": rate, "share": share, "kept": share >= self.attainment, "report": report}
        self.steps.append(step)
        self.search.tell(rate, step["kept"])
        return step

    @property
    def answer(self) -> str:
        kept, missed = self.search.kept, self.search.missed
        slo = f"{self.attainment * 100:g} % of requests within {show.limits(self.slo)}"
        if kept is None:
            return f"No rate that was tried kept the SLO: {slo}."
        if short := rates.never_reached(next(step["report"] for step in self.steps if step["rate"] == kept)):
            short = f" But {short}: ask more (--num-prompts)."
        if missed is None:
            return f"At least {kept:.4g} requests/s, the highest rate that was tried, keep the SLO: {slo}.{short}"
        return f"{kept:.4g} requests/s is the highest rate that kept the SLO: {slo}. {missed:.4g} did not.{short}"

    def figures(self) -> dict[str, object]:
        """Return the figures that `--json` and the HTML page have under "sweep"."""
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
    """Return the requests per second that the load's own start times offer.

    Raises BadOption if all conversations begin at once, which is no rate.
    """
    rate = offer(work.conversations, work.starts).rate
    if rate is None:
        needed = "more of them (--num-prompts), and a finite --request-rate"
        raise BadOption(f"a sweep needs a load whose conversations begin at different times: {needed}")
    return rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_target(parser)
    group = parser.add_argument_group(
        "sweep", "from the load's own rate (--request-rate, or a trace's) to the highest that keeps --goodput"
    )
    options.flags(
        group,
        ("--attainment", options.attainment, "SHARE", ATTAINMENT, "share of the requests that must be within the limits (default %(default)g)"),
        ("--precision", options.positive, "P", PRECISION, "stop where kept and missed rates are this near, as a share (default %(default)g)"),
        ("--rates", options.rates, "R,R", (), "try these rates and no others"),
    )  # fmt: skip
    datasets.add_workload(parser)
    datasets.add_seeds(parser)
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
    began, works = now(), [datasets.workload(one) for one in datasets.of_seeds(args)]
    work, own = works[0], own_rate(works[0])
    show.print_notes(console, work.notes)
    if is_text(work.conversations):
        same = "The texts of this load are the same in every step, so caches may be warm from the step before."
        show.print_notes(console, [same])
    search = Search(args.request_rate or own, args.precision, own * work.starts[-1] / _LEAST_SECONDS, given=args.rates)
    sweep = Sweep(search, files.slo(args), args.attainment, [])
    client = Client(args.base_url, target.headers(args), args.timeout)
    model, records = await target.model_of(client, args.model), {}
    with run.until_interrupted(console):
        while (rate := search.rate) is not None:
            reports = []
            for number, each in enumerate(works):  # one load per seed; each step and seed has made-up tokens of its own
                salt = args.seed + len(sweep.steps) * len(works) + number
                asking = target.asking(argparse.Namespace(**{**vars(args), "seed": salt}), model)
                load = await run.ask(args, console, at_rate(each, rate), client, asking, f"{rate:.4g}/s")
                if load.interrupted:
                    search.stopped = BY_HAND
                    break
                reports.append(run.figures(args, load))
                records[seeds.label(f"{rate:.4g}/s", args.seed + number, args.seeds)] = load.done
            else:
                step = sweep.add(rate, seeds.merged(reports))
                console.print(f"[dim]{rate:.4g} requests/s: {show.percent(step['share'])} within the SLO[/]")
                search.stopped = hopeless(step) or search.stopped
    client.close()
    about = {
        "target": client.base_url,
        "model": model,
        "workload": datasets.describe(args, work),
        "setting": setting(["loadgen", *sys.argv[1:]], args.seed, args.seeds, began),
    }
    conclude(args, console, sweep, records, about)
    if not search.stopped or search.stopped == BY_HAND:
        return options.INTERRUPTED
    return 0 if search.kept else 1


def hopeless(step: Mapping[str, object]) -> str:
    """Return why the search cannot go on after this step, or an empty string."""
    report = step["report"]
    if not report["completed"]:
        return f"Stopped: no request was answered ({', '.join(report['errors']) or 'none was sent'})."
    if not step["kept"] and report["generator"]["core_was_full"]:
        return f"Stopped: at {step['rate']:.4g} requests/s the generator's own core was full."
    return ""


def conclude(
    args: argparse.Namespace, console: Console, sweep: Sweep, records: Records, about: Mapping[str, object]
) -> None:
    """Print the answer and the curve that was measured, lowest rate first, and write the requested files."""
    console.print(drawn(table(sweep), (), "dim"))
    console.print(f"[bold]{sweep.answer}[/]\n[dim]{sweep.search.stopped}[/]", soft_wrap=True)
    reports = {f"{step['rate']:.4g}/s": step["report"] for step in sorted(sweep.steps, key=lambda step: step["rate"])}
    for name in [*reports][-1:]:
        console.print(f"[dim]{name}: {rates.rates(reports[name])}[/]", soft_wrap=True)
    show.print_troubles(console, reports)
    figures = {**about, "sweep": sweep.figures()}
    if not reports:
        return files.write_json(args.json, figures, console)
    files.write(args, figures, reports, records, console, {**figures, "tried": table(sweep)})


def table(sweep: Sweep) -> Grid:
    """Return the results as a table with a row for each rate that was tried, lowest first."""
    steps = sorted(sweep.steps, key=lambda step: step["rate"])
    return show.tried(("offered /s",), [((f"{step['rate']:.4g}",), step["report"], step["kept"]) for step in steps])
