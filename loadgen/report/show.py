"""Write figures as tables and sentences for the terminal (rich) and the HTML page; a missing figure is "–"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.options import KEY_NEEDED
from loadgen.report import noise, rates, seeds, warm
from loadgen.report.noise import Row
from loadgen.report.shares import percent as percentage
from loadgen.report.summary import LATENCIES, Latency, Report, Reports, fair_share
from loadgen.report.tables import Cell, Grid, drawn

_SHARES = 4  # with up to so many replicas, the requests of each are listed


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
    """Return the output of `loadgen run`.

    If no request was answered, it has only the first line and what went wrong.
    """
    parts: list[RenderableType] = ["", head(report)]
    if report["completed"]:
        grid, known = latencies(report), Table(box=None, show_header=False, pad_edge=False)
        known.add_column(style="dim", no_wrap=True)
        for fact in facts(report):
            known.add_row(*fact)
        parts += [drawn(grid, (0, len(grid.heads) - 1), "dim"), known]
    for trouble in troubles(report):
        parts += ["", trouble]
    return Group(*parts)


def head(report: Report) -> Text:
    """Return the first line of a report: how many requests were answered, how fast, and why others were not sent."""
    text = Text(f"{count(report['completed'])} of {count(report['requests'])} requests answered", "bold")
    rates = f"{report['request_throughput']:.2f} requests/s · {report['output_throughput']:,.0f} output tokens/s"
    text.append(f" in {report['duration_s']:.1f} s · {rates}", "not bold dim")
    if by_seed := report.get("by_seed"):
        text.append(f" · mean of {len(by_seed)} seeds, range in brackets", "not bold dim")
    if report["not_sent"]:
        # the reason is certain only in a run that ended by itself: `Load.not_sent` also counts what a stop left out
        turns = f"later turn{'' if report['not_sent'] == 1 else 's'} of conversations that failed"
        why = f": {turns}" if report["failed"] and not report["interrupted"] else ""
        text.append(f" · {count(report['not_sent'])} not sent{why}", "not bold yellow")
    if report["interrupted"]:
        text.append(" · stopped early", "not bold yellow")
    return text


def latencies(report: Report, *more: str) -> Grid:
    """Return a table with a row per latency: mean, the requested percentiles, and further figures.

    `more`: keys of the further figures in a report, such as "max".
    """
    names = ("mean", *report["percentiles"], *more)
    shown = [(one.name, f"{one.key}_ms", one.about) for one in LATENCIES]
    if report["generator"]["was_the_limit"]:
        shown.insert(1, ("TTFT", "ttft_from_due_ms", "from when it was due"))
    rows = []
    for label, key, about in shown:
        figures = (written(report, path_of(key, name), milliseconds) for name in names)
        rows.append([Cell(label), *map(Cell, figures), Cell(about, "soft")])
    return Grid(("", *names, ""), rows)


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for what a report has besides latencies: rate, goodput, cache, replicas, generator."""
    cache, generator, goodput = report["cache"], report["generator"], report["goodput"]
    yield "rate", rates.rates(report)
    if goodput:
        within = f"{written(report, path_of('goodput', 'share'), percent)} within {limits(goodput['slo_ms'])}"
        yield "goodput", f"{goodput['request_goodput']:.2f} requests/s ({within})"
    usage = cache["prompt_tokens"] is not None
    yield "prompt tokens", count(cache["prompt_tokens"]) if usage else "the server reports no usage"
    reported = "the engine does not report it (`hitherto doctor` says how it would)"
    if cache["cached_tokens"] is not None:
        reported = f"{count(cache['cached_tokens'])} ({percent(cache['hit_rate'])})"
    yield "cached, reported", reported
    if cache["predicted_tokens"] is not None:
        yield "cached, predicted", f"{count(cache['predicted_tokens'])} ({percent(cache['predicted_hit_rate'])})"
    if report["replicas"]:
        yield "replicas", "  ".join(f"{name} {count(one['requests'])}" for name, one in report["replicas"].items())
    if late := generator["lateness_ms"]:
        bounded = f"at most {generator['max_concurrency']} at once"
        loop = {"closed": f"closed loop of {generator['users']}", "open": "open loop", "bounded": bounded}
        sent = f"sent {milliseconds(late['p50'])} late at p50, {milliseconds(late['p99'])} at p99"
        yield "generator", f"{loop[generator['loop']]}; {sent}, used {generator['cpu_share'] * 100:.0f} % of a core"


_REMEDIES = {
    "http_404": "The server knows no such model or path: see --model and --endpoint.",
    "http_401": f"The server answers 401: {KEY_NEEDED}.",
    "vocabulary": "The load's made-up token ids are below --vocab-size; give it as many as the engine's model has.",
}


def troubles(report: Report) -> list[Text]:
    """Return warnings about what makes the figures doubtful: errors, an overloaded load generator, or warm caches."""
    found = []
    for kind, number in sorted(report["errors"].items(), key=lambda item: -item[1]):
        example = report["error_examples"][kind]
        text = Text.assemble((f"{number} × {kind}", "bold red"), (f"  {example}", "dim"))
        for sign, remedy in _REMEDIES.items():
            if sign == kind or sign in example.lower():
                text.append(f"\n  {remedy}", "yellow")
        found.append(text)
    return found + [Text(said, "yellow") for said in (*_caution(report["generator"]), *warm.notice(report))]


def _caution(generator: Mapping[str, object]) -> Iterator[str]:
    """Yield a warning if the load generator, rather than the server, limited the figures."""
    if not generator["was_the_limit"]:
        return
    if bound := generator["max_concurrency"]:
        left_out = "the latencies leave out the time requests waited to be sent"
        yield f"--max-concurrency {bound} held requests back: this was no open loop, and {left_out}."
        return
    why = "Its core was not full, so the machine was busy with something else: lower the rate or use free cores."
    if generator["core_was_full"]:
        full = f"Its core was full ({generator['cpu_busiest_second'] * 100:.0f} % in the busiest second)"
        why = f"{full}: lower the rate, or send a share of it from a second loadgen."
    yield f"The generator itself was late or busy: these figures describe it as much as the server. {why}"


def print_troubles(console: Console, reports: Reports) -> None:
    for name, report in reports.items():
        if found := troubles(report):
            console.print(f"\n[bold]{name}[/]")
            console.print(*found, sep="\n")


def print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)


def bullets(sentences: Iterable[str]) -> Table:
    """Return a bulleted list; each sentence is wrapped with a hanging indent."""
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row("  •", Text(sentence))
    return table


def compared(reports: Reports, rows: Sequence[Row] | None = None, most: int = _SHARES) -> Grid:
    """Return a table with a column per target, a row per known figure, and a row with the requests per replica.

    The best value of a row is green; a value worse than that of the first target is red. With more than `most`
    replicas, the last row has only the least and the most requests.
    """
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
    """Return the look of a cell: "best" for the row's best figure, "worse" if worse than the first target's, else "".

    `best`: the row's best figure. A figure gets "best" only if it beats some other target's by more than noise, and
    "worse" only if it is worse by more than noise.
    """
    (first, *_), verdict = reports.values(), noise.Verdict
    beats_one = any(noise.judged(row, report, other) is verdict.BETTER for other in reports.values())
    if best is not None and seeds.mean(report, row.read) == best and beats_one:
        return "best"
    return "worse" if noise.judged(row, report, first) is verdict.WORSE else ""


def written(report: Report, read: Callable[[Report], float | None], form: Callable[[float], str]) -> str:
    """Return a figure of a report as text; with several seeds the mean, and the range in brackets unless all agree.

    `read`: takes the figure from a report; `form`: writes a value as text.
    """
    values = seeds.each(report, read)
    if not values:
        return "–"
    mean, low, high = form(seeds.mean(report, read)), form(min(values)), form(max(values))
    if low == high:
        return mean
    number, _, unit = low.rpartition(" ")
    return f"{mean} ({number if number and high.endswith(f' {unit}') else low}–{high})"


def shares(report: Report, most: int = _SHARES) -> str:
    """Return the number of requests of each replica as text; with more than `most` replicas, only least and most."""
    requests = [figures["requests"] for figures in report["replicas"].values()]
    if len(requests) > most:
        return f"{count(min(requests))} to {count(max(requests))}"
    return "  ".join(map(count, requests)) or "–"


def path_of(*path: str) -> Callable[[Report], float | None]:
    """Return a function that takes a nested figure from a report: `path_of("ttft_ms", "p99")(report)`.

    The function returns None if a key is missing.
    """

    def read(report: Report) -> float | None:
        value = report
        for key in path:
            value = value.get(key) if value else None
        return value

    return read


def latency(one: Latency, name: str) -> Row:
    """Return the row of the comparison table for one figure of a latency.

    `name`: the figure, "mean" or a percentile such as "p99".
    """
    same = noise.SAME_TAIL if name.startswith("p") and float(name[1:]) >= 90 else noise.SAME
    read = path_of(f"{one.key}_ms", name)
    return Row(f"{one.name} {name}", read, milliseconds, min, lambda value, report: same * value)


def rows_of(reports: Reports) -> list[Row]:
    """Return the rows of a comparison; latencies have the percentiles that the first report lists."""
    names = ("mean", *next(iter(reports.values()))["percentiles"])
    latencies = [latency(one, name) for one in LATENCIES if one.key != "itl" for name in names]
    return [*_BEFORE, *latencies, *_AFTER]


def _counted_hit_rate(report: Report) -> float | None:
    """Return the hit rate from the engines' counters, but None if the replies report one.

    The counters include other requests, such as those with which a gateway checks an engine's token ids
    (`gateway.proxy.exactness`), so the two rates would differ.
    """
    return path_of("engines", "hit_rate")(report) if report["cache"]["hit_rate"] is None else None


_BUSIEST = "busiest replica, even share is 1"
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
    Row(_BUSIEST, fair_share, number, min, said="requests of the busiest replica over an even share:"),
    _OFFERED,
    _ANSWERED,
    Row("output tokens/s", path_of("output_throughput"), count, max),
    Row("requests answered", path_of("completed"), count),
    Row("requests failed", path_of("failed"), count, min, lambda value, report: noise.SAME_SHARE * report["requests"]),
    Row("sent late, p99", path_of("generator", "lateness_ms", "p99"), milliseconds),
)
DEMO_ROWS = (
    Row("cache hit rate, as the gateway predicted", path_of("cache", "predicted_hit_rate"), percent),
    Row("cache hit rate, as the engines report", path_of("cache", "hit_rate"), percent, max, noise.of_share),
    PREFILL,
    *(latency(one, name) for one in LATENCIES if one.key in ("ttft", "e2el") for name in ("p50", "p99")),
    _OFFERED,
    _ANSWERED,
)


def tried(heads: Sequence[str], points: Iterable[tuple[Sequence[str], Report, bool]]) -> Grid:
    """Return a table of the request rates or fleets that were tried, a row for each.

    `points`: for each row its first cells (one under each of `heads`), the report, and whether the SLO was kept. The
    table has only the lowest and the highest requested percentile of TTFT and TPOT, so that it fits a terminal.
    """
    points = list(points)
    names = points[0][1]["percentiles"] if points else ()
    ends = dict.fromkeys((*names[:1], *names[-1:]))
    columns = [(one, name) for one in LATENCIES if one.key in ("ttft", "tpot") for name in ends]
    rows = []
    for named, report, kept in points:
        times = (written(report, path_of(f"{one.key}_ms", name), milliseconds) for one, name in columns)
        within = Cell(written(report, path_of("goodput", "share"), percent), "yes" if kept else "no")
        before, after = written(report, path_of("request_throughput"), number), written(report, HIT_RATE.read, percent)
        rows.append([*map(Cell, named), Cell(before), within, *map(Cell, times), Cell(after)])
    titles = [f"{one.name} {name}" for one, name in columns]
    return Grid((*heads, "answered /s", "within the SLO", *titles, "hit rate"), rows)
