"""The report as one HTML file that needs nothing else: tables, plots, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from loadgen.report import comparison, rates, show
from loadgen.report.summary import Report, Reports

_MOST_REPLICAS = 24  # rows of the table of replicas that are open without being asked for
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
    """`drawn` has a `plots.Line` for each target and `figures` are `plots.Plot`s, both empty where plots are not
    `drawable`: the page then says how to get them."""
    return _ENVIRONMENT.get_template("page.html").render(
        title=title,
        reports=reports,
        lines=drawn,
        plots=figures,
        about=about,
        sweep=about.get("sweep"),
        plan=about.get("plan"),
        tiles=_tiles(next(iter(reports.values()))) if len(reports) == 1 else [],
        latencies=_latencies(next(iter(reports.values()))) if len(reports) == 1 else [],
        rows=_rows(reports) if len(reports) > 1 else [],
        percentiles=next(iter(reports.values()))["percentiles"],
        rates=[(name if len(reports) > 1 else "", rates.rates(report)) for name, report in reports.items()],
        how_sure=comparison.how_sure(reports) if len(reports) > 1 else "",
        drawable=drawable,
        columns=show.ends(next(iter(reports.values()))),
        written=lambda report, path, form: show.written(report, show.path_of(*path), form),
        sentences=[] if about.get("sweep") or about.get("plan") or len(reports) > 3 else list(_sentences(reports)),
        troubles=list(_troubles(reports)),
        replicas=_replicas(reports),
        made=_made(about),
        show=show,
    )


def _made(about: Mapping[str, object]) -> dict[str, object]:
    """What was set, of the load and of a simulated fleet."""
    known = {**(about.get("workload") or {}), **(about.get("fleet") or {})}
    return {key: value for key, value in known.items() if value not in (None, [], "") and key != "notes"}


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """(name, figure, what it is about) of a single run."""
    cache, goodput = report["cache"], report["goodput"]
    ttft, tpot = report["ttft_ms"] or {}, report["tpot_ms"] or {}
    tiles = [
        (
            "answered",
            show.count(report["completed"]),
            f"of {show.count(report['requests'] + report['not_sent'])} requests in {report['duration_s']:,.0f} s",
        ),
        (
            "throughput",
            f"{report['request_throughput']:,.2f} /s",
            f"requests; {report['output_throughput']:,.0f} output tokens/s",
        ),
        ("TTFT p50", show.milliseconds(ttft.get("p50")), f"p99 {show.milliseconds(ttft.get('p99'))}"),
        ("TPOT p50", show.milliseconds(tpot.get("p50")), f"p99 {show.milliseconds(tpot.get('p99'))}"),
    ]
    if cache["hit_rate"] is not None:
        tiles.append(
            (
                "cache hit rate",
                show.percent(cache["hit_rate"]),
                f"{show.count(cache['prefill_tokens'])} of {show.count(cache['prompt_tokens'])} tokens computed",
            )
        )
    if goodput:
        tiles.append(("within the SLO", show.percent(goodput["share"]), show.limits(goodput["slo_ms"])))
    return tiles


def _latencies(report: Report) -> list[tuple[str, str, list[str]]]:
    return [
        (
            label,
            meaning,
            [
                show.written(report, show.path_of(key, name), show.milliseconds)
                for name in ("mean", *report["percentiles"], "max")
            ],
        )
        for label, key, meaning in show.LATENCIES
        if report[key]
    ]


def _rows(reports: Reports) -> list[tuple[str, list[show.Cell]]]:
    """What `show.comparison_table` has, and what went to each replica."""
    rows = list(show.compared(reports))
    if any(report["replicas"] for report in reports.values()):
        rows.append(("requests per replica", [show.Cell(_each(report)) for report in reports.values()]))
    return rows


def _each(report: Report) -> str:
    """The requests of every replica, in the order of their names; of very many the least and the most."""
    requests = [show.count(figures["requests"]) for figures in report["replicas"].values()]
    return " · ".join(requests) if len(requests) <= _MOST_REPLICAS else show.shares(report)


def _sentences(reports: Reports):
    (base_name, base), *others = reports.items()
    for name, report in others:
        yield name, comparison.comparison(name, report, base_name, base)


def _troubles(reports: Reports):
    for name, report in reports.items():
        for trouble in show.troubles(report):
            yield (name if len(reports) > 1 else ""), trouble.plain


def _replicas(reports: Reports) -> list[dict[str, object]]:
    """Per target that names its replicas: a row for each, with its share of the busiest one's requests."""
    tables = []
    for name, report in reports.items():
        if rows := report["replicas"]:
            most = max(figures["requests"] for figures in rows.values()) or 1
            tables.append(
                {
                    "name": name,
                    "rows": [(one, figures, figures["requests"] / most) for one, figures in rows.items()],
                    "open": len(reports) == 1 and len(rows) <= _MOST_REPLICAS,
                }
            )
    return tables
