"""The report as one self-contained HTML file: tables, plots, and how it was made.

matplotlib, an optional dependency, is imported only to draw; without it the page has only its tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import jinja2

from loadgen.report import comparison, rates, seeds, show
from loadgen.report.summary import Records, Reports
from loadgen.report.tables import Cell, Grid

_MOST_REPLICAS = 24  # the table of more replicas opens only on a click
_ENVIRONMENT = jinja2.Environment(
    autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=jinja2.FileSystemLoader(Path(__file__).parent)
)


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def page(reports: Reports, records: Records, about: Mapping[str, object]) -> str:
    """Return the HTML page of these reports, with plots of the requests' records; both are by target or policy.

    `about`: further entries by name. `setting` and `workload` say how the figures were made; their defaults are those
    of the first report. A page of `loadgen sweep` also has `sweep`, and one of `hitherto plan` has `plan`: the figures
    that this command writes. With either, `tried` is the table of the rates or fleets that were tried.
    """
    (name, report), *others = reports.items()
    about = {key: report.get(key) for key in ("setting", "workload")} | dict(about)
    sweep, plan = about.get("sweep"), about.get("plan")
    known = {**(about["workload"] or {}), **(about.get("fleet") or {})}
    drawn, figures = {}, []
    if drawable := can_draw():
        from loadgen.report import plots  # matplotlib takes half a second

        drawn = plots.lines(reports)
        figures = plots.of_runs(reports, seeds.first(reports, records, (about["setting"] or {}).get("seed", 0)), drawn)
        if sweep:
            figures = plots.of_sweep(sweep) + figures[:1]
        if plan:
            figures = plots.of_plan(plan, drawn) + figures
    shown: dict[str, object] = {}
    if not sweep and not others:
        shown |= {
            "head": show.head(report).plain,
            "facts": show.facts(report),
            "latencies": show.latencies(report, "max"),
        }
    elif not sweep:
        shown["figures"] = show.compared(reports, most=_MOST_REPLICAS)
        shown["rates"] = [f"{one}: {rates.rates(reports[one])}" for one in reports]
        if not plan and len(others) < 3:
            shown["sentences"] = [comparison.comparison(one, other, name, report) for one, other in others]
            shown["how_sure"] = comparison.how_sure(reports)
    return _ENVIRONMENT.get_template("page.html").render(
        title=_title(reports, about),
        lines=drawn,
        plots=figures,
        about=about,
        drawable=drawable,
        replicas=[] if sweep else list(_replicas(reports)),
        troubles=[(one if others else "", said.plain) for one in reports for said in show.troubles(reports[one])],
        made={key: value for key, value in known.items() if value not in (None, [], "") and key != "notes"},
        **shown,
    )


def _title(reports: Reports, about: Mapping[str, object]) -> str:
    load = (about.get("workload") or {}).get("dataset_name") or "load"
    if about.get("sweep"):
        return f"{load}: the highest rate that keeps the SLO"
    if about.get("plan"):
        return f"{load}: how many replicas keep the SLO"
    return f"{load}: {' against '.join(reports)}" if len(reports) < 3 else f"{load}: {len(reports)} side by side"


def _replicas(reports: Reports) -> Iterator[tuple[str, Grid, bool]]:
    """Yield (title, table, whether it is shown open) for each target whose report lists its replicas.

    A table has a row per replica. It is open if there is only one report and the table is short.
    """
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
