"""The plots of a report, drawn for the page (SVG in the colours of the page) and for `--png`.

Every plot is a set of named curves. A target or policy has the same colour in all plots. Times count from when the
first request of a run was due.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
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


class Ink(NamedTuple):
    """Colours of text, labels and axes."""

    text: str
    soft: str
    line: str


_PAPER = Ink("#17201e", "#66716e", "#dfe3dd")
_PAGE = Ink("#010203", "#010204", "#010205")  # unique placeholders, replaced by the page's colours


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

    def draw(self, axes: Axes, ink: Ink) -> None:
        axes.grid(axis="y", color=ink.line, linewidth=0.7)
        axes.tick_params(colors=ink.soft, which="both")
        axes.spines["bottom"].set_color(ink.line)
        for name, curve in self.curves.items():
            colour, dash = self.drawn[name]
            if curve.band is not None:
                axes.fill_between(curve.x, curve.y, curve.band, color=colour, alpha=0.16, linewidth=0)
            marker = "o" if len(curve.x) < 10 else None
            axes.plot(curve.x, curve.y, color=colour, linestyle=dash, marker=marker, label=name)
        if self.limit:
            axes.axhline(self.limit, color=ink.soft, linewidth=1, linestyle=_DASHED)
        if self.mark:
            axes.axvline(self.mark, color=ink.soft, linewidth=1, linestyle=_DASHED)
        for axis, form, limit in ((axes.xaxis, self.across, self.mark), (axes.yaxis, self.up, self.limit)):
            ends = ("x",) if axis is axes.xaxis else ("y", "band")
            parts = [
                part for curve in self.curves.values() for end in ends if (part := getattr(curve, end)) is not None
            ]
            _scale(axis, form, np.concatenate(parts), limit or 0.0)
        if self.label:
            axes.set_xlabel(self.label, color=ink.soft)
        if self.label and len(self.curves) > 1:
            axes.legend(loc="best", labelcolor=ink.text, fontsize=9.5, handlelength=1.2)

    def svg(self) -> str:
        """Return the plot as an SVG element for the page."""
        with matplotlib.rc_context({**_LOOK, "svg.hashsalt": self.title}):
            figure = Figure(_SIZE, layout="constrained")
            self.draw(figure.add_subplot(), _PAGE)
            out = io.StringIO()
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        for name, colour in _PAGE._asdict().items():
            text = text.replace(colour, f"var(--{name})")
        return text[text.index("<svg") :]


def _scale(axis, form: Callable[[float, object], str], values: np.ndarray, limit: float) -> None:
    """Scale and label an axis; the wider a logarithmic axis, the fewer labels it has per decade."""
    low, high = np.nanmin(values), max(np.nanmax(values), limit)
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


def lines(names: Iterable[str], ordered: bool = False) -> dict[str, Line]:
    """Return a line style per name; where names are `ordered`, colours go from light to dark."""
    names = list(names)
    if ordered:
        shades = matplotlib.colormaps["viridis_r"](np.linspace(0.12, 0.76, max(len(names), 2)))
        return {name: Line(matplotlib.colors.to_hex(shade), "-") for name, shade in zip(names, shades)}
    return {
        name: Line(_COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)])
        for number, name in enumerate(names)
    }


def of_runs(reports: Reports, records: Records, drawn: Mapping[str, Line]) -> list[Plot]:
    """Return the plots of latencies, hit rate and load for which these runs have data; `drawn`: their styles."""
    slo = next((report["goodput"]["slo_ms"] for report in reports.values() if report.get("goodput")), {})
    few = len(records) < _MANY
    band = "; the band above reaches to p99" if few else ""

    def plot(title: str, caption: str, keep, curve: Callable[[str, list[Record]], Curve | None], **axes) -> Plot | None:
        kept = {name: [record for record in done if keep(record)] for name, done in records.items()}
        curves = {name: found for name, done in kept.items() if done and (found := curve(name, done))}
        return Plot(title, caption, curves, drawn, **axes) if curves else None

    def good(record: Record) -> bool:
        return record.error is None

    def over_time(figure, name: str, done: list[Record]) -> Curve | None:
        return _over_time(done, figure, _MOST_WINDOWS if few else _FEWER_WINDOWS)

    found = []
    for what, (key, read) in _LATENCIES.items():
        caption = f"Share of {'gaps between chunks' if what == 'ITL' else 'requests'} with at most this {what}."
        caption += " The dashed line is the SLO." if slo.get(key) else ""
        axes = {"across": _milliseconds, "up": _percent, "mark": slo.get(key)}
        found.append(plot(f"{what} distribution", caption, good, partial(_distribution, read), **axes))
    found += [
        plot(
            "TTFT over time",
            f"Median of the requests sent in each window of time{band}.",
            good,
            partial(over_time, partial(_ttft, 99 if few else None)),
            across=_clock,
            up=_milliseconds,
        ),
        plot(
            "Hit rate over time",
            "Cached tokens over prompt tokens, as engines report them, by when requests were sent.",
            lambda record: good(record) and record.prompt_tokens and record.cached_tokens is not None,
            partial(over_time, _hit_rate),
            across=_clock,
            up=_percent,
        ),
        plot(
            "Load of the busiest replica over time",
            f"Requests in flight on it{'; the band reaches down to the least busy replica' if few else ''}.",
            lambda record: record.replica is not None,
            lambda name, done: _load(done, reports[name]["replicas"], few),
            across=_clock,
            up=_number,
        ),
    ]
    return [one for one in found if one]


_LATENCIES: dict[str, tuple[str, Callable[[Record], Iterable[float | None]]]] = {
    "TTFT": ("ttft", lambda record: (record.ttft,)),
    "TPOT": ("tpot", lambda record: (record.tpot,)),
    "E2E": ("e2el", lambda record: (record.e2e,)),
    "ITL": ("itl", lambda record: record.gaps),
}


def _distribution(read: Callable[[Record], Iterable[float | None]], name: str, done: list[Record]) -> Curve | None:
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
    zero = began(done)
    sent = np.array([record.sent - zero for record in done])
    number = min(max(len(done) // _WINDOW_REQUESTS, 4), most)
    edges = np.linspace(0, max(sent.max(), 1e-9), number + 1)
    windows: list[list[Record]] = [[] for _ in range(number)]
    for record, window in zip(done, np.clip(np.searchsorted(edges, sent, "right") - 1, 0, number - 1)):
        windows[window].append(record)
    y, band = zip(*(figure(window) if window else (np.nan, np.nan) for window in windows))
    x = (edges[1:] + edges[:-1]) / 2
    return Curve(x, y, None if None in band else band) if len(done) > 1 and not np.isnan(y).all() else None


def in_flight(records: Sequence[Record], edges: np.ndarray, zero: float) -> np.ndarray:
    """Return the mean number of requests in flight between neighbouring `edges` (seconds from `zero`)."""

    def spent(moments: Iterable[float]) -> np.ndarray:
        """Return, at each edge, the sum of the seconds since each earlier moment."""
        moments = np.sort([moment - zero for moment in moments])
        before = np.searchsorted(moments, edges)
        return before * edges - np.concatenate(([0.0], np.cumsum(moments)))[before]

    gone = spent(record.sent for record in records) - spent(record.last for record in records)
    return np.diff(gone) / np.diff(edges)


def _load(done: Sequence[Record], replicas: Iterable[str], band: bool) -> Curve:
    """Return the mean requests in flight on the busiest replica, with a band to the least busy one."""
    zero = began(done)
    edges = np.linspace(0, max(max(record.last for record in done) - zero, 1e-9), 41)
    by_replica: dict[str, list[Record]] = {one: [] for one in replicas}
    for record in done:
        by_replica[record.replica].append(record)
    rows = np.array([in_flight(one, edges, zero) for one in by_replica.values()])
    return Curve((edges[1:] + edges[:-1]) / 2, rows.max(0), rows.min(0) if band else None)


Point = Mapping[str, object]  # a rate or a fleet that was tried: its `report`, and the `share` within the SLO


def of_sweep(sweep: Mapping[str, object]) -> list[Plot]:
    """Return the plots of latency, throughput, attainment and hit rate against the request rate.

    `sweep`: as made by `Sweep.figures` in `loadgen.sweep`.
    """
    points = sorted(sweep["steps"], key=lambda step: step["rate"])
    across = {"rate": "requests a second, offered"}
    plots = []
    for what, about in (("TTFT", "to the first token"), ("TPOT", "per token after the first")):
        key, limit = f"{what.lower()}_ms", sweep["slo_ms"].get(what.lower())
        reads = {
            name: lambda point, key=key, name=name: (point["report"][key] or {}).get(name)
            for name in ("p50", "p90", "p99")
        }
        caption = f"Time {about}. Dashed: {'the SLO, and ' if limit else ''}the rate that was found, if one was."
        plots += _against(
            f"{what} against load", caption, {"": points}, across, reads, up=_milliseconds, limit=limit, mark=sweep["rate"]
        )  # fmt: skip
    answered = {"answered": lambda point: point["report"]["request_throughput"]}
    plots += _against("Answered against offered", "Requests a second.", {"": points}, across, answered, up=_number)
    return plots + _kept_and_hits({"": points}, across, sweep["attainment"])


def of_plan(plan: Mapping[str, object], drawn: Mapping[str, Line]) -> list[Plot]:
    """Return the plots of attainment and hit rate against the number of replicas, one line per cache size.

    `plan`: what `hitherto plan --json` writes under "plan"; `drawn`: a line style per size, in the order of the sizes.
    """
    points = sorted(plan["points"], key=lambda point: (point["tokens"], point["replicas"]))
    sizes = {f"{tokens:,} tokens": list(some) for tokens, some in groupby(points, lambda point: point["tokens"])}
    styles = dict(zip(sizes, drawn.values(), strict=True))
    return _kept_and_hits(sizes, {"replicas": "replicas"}, plan["attainment"], styles)


def _kept_and_hits(series, across, attainment: float, drawn: Mapping[str, Line] | None = None) -> list[Plot]:
    kept = f"Share of the requests; dashed: the {attainment * 100:g} % asked for."
    hits = "Cached tokens over prompt tokens, as engines report them."
    return [
        *_against("Within the SLO", kept, series, across, {"": lambda point: point["share"]}, drawn, limit=attainment),
        *_against("Hit rate", hits, series, across, {"": lambda point: point["report"]["cache"]["hit_rate"]}, drawn),
    ]


def _against(
    title: str,
    caption: str,
    series: Mapping[str, Sequence[Point]],
    across: Mapping[str, str],
    reads: Mapping[str, Callable[[Point], float | None]],
    drawn: Mapping[str, Line] | None = None,
    up: Callable[[float, object], str] = _percent,
    **marks: float | None,
) -> list[Plot]:
    """Return one plot with a curve per series and figure, or none where no figure is known.

    `across`: {key of a point's value for the x axis: label of the axis}; `reads`: functions that take a point's figures
    for the y axis, by name; `marks`: `limit` and `mark` of the plot.
    """
    [(key, label)] = across.items()
    least = _LEAST_MS if up is _milliseconds else 0.0
    curves = {}
    for one, points in series.items():
        for what, read in reads.items():
            known = [np.nan if (value := read(point)) is None else max(value, least) for point in points]
            curves[one or what or "all"] = Curve([point[key] for point in points], known)
    if np.isnan(np.concatenate([curve.y for curve in curves.values()])).all():
        return []
    return [Plot(title, caption, curves, drawn or lines(curves), _number, up, **marks, label=label)]


def png(path: Path, plots: Sequence[Plot], drawn: Mapping[str, Line], title: str) -> None:
    """Write all plots on one sheet."""
    with matplotlib.rc_context(_LOOK):
        across = 2 if len(plots) in (1, 2, 4) else 3
        down = math.ceil(len(plots) / across)
        size = _SIZE[0] * across, (_SIZE[1] + 0.45) * down + 0.5 + 0.25 * math.ceil(len(drawn) / 6)
        figure = Figure(size, layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.18, h_pad=0.14)
        figure.suptitle(title, fontsize=13, fontweight="bold", color=_PAPER.text, x=0.012, ha="left")
        for number, plot in enumerate(plots, 1):
            axes = figure.add_subplot(down, across, number)
            plot.draw(axes, _PAPER)
            axes.set_title(plot.title, loc="left", fontsize=11, fontweight="bold", color=_PAPER.text)
        if len(drawn) > 1:
            marks = [matplotlib.lines.Line2D([], [], color=colour, linestyle=dash) for colour, dash in drawn.values()]
            names = [name if len(name) <= 40 else f"{name[:39]}…" for name in drawn]
            figure.legend(marks, names, loc="outside lower left", ncols=min(len(drawn), 6), labelcolor=_PAPER.text)
        figure.savefig(path, dpi=110, format="png", metadata={"Software": None})
