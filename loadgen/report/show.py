"""Figures as tables and sentences for the terminal (rich); missing figures are named, not left out."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from loadgen.options import KEY_NEEDED
from loadgen.report import noise, rates, seeds, warm
from loadgen.report.noise import Row
from loadgen.report.shares import percent as percentage
from loadgen.report.summary import Report, Reports, fair_share
from loadgen.report.tables import Cell, Fitting, Grid, fitted

_FIGURE_SPACE = re.compile(r"(?<=\d) (?=(?:%|ms|s|points|/s)(?!\w))")
_SHARES = 4  # replicas whose requests are listed one by one
LATENCIES = (
    ("TTFT", "ttft_ms", "to the first token"),
    ("ITL", "itl_ms", "between chunks"),
    ("TPOT", "tpot_ms", "per token after the first"),
    ("E2E", "e2el_ms", "to the last token"),
)


def milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:,.1f} ms"


def limits(slo: Mapping[str, float]) -> str:
    return ", ".join(f"{key.upper()} {milliseconds(value)}" for key, value in slo.items())


def percent(value: float | None) -> str:
    return "–" if value is None else percentage(value)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"


def count(value: int | float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def run_report(report: Report) -> RenderableType:
    """Return the output of `loadgen run`; where nothing was answered, only what went wrong."""
    parts: list[RenderableType] = [_head(report)]
    if report["completed"]:
        parts += [_latencies(report), _facts(report)]
    for trouble in troubles(report):
        parts += ["", trouble]
    return Group(*parts)


def _head(report: Report) -> Text:
    text = Text("\n")
    text.append(f"{count(report['completed'])} of {count(report['requests'])} requests answered", "bold")
    text.append(
        f" in {report['duration_s']:.1f} s · {report['request_throughput']:.2f} requests/s · "
        f"{report['output_throughput']:,.0f} output tokens/s",
        "dim",
    )
    if by_seed := report.get("by_seed"):
        text.append(f" · mean of {len(by_seed)} seeds, range in brackets", "dim")
    if report["not_sent"]:
        text.append(f" · {count(report['not_sent'])} not sent{_why_not_sent(report)}", "yellow")
    if report["interrupted"]:
        text.append(" · stopped early", "yellow")
    return text


def _why_not_sent(report: Report) -> str:
    """Return why turns were not sent, which is certain only in a run that ended by itself: see `Load.not_sent`."""
    if report["interrupted"] or not report["failed"]:
        return ""
    return f": later turn{'' if report['not_sent'] == 1 else 's'} of conversations that failed"


def latencies(report: Report, *more: str) -> Grid:
    """Return a table of mean, percentiles and the figures `more` of each latency."""
    names = ("mean", *report["percentiles"], *more)
    waited = (("TTFT", "ttft_from_due_ms", "from when it was due"),) if report["generator"]["was_the_limit"] else ()
    rows = [
        [Cell(label), *(Cell(written(report, path_of(key, name), milliseconds)) for name in names), Cell(about, "soft")]
        for label, key, about in (*LATENCIES[:1], *waited, *LATENCIES[1:])
    ]
    return Grid(("", *names, ""), rows)


def _latencies(report: Report) -> Fitting:
    grid = latencies(report)
    return fitted(grid, "by_seed" in report, (0, len(grid.heads) - 1), "dim")


def _facts(report: Report) -> Table:
    cache, generator = report["cache"], report["generator"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("rate", rates.rates(report))
    if goodput := report["goodput"]:
        table.add_row(
            "goodput",
            f"{goodput['request_goodput']:.2f} requests/s "
            f"({written(report, path_of('goodput', 'share'), percent)} within {limits(goodput['slo_ms'])})",
        )
    table.add_row(
        "prompt tokens",
        count(cache["prompt_tokens"]) if cache["prompt_tokens"] is not None else "the server reports no usage",
    )
    table.add_row(
        "cached, reported",
        _share(
            cache["cached_tokens"],
            cache["hit_rate"],
            "the engine does not report it (`hitherto doctor` says how it would)",
        ),
    )
    if cache["predicted_on"]:
        table.add_row("cached, predicted", _share(cache["predicted_tokens"], cache["predicted_hit_rate"], ""))
    if report["replicas"]:
        table.add_row(
            "replicas",
            "  ".join(f"{name} {count(figures['requests'])}" for name, figures in report["replicas"].items()),
        )
    if late := generator["lateness_ms"]:
        table.add_row("generator", _sender(generator, late))
    return table


def _sender(generator: Mapping[str, object], late: Mapping[str, float]) -> str:
    """Describe how the generator sent, how late and how busy it was."""
    loop = {
        "closed": f"closed loop of {generator['users']}",
        "bounded": f"at most {generator['max_concurrency']} at once",
        "open": "open loop",
    }[generator["loop"]]
    return (
        f"{loop}; sent {milliseconds(late['p50'])} late at p50, {milliseconds(late['p99'])} at p99, "
        f"used {generator['cpu_share'] * 100:.0f} % of a core"
        + (f" in the busiest of {generator['processes']} processes" if generator["processes"] > 1 else "")
    )


def _share(tokens: int | None, rate: float | None, missing: str) -> str:
    return missing if tokens is None else f"{count(tokens)} ({percent(rate)})"


def errors(report: Report) -> Text | None:
    """Return the errors by class with an example and a remedy each, or None."""
    if not report["errors"]:
        return None
    text = Text()
    for kind, number in sorted(report["errors"].items(), key=lambda item: -item[1]):
        text.append(f"{number} × {kind}", "bold red")
        text.append(f"  {report['error_examples'][kind]}\n", "dim")
        if "vocabulary" in report["error_examples"][kind].lower():
            text.append(
                "  The load's made-up token ids are below --vocab-size; give it as many as the engine's model has.\n",
                "yellow",
            )
        if kind == "http_404":
            text.append("  The server knows no such model or path: see --model and --endpoint.\n", "yellow")
        if kind == "http_401":
            text.append(f"  The server answers 401: {KEY_NEEDED}.\n", "yellow")
    text.rstrip()
    return text


def caution(report: Report) -> Text | None:
    """Return a warning if the generator was the limit, or None."""
    if not report["generator"]["was_the_limit"]:
        return None
    if report["generator"]["max_concurrency"]:
        return Text(
            f"--max-concurrency {report['generator']['max_concurrency']} held requests back: this was no open loop, "
            "and the latencies leave out the time requests waited to be sent.",
            "yellow",
        )
    generator = report["generator"]
    if generator["core_was_full"]:
        why = (
            f"Its core was full ({generator['cpu_busiest_second'] * 100:.0f} % in the busiest second): "
            f"use --processes {generator['processes'] * 2} or a lower rate."
        )
    else:
        why = "Its core was not full, so the machine was busy with something else: lower the rate or use free cores."
    return Text(
        f"The generator itself was late or busy: these figures describe it as much as the server. {why}", "yellow"
    )


def troubles(report: Report) -> list[Text]:
    """Return what affects all figures: errors, a generator that was the limit, and caches that were warm."""
    found = [trouble for trouble in (errors(report), caution(report)) if trouble]
    return found + [Text(sentence, "yellow") for sentence in warm.notice(report)]


def print_troubles(console: Console, reports: Reports) -> None:
    for name, report in reports.items():
        for trouble in troubles(report):
            console.print(f"\n[bold]{name}[/]")
            console.print(trouble)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)


def comparison_table(reports: Reports, rows: Sequence[Row] | None = None) -> Fitting:
    """Return a table with a column per target.

    The best value of a row is green, one worse than that of the first target red. Where a terminal is too narrow for
    all targets, the others follow below.
    """
    return fitted(compared(reports, rows), any("by_seed" in report for report in reports.values()), split=True)


def compared(reports: Reports, rows: Sequence[Row] | None = None, most: int = _SHARES) -> Grid:
    """Return a row per known figure, and the requests of each replica, individually up to `most` replicas."""
    found = []
    for row in rows or rows_of(reports):
        known = [value for one in reports.values() if (value := seeds.mean(one, row.read)) is not None]
        best = row.better(known) if row.better and known else None
        cells = [Cell(written(one, row.read, row.form), _look(row, one, best, reports)) for one in reports.values()]
        found += [[Cell(row.label), *cells]] if known else []
    if any(report["replicas"] for report in reports.values()):
        found.append([Cell("requests per replica"), *(Cell(shares(report, most)) for report in reports.values())])
    return Grid(("", *reports), found)


def _look(row: Row, report: Report, best: float | None, reports: Reports) -> str:
    """Return the style of a figure: the best of its row, if by more than noise, or worse than the first target's."""
    (first, *_), verdict = reports.values(), noise.Verdict
    beats_one = any(noise.judged(row, report, other) is verdict.BETTER for other in reports.values())
    if best is not None and seeds.mean(report, row.read) == best and beats_one:
        return "best"
    return "worse" if noise.judged(row, report, first) is verdict.WORSE else ""


def written(report: Report, read: Callable[[Report], float | None], form: Callable[[float], str]) -> str:
    """Return a figure as text; of several seeds their mean, with their range in brackets unless they agree."""
    values = seeds.each(report, read)
    if not values:
        return "–"
    mean, low, high = form(seeds.mean(report, read)), form(min(values)), form(max(values))
    if low == high:
        return mean
    number, _, unit = low.rpartition(" ")
    return f"{mean} ({number if number and high.endswith(f' {unit}') else low}–{high})"


def bullets(sentences: Iterable[str]) -> Table:
    """Return a bulleted list; each sentence is wrapped with a hanging indent."""
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row("  •", Sentence(sentence))
    return table


class Sentence:
    """Text that is never broken between a figure and its unit."""

    def __init__(self, text: str):
        self._text = _FIGURE_SPACE.sub("\N{NO-BREAK SPACE}", text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # textwrap instead of rich, which breaks lines at no-break spaces too.
        for line in textwrap.wrap(self._text, options.max_width, break_on_hyphens=False):
            yield Text(line.replace("\N{NO-BREAK SPACE}", " "))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        words = max(map(len, self._text.split(" ")), default=1)
        return Measurement(min(words, options.max_width), min(len(self._text), options.max_width))


def shares(report: Report, most: int = _SHARES) -> str:
    """Return the requests of each replica in the order of names; with more than `most`, the least and the most."""
    requests = [figures["requests"] for figures in report["replicas"].values()]
    if len(requests) > most:
        return f"{count(min(requests))} to {count(max(requests))}"
    return "  ".join(map(count, requests)) or "–"


def path_of(*path: str) -> Callable[[Report], float | None]:
    """Return a reader of a nested figure, as in `path_of("ttft_ms", "p99")`; it reads None where a key is missing."""

    def read(report: Report) -> float | None:
        value = report
        for key in path:
            value = value.get(key) if value else None
        return value

    return read


def latency(label: str, key: str, name: str) -> Row:
    """Return the row of one percentile or mean, as in `latency("TTFT", "ttft_ms", "p99")`."""
    return Row(f"{label} {name}", path_of(key, name), milliseconds, min, noise.of_latency(name))


def rows_of(reports: Reports) -> list[Row]:
    """Return the rows of a comparison, with the requested percentiles."""
    names = ("mean", *next(iter(reports.values()))["percentiles"])
    latencies = [
        latency(label, key, name)
        for label, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2el_ms"))
        for name in names
    ]
    return [*_BEFORE, *latencies, *_AFTER]


def _counted_hit_rate(report: Report) -> float | None:
    """Return the hit rate from the engines' counters, where the replies do not report it.

    The counters also have other requests, such as a gateway's checks of an engine's token ids
    (`gateway.proxy.forwarding`), so the two would differ.
    """
    return path_of("engines", "hit_rate")(report) if report["cache"]["hit_rate"] is None else None


_OFFERED = Row("requests/s, offered", path_of("offered", "rate"), rates.per_second)
_ANSWERED = Row("requests/s, answered", path_of("request_throughput"), rates.per_second, max)
HIT_RATE = Row("cache hit rate, engines' replies", path_of("cache", "hit_rate"), percent, max, noise.of_share)
PREFILL = Row("prefill tokens computed", path_of("cache", "prefill_tokens"), count, min)
_BEFORE = (
    HIT_RATE,
    Row("cache hit rate, engines' counters", _counted_hit_rate, percent, max, noise.of_share),
    Row("cache hit rate, gateway's prediction", path_of("cache", "predicted_hit_rate"), percent),
    Row("prompt tokens", path_of("cache", "prompt_tokens"), count),
    PREFILL,
)
_AFTER = (
    Row("within the SLO", path_of("goodput", "share"), percent, max, noise.of_share),
    Row(
        "busiest replica, even share is 1",
        fair_share,
        lambda value: f"{value:.2f}",
        min,
        said="requests of the busiest replica over an even share:",
    ),
    _OFFERED,
    _ANSWERED,
    Row("output tokens/s", path_of("output_throughput"), count, max),
    Row("requests answered", path_of("completed"), count),
    Row("requests failed", path_of("failed"), count, min, noise.of_requests),
    Row("sent late, p99", path_of("generator", "lateness_ms", "p99"), milliseconds),
)
DEMO_ROWS = (
    Row("cache hit rate, as the gateway predicted", path_of("cache", "predicted_hit_rate"), percent),
    Row("cache hit rate, as the engines report", path_of("cache", "hit_rate"), percent, max, noise.of_share),
    PREFILL,
    *(latency(label, key, name) for label, key in (("TTFT", "ttft_ms"), ("E2E", "e2el_ms")) for name in ("p50", "p99")),
    _OFFERED,
    _ANSWERED,
)


def tried(heads: Sequence[str], points: Iterable[tuple[Sequence[str], Report, bool]]) -> Grid:
    """Return a table of the rates or fleets that were tried: each point's name, report and whether it kept the SLO.

    It has only the lowest and highest requested percentile of each latency, so that it fits a terminal.
    """
    points = list(points)
    names = points[0][1]["percentiles"] if points else ()
    ends = dict.fromkeys((names[0], names[-1])) if names else {}
    columns = [
        (f"{what} {name}", key, name) for what, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")) for name in ends
    ]
    rows = [
        [
            *map(Cell, named),
            Cell(written(report, path_of("request_throughput"), number)),
            Cell(written(report, path_of("goodput", "share"), percent), "yes" if kept else "no"),
            *(Cell(written(report, path_of(*path), milliseconds)) for _, *path in columns),
            Cell(written(report, path_of("cache", "hit_rate"), percent)),
        ]
        for named, report, kept in points
    ]
    titles = [title for title, *_ in columns]
    return Grid((*heads, "answered /s", "within the SLO", *titles, "hit rate"), rows)
