"""The plots of the page, as SVG in the colours of the page.

Every plot is a set of named curves. A target or policy has the same colour in all plots. Times count from when the
first request of a run was due.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from loadgen.drive.records import Record
from loadgen.report.summary import Records, Reports, began

_SIZE = (5.2, 3.1)  # inches, of one plot; with 10.5-point letters it is legible on a phone
# Each colour has a contrast of at least 3:1 on white and on black.
_COLOURS = ("#12907f", "#d97a1e", "#5a76d8", "#c34f86", "#7d962c", "#8d62c9", "#3f9cc4", "#a9703d")
_DASHES = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)))
_DASHED = (0, (4, 3))  # a limit
_WINDOW_REQUESTS = 25  # per window of time; with fewer its figures are noise
_MOST_WINDOWS, _FEWER_WINDOWS = 60, 24  # fewer where many lines cross
_MANY = 5  # targets
_MOST_STEPS = 500  # of a distribution; more are not visible
_LEAST_MS = 1e-3  # a logarithmic axis has no 0, but a virtual clock does
_LOOK = {
    "font.size": 10.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "svg.fonttype": "none",
    "text.parse_math": False,
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    "ytick.left": False,
    "xtick.major.size": 3,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
}


# Placeholders for colours of the page, which `Plot.svg` replaces by the CSS variables of these names.
_INK = {"text": "#010203", "soft": "#010204", "line": "#010205"}


class Line(NamedTuple):
    """The line style of a target: one of eight colours, dashed where there are more targets than that."""

    colour: str
    dash: object


class Curve(NamedTuple):
    """A curve, perhaps with a band."""

    x: Sequence[float]
    y: Sequence[float]  # NaN where unknown
    band: Sequence[float] | None = None  # the other end of a band that begins at `y`


def _milliseconds(value: float, _: object = None) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


def _percent(value: float, _: object = None) -> str:
    return f"{value * 100:.0f} %"


def _clock(value: float, _: object = None) -> str:
    return f"{value / 60:.3g} min" if value >= 180 else f"{value:g} s"


def _number(value: float, _: object = None) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot: named curves over common axes.

    An axis of milliseconds is logarithmic, and an axis of shares ends at 1.
    """

    title: str
    caption: str
    curves: Mapping[str, Curve]
    drawn: Mapping[str, Line]  # the style of each curve
    across: Callable[[float, object], str]  # writes values of the x axis
    up: Callable[[float, object], str]  # writes values of the y axis
    limit: float | None = None  # of y, where a dashed line stands
    mark: float | None = None  # of x, where a dashed line stands
    label: str = ""  # of the x axis; only plots that have one name their curves in a legend of their own

    def svg(self) -> str:
        """Return the plot as an SVG element for the page."""
        with matplotlib.rc_context({**_LOOK, "svg.hashsalt": self.title}):
            figure = Figure(_SIZE, layout="constrained")
            axes = figure.add_subplot()
            axes.grid(axis="y", color=_INK["line"], linewidth=0.7)
            axes.tick_params(colors=_INK["soft"], which="both")
            axes.spines["bottom"].set_color(_INK["line"])
            for name, curve in self.curves.items():
                colour, dash = self.drawn[name]
                if curve.band is not None:
                    axes.fill_between(curve.x, curve.y, curve.band, color=colour, alpha=0.16, linewidth=0)
                marker = "o" if len(curve.x) < 10 else None
                axes.plot(curve.x, curve.y, color=colour, linestyle=dash, marker=marker, label=name)
            for value, line in ((self.limit, axes.axhline), (self.mark, axes.axvline)):
                if value:
                    line(value, color=_INK["soft"], linewidth=1, linestyle=_DASHED)
            curves = self.curves.values()
            _scale(axes.xaxis, self.across, [curve.x for curve in curves], self.mark)
            values = [part for curve in curves for part in (curve.y, curve.band) if part is not None]
            _scale(axes.yaxis, self.up, values, self.limit)
            if self.label:
                axes.set_xlabel(self.label, color=_INK["soft"])
            if self.label and len(self.curves) > 1:
                axes.legend(loc="best", labelcolor=_INK["text"], fontsize=9.5, handlelength=1.2)
            out = io.StringIO()
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        for name, colour in _INK.items():
            text = text.replace(colour, f"var(--{name})")
        return text[text.index("<svg") :]


def _scale(axis, form: Callable[[float, object], str], parts: list[Sequence[float]], limit: float | None) -> None:
    """Scale and label an axis for all values in `parts`; a wide logarithmic axis has fewer labels per decade."""
    values = np.concatenate(parts)
    low, high = np.nanmin(values), max(np.nanmax(values), limit or 0.0)
    if form is _milliseconds:
        low, high = max(low, np.nanmax(values) / 1e4) / 1.15, max(high, low * 2) * 1.15
        axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
        subs = (1, 2, 3, 5, 7) if high < 8 * low else (1, 2, 5) if high < 100 * low else (1, 3)
        axis.set_major_locator(LogLocator(subs=subs if high < 1000 * low else (1,), numticks=12))
        axis.set_minor_formatter(NullFormatter())
        axis.minorticks_off()
    else:
        end = min(high * 1.15, 1.02) if form is _percent else None
        axis.axes.set(**{f"{axis.axis_name}lim": (0, end or None)})
        steps = (1, 2, 3, 6, 10) if form is _clock else (1, 2, 5, 10)  # 60 s is a step
        axis.set_major_locator(MaxNLocator(6, steps=steps, integer=not (values % 1).any()))
    axis.set_major_formatter(FuncFormatter(form))


def lines(names: Iterable[str]) -> dict[str, Line]:
    """Return a line style per name."""
    return {
        name: Line(_COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)])
        for number, name in enumerate(names)
    }


def of_runs(reports: Reports, records: Records, drawn: Mapping[str, Line]) -> list[Plot]:
    """Return the plots of latencies and hit rate for which these runs have data; `drawn`: their styles."""
    slo = next((report["goodput"]["slo_ms"] for report in reports.values() if report.get("goodput")), {})
    windows, tail = (_MOST_WINDOWS, 99) if len(records) < _MANY else (_FEWER_WINDOWS, None)
    good = {name: [record for record in done if record.error is None] for name, done in records.items()}
    plots = []

    def add(title: str, caption: str, curve: Callable[[list[Record]], Curve | None], **axes) -> None:
        curves = {name: found for name, done in good.items() if (found := curve(done))}
        if curves:
            plots.append(Plot(title, caption, curves, drawn, **axes))

    def hits(done: list[Record]) -> Curve | None:
        told = [record for record in done if record.prompt_tokens and record.cached_tokens is not None]
        return _over_time(told, _hit_rate, windows)

    for what, (key, read) in _LATENCIES.items():
        caption = f"Share of {'gaps between chunks' if what == 'ITL' else 'requests'} with at most this {what}."
        caption += " The dashed line is the SLO." if slo.get(key) else ""
        curve = partial(_distribution, read)
        add(f"{what} distribution", caption, curve, across=_milliseconds, up=_percent, mark=slo.get(key))
    caption = f"Median of the requests sent in each window of time{'; the band above reaches to p99' if tail else ''}."
    ttft = partial(_over_time, figure=partial(_ttft, tail), most=windows)
    add("TTFT over time", caption, ttft, across=_clock, up=_milliseconds)
    caption = "Cached tokens over prompt tokens, as engines report them, by when requests were sent."
    add("Hit rate over time", caption, hits, across=_clock, up=_percent)
    return plots


_LATENCIES: dict[str, tuple[str, Callable[[Record], Iterable[float | None]]]] = {
    "TTFT": ("ttft", lambda record: (record.ttft,)),
    "TPOT": ("tpot", lambda record: (record.tpot,)),
    "E2E": ("e2el", lambda record: (record.e2e,)),
    "ITL": ("itl", lambda record: record.gaps),
}


def _distribution(read: Callable[[Record], Iterable[float | None]], done: list[Record]) -> Curve | None:
    times = np.sort([max(1000 * one, _LEAST_MS) for record in done for one in read(record) if one is not None])
    ranks = np.unique(np.linspace(1, times.size, min(times.size, _MOST_STEPS), dtype=int))
    return Curve(times[ranks - 1], ranks / times.size) if times.size else None


def _ttft(tail: float | None, window: Sequence[Record]) -> tuple[float, float | None]:
    """Return the median of TTFT in ms and its percentile `tail` (None: not wanted); NaN where nothing was answered."""
    times = [max(record.ttft * 1000, _LEAST_MS) for record in window if record.ttft is not None] or [np.nan]
    return float(np.percentile(times, 50)), tail and float(np.percentile(times, tail))


def _hit_rate(window: Sequence[Record]) -> tuple[float, None]:
    return sum(record.cached_tokens for record in window) / sum(record.prompt_tokens for record in window), None


def _over_time(done: Sequence[Record], figure: Callable, most: int) -> Curve | None:
    """Return the curve of `figure` over at most `most` windows of time; None where no window has a value.

    `figure`: takes the requests that were sent in a window and returns (value, end of the band or None).
    """
    if len(done) < 2:
        return None
    zero = began(done)
    sent = np.array([record.sent - zero for record in done])
    number = min(max(len(done) // _WINDOW_REQUESTS, 4), most)
    edges = np.linspace(0, max(sent.max(), 1e-9), number + 1)
    windows: list[list[Record]] = [[] for _ in range(number)]
    for record, window in zip(done, np.clip(np.searchsorted(edges, sent, "right") - 1, 0, number - 1)):
        windows[window].append(record)
    y, band = zip(*(figure(window) if window else (np.nan, np.nan) for window in windows))
    x = (edges[1:] + edges[:-1]) / 2
    return Curve(x, y, None if None in band else band) if not np.isnan(y).all() else None


Point = Mapping[str, object]  # a rate or a fleet that was tried: its `report`, and the `share` within the SLO


def of_sweep(sweep: Mapping[str, object]) -> list[Plot]:
    """Return the plots of latency and attainment against the request rate; `sweep`: as `Sweep.figures` makes it."""
    points = {"": sorted(sweep["steps"], key=lambda step: step["rate"])}
    across, plots = ("rate", "requests a second, offered"), []
    for what, about in (("TTFT", "to the first token"), ("TPOT", "per token after the first")):
        key, limit = f"{what.lower()}_ms", sweep["slo_ms"].get(what.lower())
        reads = {
            name: lambda point, key=key, name=name: (point["report"][key] or {}).get(name)
            for name in ("p50", "p90", "p99")
        }
        caption = f"Time {about}. Dashed: {'the SLO, and ' if limit else ''}the rate that was found, if one was."
        marks = {"limit": limit, "mark": sweep["rate"]}
        plots += _against(f"{what} against load", caption, points, across, reads, up=_milliseconds, **marks)
    return plots + _within_the_slo(points, across, sweep["attainment"])


def of_plan(plan: Mapping[str, object], drawn: Mapping[str, Line]) -> list[Plot]:
    """Return the plot of attainment against the number of replicas, one line per cache size.

    `plan`: what `hitherto plan --json` writes under "plan"; `drawn`: a line style per size, in the order of the sizes.
    """
    points = sorted(plan["points"], key=lambda point: (point["tokens"], point["replicas"]))
    sizes = {f"{tokens:,} tokens": list(some) for tokens, some in groupby(points, lambda point: point["tokens"])}
    styles = dict(zip(sizes, drawn.values(), strict=True))
    return _within_the_slo(sizes, ("replicas", "replicas"), plan["attainment"], styles)


def _within_the_slo(series, across, attainment: float, drawn: Mapping[str, Line] | None = None) -> list[Plot]:
    caption = f"Share of the requests; dashed: the {attainment * 100:g} % asked for."
    reads = {"": lambda point: point["share"]}
    return _against("Within the SLO", caption, series, across, reads, drawn, limit=attainment)


def _against(
    title: str,
    caption: str,
    series: Mapping[str, Sequence[Point]],
    across: tuple[str, str],
    reads: Mapping[str, Callable[[Point], float | None]],
    drawn: Mapping[str, Line] | None = None,
    up: Callable[[float, object], str] = _percent,
    **marks: float | None,
) -> list[Plot]:
    """Return one plot with a curve per series and figure, or none where no figure is known.

    `across`: the key of a point's value for the x axis, and the label of the axis; `reads`: functions that take a
    point's figures for the y axis, by name; `marks`: `limit` and `mark` of the plot.
    """
    key, label = across
    least = _LEAST_MS if up is _milliseconds else 0.0
    curves = {}
    for one, points in series.items():
        for what, read in reads.items():
            known = [np.nan if (value := read(point)) is None else max(value, least) for point in points]
            curves[one or what or "all"] = Curve([point[key] for point in points], known)
    if np.isnan(np.concatenate([curve.y for curve in curves.values()])).all():
        return []
    return [Plot(title, caption, curves, drawn or lines(curves), _number, up, **marks, label=label)]
