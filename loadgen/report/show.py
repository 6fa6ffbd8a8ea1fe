"""Figures as tables and sentences (rich). Says what is missing rather than leaving it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.report.summary import Report, Reports, fair_share

_SHARES = 4  # replicas whose requests are told one by one
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
    return "–" if value is None else f"{value * 100:.1f} %"


def count(value: int | float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def run_report(report: Report) -> RenderableType:
    """The whole of `loadgen run`'s answer."""
    parts: list[RenderableType] = [_head(report), _latencies(report), _facts(report)]
    for trouble in troubles(report):
        parts += ["", trouble]
    return Group(*parts)


def _head(report: Report) -> Text:
    text = Text("\n")
    text.append(f"{report['completed']:,} of {report['requests']:,} requests answered", "bold")
    text.append(
        f" in {report['duration_s']:.1f} s · {report['request_throughput']:.2f} requests/s · "
        f"{report['output_throughput']:,.0f} output tokens/s",
        "dim",
    )
    if report["not_sent"]:
        text.append(f" · {report['not_sent']} not sent", "yellow")
    if report["interrupted"]:
        text.append(" · stopped early", "yellow")
    return text


def _latencies(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    table.add_column("", style="dim")
    waited = (("TTFT", "ttft_from_due_ms", "from when it was due"),) if report["generator"]["was_the_limit"] else ()
    for label, key, meaning in (*LATENCIES[:1], *waited, *LATENCIES[1:]):
        row = report[key] or {}
        table.add_row(label, *(milliseconds(row.get(name)) for name in ("mean", "p50", "p90", "p99")), meaning)
    return table


def _facts(report: Report) -> Table:
    cache, generator = report["cache"], report["generator"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    if goodput := report["goodput"]:
        table.add_row(
            "goodput",
            f"{goodput['request_goodput']:.2f} requests/s "
            f"({percent(goodput['share'])} within {limits(goodput['slo_ms'])})",
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
            "replicas", "  ".join(f"{name} {figures['requests']}" for name, figures in report["replicas"].items())
        )
    late = generator["lateness_ms"]
    if late:
        loop = {
            "closed": f"closed loop of {generator['users']}",
            "bounded": f"at most {generator['max_concurrency']} at once",
            "open": "open loop",
        }[generator["loop"]]
        table.add_row(
            "generator",
            f"{loop}; sent {milliseconds(late['p50'])} late at p50, {milliseconds(late['p99'])} at p99, "
            f"used {generator['cpu_share'] * 100:.0f} % of a core"
            + (f" in the busiest of {generator['processes']} processes" if generator["processes"] > 1 else ""),
        )
    return table


def _share(tokens: int | None, rate: float | None, missing: str) -> str:
    return missing if tokens is None else f"{count(tokens)} ({percent(rate)})"


def errors(report: Report) -> Text | None:
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
    text.rstrip()
    return text


def caution(report: Report) -> Text | None:
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
    """What a reader must know before the figures: errors, and a generator that was the limit."""
    return [trouble for trouble in (errors(report), caution(report)) if trouble]


def print_troubles(console: Console, reports: Reports) -> None:
    for name, report in reports.items():
        for trouble in troubles(report):
            console.print(f"\n[bold]{name}[/]")
            console.print(trouble)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)


def comparison_table(reports: Reports, rows: Sequence[Row] | None = None) -> Table:
    """One column per target, the best of each row bold where the row has a better and a worse."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in reports:
        table.add_column(name, justify="right", no_wrap=True)
    for label, values, form, best in compared(reports, rows):
        table.add_row(
            label,
            *(
                Text("–" if value is None else form(value), "bold green" if value is not None and value == best else "")
                for value in values
            ),
        )
    if any(report["replicas"] for report in reports.values()):
        table.add_row("requests per replica", *(shares(report) for report in reports.values()))
    return table


def compared(
    reports: Reports, rows: Sequence[Row] | None = None
) -> Iterator[tuple[str, list[float | None], Callable, float | None]]:
    """Rows that somebody has a value for: label, values, how to write one, and the best where they differ."""
    for label, read, form, better in rows or ROWS:
        values = [read(report) for report in reports.values()]
        if any(value is not None for value in values):
            yield (
                label,
                values,
                form,
                better(value for value in values if value is not None) if better and len(set(values)) > 1 else None,
            )


def bullets(sentences: Iterable[str]) -> Table:
    """Sentences below each other, each wrapped under its own beginning."""
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row("  •", sentence)
    return table


def shares(report: Report) -> str:
    """Requests of each replica, in the order of their names; of more than fit beside each other, the least and the
    most."""
    requests = [figures["requests"] for figures in report["replicas"].values()]
    if len(requests) > _SHARES:
        return f"{min(requests):,} to {max(requests):,}"
    return "  ".join(map(str, requests)) or "–"


def _of(*path: str) -> Callable[[Report], float | None]:
    def read(report: Report) -> float | None:
        value = report
        for key in path:
            value = value.get(key) if value else None
        return value

    return read


Row = tuple[str, Callable[[Report], float | None], Callable[[float], str], Callable | None]
ROWS: tuple[Row, ...] = (
    ("cache hit rate, engines' replies", _of("cache", "hit_rate"), percent, max),
    ("cache hit rate, engines' counters", _of("engines", "hit_rate"), percent, max),
    ("cache hit rate, gateway's prediction", _of("cache", "predicted_hit_rate"), percent, None),
    ("prompt tokens", _of("cache", "prompt_tokens"), count, None),
    ("prefill tokens computed", _of("cache", "prefill_tokens"), count, min),
    ("TTFT mean", _of("ttft_ms", "mean"), milliseconds, min),
    ("TTFT p50", _of("ttft_ms", "p50"), milliseconds, min),
    ("TTFT p90", _of("ttft_ms", "p90"), milliseconds, min),
    ("TTFT p99", _of("ttft_ms", "p99"), milliseconds, min),
    ("TPOT p50", _of("tpot_ms", "p50"), milliseconds, min),
    ("TPOT p99", _of("tpot_ms", "p99"), milliseconds, min),
    ("E2E mean", _of("e2el_ms", "mean"), milliseconds, min),
    ("E2E p50", _of("e2el_ms", "p50"), milliseconds, min),
    ("E2E p99", _of("e2el_ms", "p99"), milliseconds, min),
    ("within the SLO", _of("goodput", "share"), percent, max),
    ("busiest replica, even share is 1", fair_share, lambda value: f"{value:.2f}", min),
    ("requests answered", _of("completed"), count, None),
    ("requests failed", _of("failed"), count, min),
    ("sent late, p99", _of("generator", "lateness_ms", "p99"), milliseconds, None),
)
DEMO_ROWS = (
    ("cache hit rate, as the gateway predicted", _of("cache", "predicted_hit_rate"), percent, None),
    ("cache hit rate, as the engines report", _of("cache", "hit_rate"), percent, max),
    ("prefill tokens computed", _of("cache", "prefill_tokens"), count, min),
    ("TTFT p50", _of("ttft_ms", "p50"), milliseconds, min),
    ("TTFT p99", _of("ttft_ms", "p99"), milliseconds, min),
    ("E2E p50", _of("e2el_ms", "p50"), milliseconds, min),
    ("E2E p99", _of("e2el_ms", "p99"), milliseconds, min),
)
