"""The report as one self-contained HTML file: tables, plots, and how it was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jinja2

from loadgen.report import comparison, rates, show
from loadgen.report.summary import Report, Reports
from loadgen.report.tables import Cell, Grid

_MOST_REPLICAS = 24  # more are listed only on demand
_ENVIRONMENT = jinja2.Environment(
    autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=jinja2.FileSystemLoader(Path(__file__).parent)
)


def page(
    title: str,
    reports: Reports,
    drawn: Mapping[str, object],
    figures: Sequence[object],
    about: Mapping[str, object],
    drawable: bool,
) -> str:
    """Return the page as HTML.

    `drawn` has a `plots.Line` per target and `figures` are `plots.Plot`s; both are empty where plots are not
    `drawable`, and the page then explains how to get them. `about` is that of `files.draw`.
    """
    first, alone, swept = next(iter(reports.values())), len(reports) == 1, "sweep" in about
    return _ENVIRONMENT.get_template("page.html").render(
        title=title,
        lines=drawn,
        plots=figures,
        about=about,
        drawable=drawable,
        tiles=list(_tiles(first)) if alone and not swept else [],
        figures=None if alone or swept else show.compared(reports, most=_MOST_REPLICAS),
        latencies=show.latencies(first, "max") if alone and not swept else None,
        replicas=[] if swept else list(_replicas(reports)),
        rates=[] if swept else [(_of(name, alone), rates.rates(report)) for name, report in reports.items()],
        troubles=[
            ("" if alone else name, one.plain) for name, report in reports.items() for one in show.troubles(report)
        ],
        sentences=[] if swept or "plan" in about or len(reports) > 3 else list(_sentences(reports)),
        how_sure=comparison.how_sure(reports),
        made=_made(about),
    )


def _of(name: str, alone: bool) -> str:
    return "" if alone else f"{name}: "


def _made(about: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of the load and of a simulated fleet that are set."""
    known = {**(about.get("workload") or {}), **(about.get("fleet") or {})}
    return {key: value for key, value in known.items() if value not in (None, [], "") and key != "notes"}


def _tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield (name, figure, explanation) for the tiles of a single run."""
    cache, goodput, asked = report["cache"], report["goodput"], report["requests"] + report["not_sent"]
    yield (
        "answered",
        show.count(report["completed"]),
        f"of {show.count(asked)} requests in {report['duration_s']:,.0f} s",
    )
    output = f"requests; {report['output_throughput']:,.0f} output tokens/s"
    yield "throughput", rates.per_second(report["request_throughput"]), output
    for what, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        p50, p99 = (show.milliseconds((report[key] or {}).get(name)) for name in ("p50", "p99"))
        yield f"{what} p50", p50, f"p99 {p99}"
    if cache["hit_rate"] is not None:
        computed = f"{show.count(cache['prefill_tokens'])} of {show.count(cache['prompt_tokens'])} tokens computed"
        yield "cache hit rate", show.percent(cache["hit_rate"]), computed
    if goodput:
        yield "within the SLO", show.percent(goodput["share"]), show.limits(goodput["slo_ms"])


def _sentences(reports: Reports) -> Iterator[list[str]]:
    (base_name, base), *others = reports.items()
    for name, report in others:
        yield comparison.comparison(name, report, base_name, base)


def _replicas(reports: Reports) -> Iterator[tuple[str, Grid, bool]]:
    """Yield a title, a row per replica and whether the table starts open, for each target that names its replicas."""
    heads = ("replica", "", "requests", "failed", "prompt tokens", "computed", "hit rate")
    for name, report in reports.items():
        found = report["replicas"]
        most = max((one["requests"] for one in found.values()), default=0) or 1
        rows = [
            [
                Cell(replica),
                Cell(f"{one['requests'] / most * 100:.1f}", "bar"),
                *map(
                    Cell, map(show.count, (one["requests"], one["failed"], one["prompt_tokens"], one["prefill_tokens"]))
                ),
                Cell(show.percent(one["hit_rate"])),
            ]
            for replica, one in found.items()
        ]
        if rows:
            yield f"{name}: {len(rows)} replicas", Grid(heads, rows), len(reports) == 1 and len(rows) <= _MOST_REPLICAS
