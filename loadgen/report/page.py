"""The report as one self-contained HTML file: tables, plots, and how it was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jinja2

from loadgen.report import comparison, rates, show
from loadgen.report.summary import Reports
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

    `drawn`: the `plots.Line` of each target; `figures`: `plots.Plot`s. Both are empty where plots are not `drawable`,
    and the page then explains how to get them. `about`: setting, workload, and a sweep or plan (see `files.draw`).
    """
    (name, report), *others = reports.items()
    swept = "sweep" in about
    known = {**(about.get("workload") or {}), **(about.get("fleet") or {})}
    return _ENVIRONMENT.get_template("page.html").render(
        title=title,
        lines=drawn,
        plots=figures,
        about=about,
        drawable=drawable,
        single=None if others or swept else {"head": show.head(report).plain, "facts": show.facts(report)},
        latencies=None if others or swept else show.latencies(report, "max"),
        figures=show.compared(reports, most=_MOST_REPLICAS) if others and not swept else None,
        replicas=[] if swept else list(_replicas(reports)),
        rates=[f"{one}: {rates.rates(reports[one])}" for one in reports] if others and not swept else [],
        troubles=[(one if others else "", said.plain) for one in reports for said in show.troubles(reports[one])],
        sentences=[]
        if swept or "plan" in about or len(others) > 2
        else [comparison.comparison(one, other, name, report) for one, other in others],
        how_sure=comparison.how_sure(reports),
        made={key: value for key, value in known.items() if value not in (None, [], "") and key != "notes"},
    )


def _replicas(reports: Reports) -> Iterator[tuple[str, Grid, bool]]:
    """Yield a title, a row per replica and whether the table starts open, for each target that names its replicas."""
    counted = ("requests", "failed", "prompt_tokens", "prefill_tokens")
    heads = ("replica", "requests", "failed", "prompt tokens", "computed", "hit rate")
    for name, report in reports.items():
        rows = [
            [replica, *(show.count(one[key]) for key in counted), show.percent(one["hit_rate"])]
            for replica, one in report["replicas"].items()
        ]
        if rows:
            grid = Grid(heads, [[*map(Cell, row)] for row in rows])
            yield f"{name}: {len(rows)} replicas", grid, len(reports) == 1 and len(rows) <= _MOST_REPLICAS
