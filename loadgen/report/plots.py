"""The plots of the report's HTML page, as SVG in the colours of the page.

Every plot is a set of named curves. A target or policy has the same colour in all plots. Time is measured from when
the first request of a run was due.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from statistics import fmean
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from loadgen.drive.records import Record
from loadgen.report.summary import LATENCIES, Latency, Records, Reports, began, cache_figures

_SIZE = (5.2, 3.1)  # inches, of one plot; with 10.5-point letters it is legible on a phone
# Each colour has a contrast of at least 3:1 on white and on black.
_COLOURS = ("#12907f", "#d97a1e", "#5a76d8", "#c34f86", "#7d962c", "#8d62c9", "#3f9cc4", "#a9703d")
_DASHES = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)))
# A plot over time has up to _MOST_WINDOWS windows, each with about _WINDOW_REQUESTS requests or more: fewer show noise.
_WINDOW_REQUESTS, _MOST_WINDOWS = 25, 40
_MOST_STEPS = 500  # points of a distribution's curve; more are not visible
_LEAST_MS = 1e-3  # drawn for smaller times: a virtual clock can give 0, which a logarithmic axis does not have
_LOOK = {
    "font.size": 10.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "svg.fonttype": "none",
    "text.parse_math": False,
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    "ytick.left": False,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
}
# Placeholders for colours of the page, which `Plot.svg` replaces by the CSS variables of these names.
_INK = {"text": "#010203", "soft": "#010204", "line": "#010205"}


class Line(NamedTuple):
    """The line style of a target or policy: one of eight colours, dashed from the ninth target on."""

    colour: str
    dash: object


class Curve(NamedTuple):
    """A curve of `y` over `x`; unknown values are NaN. If there is a `band`, the area between `y` and it is shaded."""

    x: Sequence[float]
    y: Sequence[float]
    band: Sequence[float] | None = None


def _milliseconds(value: float, _: object = None) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


def _percent(value: float, _: object = None) -> str:
    return f"{value * 100:.0f} %"


def _clock(value: float, _: object = None) -> str:
    return f"{value / 60:.3g} min" if value >= 180 else f"{value:g} s"


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot: named curves over common axes.

    An axis of milliseconds is logarithmic, and an axis of shares ends just above 1 at most.
    """

    title: str
    caption: str
    curves: Mapping[str, Curve]
    drawn: Mapping[str, Line]  # the style of each curve
    across: Callable[[float, object], str] | str  # writes a value of the x axis as text
    up: Callable[[float, object], str] | str  # writes a value of the y axis as text
    limit: float | None = None  # value of y at which a dashed line is drawn
    mark: float | None = None  # value of x at which a dashed line is drawn
    label: str = ""  # of the x axis; a plot that has one also gets a legend if it has several curves

    @property
    def known(self) -> bool:
        """Whether any curve has a value."""
        return any(not np.isnan(curve.y).all() for curve in self.curves.values())

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
                    line(value, color=_INK["soft"], linewidth=1, linestyle="--")
            curves = self.curves.values()
            _scale(axes.xaxis, self.across, [curve.x for curve in curves], self.mark)
            bands = [curve.band for curve in curves if curve.band is not None]
            _scale(axes.yaxis, self.up, [*(curve.y for curve in curves), *bands], self.limit)
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


def _scale(axis, form: Callable[[float, object], str] | str, parts: list[Sequence[float]], limit: float | None) -> None:
    """Set the range, the scale and the tick labels of an axis.

    `form`: writes a value of the axis as text; an axis of milliseconds is logarithmic. `parts`: the values of each
    curve; `limit`: a further value that must be on the axis, or None.
    """
    values = np.concatenate(parts)
    low, high = np.nanmin(values), max(np.nanmax(values), limit or 0.0)
    if form is _milliseconds:
        low, high = max(low, np.nanmax(values) / 1e4) / 1.15, max(high, low * 2) * 1.15
        axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=12))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.axes.set(**{f"{axis.axis_name}lim": (0, min(high * 1.15, 1.02) or None if form is _percent else None)})
        axis.set_major_locator(MaxNLocator(6, integer=not (values % 1).any()))
    axis.set_major_formatter(form)


def lines(names: Iterable[str]) -> dict[str, Line]:
    """Return a line style for each name; the first eight names differ by colour, later ones also by dashes."""
    return {
        name: Line(_COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)])
        for number, name in enumerate(names)
    }


def of_runs(reports: Reports, records: Records, drawn: Mapping[str, Line]) -> list[Plot]:
    """Return the plots of latencies and hit rate for which these runs have data.

    `drawn`: the line style of each target or policy.
    """
    slo = next((report["goodput"]["slo_ms"] for report in reports.values() if report.get("goodput")), {})
    good = {name: [record for record in done if record.error is None] for name, done in records.items()}
    plots = []

    def add(title: str, caption: str, curve: Callable[[list[Record]], Curve | None], **axes) -> None:
        if curves := {name: found for name, done in good.items() if (found := curve(done))}:
            plots.append(Plot(title, caption, curves, drawn, **axes))

    for one in LATENCIES:
        caption = f"Share of {'gaps between chunks' if one.key == 'itl' else 'requests'} with at most this {one.name}."
        caption += " The dashed line is the SLO." if slo.get(one.key) else ""
        curve = partial(_distribution, one)
        add(f"{one.name} distribution", caption, curve, across=_milliseconds, up=_percent, mark=slo.get(one.key))
    caption = "Median of requests that were sent one after the other; the band above reaches to p99."
    add("TTFT over time", caption, partial(_over_time, _ttft), across=_clock, up=_milliseconds)
    caption = "Cached tokens over prompt tokens, as engines report them, by when requests were sent."
    add("Hit rate over time", caption, partial(_over_time, _hit_rate), across=_clock, up=_percent)
    return plots


def _distribution(latency: Latency, done: list[Record]) -> Curve | None:
    times = np.sort([max(1000 * one, _LEAST_MS) for record in done for one in latency.read(record) if one is not None])
    ranks = np.unique(np.linspace(1, times.size, min(times.size, _MOST_STEPS), dtype=int))
    return Curve(times[ranks - 1], ranks / times.size) if times.size else None


def _ttft(window: Sequence[Record]) -> list[float]:
    """Return the median and the p99 of TTFT in ms; NaN if no request of the window was answered."""
    times = [max(record.ttft * 1000, _LEAST_MS) for record in window if record.ttft is not None]
    return list(np.percentile(times or [np.nan], (50, 99)))


def _hit_rate(window: Sequence[Record]) -> list[float]:
    rate = cache_figures(window)["hit_rate"]
    return [np.nan if rate is None else rate]


def _over_time(figure: Callable[[list[Record]], list[float]], done: Sequence[Record]) -> Curve | None:
    """Return the curve of a figure over time, or None if it has no value in any window.

    `done`: the requests, which are divided into consecutive windows with about equal numbers of requests. `figure`:
    returns, for the requests of a window, the curve's value, or the curve's and the band's.
    """
    if len(done) < 2:
        return None
    zero, ordered = began(done), sorted(done, key=lambda record: record.sent)
    number = min(max(len(done) // _WINDOW_REQUESTS, 4), _MOST_WINDOWS, len(done))
    edges = np.linspace(0, len(done), number + 1, dtype=int)
    windows = [ordered[first:last] for first, last in pairwise(edges)]
    middles = [fmean(record.sent - zero for record in window) for window in windows]
    curve = Curve(middles, *zip(*map(figure, windows)))
    return None if np.isnan(curve.y).all() else curve


def of_sweep(sweep: Mapping[str, object]) -> list[Plot]:
    """Return the plots of latencies and of the share within the SLO, against the request rate.

    `sweep`: the figures that `Sweep.figures` returns.
    """
    steps = sorted(sweep["steps"], key=lambda step: step["rate"])
    rates, label = [step["rate"] for step in steps], "requests a second, offered"
    plots = []
    for one in LATENCIES:
        if one.key in ("ttft", "tpot"):
            limit, found = sweep["slo_ms"].get(one.key), [step["report"][f"{one.key}_ms"] or {} for step in steps]
            curves = {name: _curve(rates, [each.get(name) for each in found]) for name in ("p50", "p90", "p99")}
            caption = (
                f"Time {one.about}. Dashed: {'the SLO, and ' if limit else ''}the rate that was found, if one was."
            )
            marks = {"limit": limit, "mark": sweep["rate"], "label": label}
            title, drawn = f"{one.name} against load", lines(curves)
            plots.append(Plot(title, caption, curves, drawn, "{x:g}", _milliseconds, **marks))
    shares = {"all": Curve(rates, [step["share"] for step in steps])}
    plots.append(_within_the_slo(shares, lines(shares), sweep["attainment"], label))
    return [plot for plot in plots if plot.known]


def of_plan(plan: Mapping[str, object], drawn: Mapping[str, Line]) -> list[Plot]:
    """Return the plot of the share within the SLO against the number of replicas, one line per KV cache size.

    `plan`: what `hitherto plan --json` writes under "plan"; `drawn`: a line style per size, in ascending order of size.
    """
    points = sorted(plan["points"], key=lambda point: (point["tokens"], point["replicas"]))
    curves = {}
    for tokens, some in groupby(points, lambda point: point["tokens"]):
        curves[f"{tokens:,} tokens"] = Curve(*zip(*((point["replicas"], point["share"]) for point in some)))
    return [_within_the_slo(curves, dict(zip(curves, drawn.values(), strict=True)), plan["attainment"], "replicas")]


def _within_the_slo(curves: Mapping[str, Curve], drawn: Mapping[str, Line], attainment: float, label: str) -> Plot:
    caption = f"Share of the requests; dashed: the {attainment * 100:g} % asked for."
    return Plot("Within the SLO", caption, curves, drawn, "{x:g}", _percent, limit=attainment, label=label)


def _curve(x: Sequence[float], milliseconds: Sequence[float | None]) -> Curve:
    return Curve(x, [np.nan if value is None else max(value, _LEAST_MS) for value in milliseconds])
