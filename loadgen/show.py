"""Figures as tables and sentences (rich). Says what is missing rather than leaving it out."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

Report = Mapping[str, object]
_LATENCIES = (("TTFT", "ttft_ms", "to the first token"), ("ITL", "itl_ms", "between chunks"),
              ("TPOT", "tpot_ms", "per token after the first"), ("E2E", "e2el_ms", "to the last token"))


def milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:,.1f} ms"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.1f} %"


def count(value: int | float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def run_report(report: Report) -> RenderableType:
    """The whole of `loadgen run`'s answer."""
    return Group(*filter(None, (_head(report), _latencies(report), _facts(report), _errors(report), _caution(report))))


def _head(report: Report) -> Text:
    text = Text("\n")
    text.append(f"{report['completed']:,} of {report['requests']:,} requests answered", "bold")
    text.append(f" in {report['duration_s']:.1f} s · {report['request_throughput']:.2f} requests/s · "
                f"{report['output_throughput']:,.0f} output tokens/s", "dim")
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
    for label, key, meaning in _LATENCIES:
        row = report[key] or {}
        table.add_row(label, *(milliseconds(row.get(name)) for name in ("mean", "p50", "p90", "p99")), meaning)
    return table


def _facts(report: Report) -> Table:
    cache, generator = report["cache"], report["generator"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    if goodput := report["goodput"]:
        limits = ", ".join(f"{key} {value:g} ms" for key, value in goodput["slo_ms"].items())
        table.add_row("goodput", f"{goodput['request_goodput']:.2f} requests/s "
                                 f"({percent(goodput['share'])} within {limits})")
    table.add_row("prompt tokens", count(cache["prompt_tokens"]) if cache["prompt_tokens"] is not None
                  else "the server reports no usage")
    table.add_row("cached, reported", _share(cache["cached_tokens"], cache["hit_rate"], "the engine does not report it "
                                             "(vLLM: --enable-prompt-tokens-details)"))
    if cache["predicted_on"]:
        table.add_row("cached, predicted", _share(cache["predicted_tokens"], cache["predicted_hit_rate"], ""))
    if report["replicas"]:
        table.add_row("replicas", "  ".join(f"{name} {figures['requests']}"
                                            for name, figures in report["replicas"].items()))
    late = generator["lateness_ms"]
    if late:
        table.add_row("generator", f"sent {milliseconds(late['p50'])} late at p50, {milliseconds(late['p99'])} at p99, "
                                   f"used {generator['cpu_share'] * 100:.0f} % of a core")
    return table


def _share(tokens: int | None, rate: float | None, missing: str) -> str:
    return missing if tokens is None else f"{count(tokens)} ({percent(rate)})"


def _errors(report: Report) -> Text | None:
    if not report["errors"]:
        return None
    text = Text("\n")
    for kind, number in sorted(report["errors"].items(), key=lambda item: -item[1]):
        text.append(f"{number} × {kind}", "bold red")
        text.append(f"  {report['error_examples'][kind]}\n", "dim")
    text.rstrip()
    return text


def _caution(report: Report) -> Text | None:
    if not report["generator"]["was_the_limit"]:
        return None
    return Text("\nThe generator itself was late or busy: these figures describe it as much as the server. "
                "Lower --request-rate or use a machine with free cores.", "yellow")


def print_report(console: Console, report: Report) -> None:
    console.print(run_report(report))
