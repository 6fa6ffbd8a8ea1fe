"""The plots of a report, drawn for the page (SVG in the colours of the page) and for `--png`.

A target or policy has the same colour in all plots. Times count from when the first request of a run was due.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from loadgen.drive.records import Record
from loadgen.report.shares import percent
from loadgen.report.summary import Records, Reports, began

_SIZE = (5.2, 3.1)  # inches, of one plot; with 10.5-point letters it is legible on a phone
# Each has a contrast of at least 3:1 on white and on black.
_COLOURS = ("#12907f", "#d97a1e", "#5a76d8", "#c34f86", "#7d962c", "#8d62c9", "#3f9cc4", "#a9703d")
_DASHES = ("-", (0, (4, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)))
_DASHED = (0, (4, 3))  # a limit
_WINDOW_REQUESTS = 25  # per window of time; with fewer its figures are noise
_MOST_WINDOWS, _FEWER_WINDOWS = 60, 24  # fewer where many lines cross
_MANY = 5  # targets
_NAMED_ROWS = 16
_SHADE = 0.6  # exponent of opacity over load; below 1, so that loads far below the peak remain visible
_MOST_STEPS = 500  # of a distribution; more are not visible
_LEAST_MS = 1e-3  # a logarithmic axis has no 0, but a virtual clock does
_MOST_POINTS = 1500  # per target in a scatter plot
_LOOK = {
    "font.size": 10.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.left": False,
    "xtick.major.size": 3,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
}


def _ms(value: float, _: object = None) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


def _percent(value: float, _: object = None) -> str:
    return f"{value * 100:.0f} %"


def _thousands(value: float, _: object = None) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Ink:
    """Colours of text, labels and axes."""

    text: str
    soft: str
    line: str


_PAPER = Ink("#17201e", "#66716e", "#dfe3dd")
_PAGE = Ink("#010203", "#010204", "#010205")  # unique placeholders, replaced by the page's colours
_VARIABLES = {_PAGE.text: "var(--text)", _PAGE.soft: "var(--soft)", _PAGE.line: "var(--line)"}


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot; `draw` draws it onto axes in the colours of `Ink`."""

    title: str
    caption: str
    draw: Callable[[Axes, Ink], None]

    def svg(self) -> str:
        """Return the plot as an SVG element for the page."""
        with matplotlib.rc_context({**_LOOK, "svg.hashsalt": self.title}):
            figure = Figure(_SIZE, layout="constrained")
            _panel(self, figure.add_subplot(), _PAGE)
            out = io.StringIO()
            figure.savefig(out, format="svg", transparent=True, dpi=200, metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        for colour, variable in _VARIABLES.items():
            text = text.replace(colour, variable)
        return text[text.index("<svg") :]


@dataclass(frozen=True, slots=True)
class Line:
    """The line style of a target: one of eight colours, dashed where there are more targets than that."""

    colour: str
    dash: object

    @property
    def look(self) -> dict[str, object]:
        return {"color": self.colour, "linestyle": self.dash}


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
    """Return the plots for which these runs have data."""

    def those(keep: Callable[[Record], object], among: Records = records) -> Records:
        return {name: [record for record in done if keep(record)] for name, done in among.items()}

    good = those(lambda record: record.error is None)
    reporting = those(lambda record: record.prompt_tokens and record.cached_tokens is not None, good)
    predicted = those(lambda record: record.predicted_tokens is not None, reporting)
    named = those(lambda record: record.replica is not None)
    slo = next((report["goodput"]["slo_ms"] for report in reports.values() if report.get("goodput")), {})
    band = partial(_ttft, 99) if len(good) < _MANY else None
    found = [
        *(_distribution(what, read, good, slo, drawn) for what, read in _LATENCIES.items()),
        _over_time(
            "TTFT over time",
            f"Median of the requests sent in each window of time{'; the band above reaches to p99' if band else ''}.",
            good,
            drawn,
            partial(_ttft, 50),
            _ms,
            band,
        ),
        _over_time(
            "Hit rate over time",
            "Cached tokens over prompt tokens, as engines report them, by when requests were sent.",
            reporting,
            drawn,
            _hit_rate,
            _percent,
        ),
        _load(named, reports, drawn),
        _predicted(predicted, drawn),
    ]
    return [plot for plot in found if plot]


_LATENCIES: dict[str, Callable[[Record], Iterable[float | None]]] = {
    "TTFT": lambda record: (record.ttft,),
    "TPOT": lambda record: (record.tpot,),
    "E2E": lambda record: (record.e2e,),
    "ITL": lambda record: record.gaps,
}


def _distribution(
    what: str,
    read: Callable[[Record], Iterable[float | None]],
    records: Records,
    slo: Mapping[str, float],
    drawn: Mapping[str, Line],
) -> Plot | None:
    limit = slo.get({"E2E": "e2el"}.get(what, what.lower()))
    values = {
        name: np.sort([max(1000 * one, _LEAST_MS) for record in done for one in read(record) if one is not None])
        for name, done in records.items()
    }
    values = {name: times for name, times in values.items() if times.size}
    if not values:
        return None

    def draw(axes: Axes, ink: Ink) -> None:
        for name, times in values.items():
            ranks = np.unique(np.linspace(1, times.size, min(times.size, _MOST_STEPS), dtype=int))
            axes.step(times[ranks - 1], ranks / times.size, where="post", **drawn[name].look)
        if limit:
            axes.axvline(limit, color=ink.soft, linewidth=1, linestyle=_DASHED)
        low, high = min(times[0] for times in values.values()), max(times[-1] for times in values.values())
        _time_scale(axes.xaxis, max(low, high / 1e4), max(high, limit or 0))
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        axes.set_ylim(0, 1.02)

    of = "gaps between chunks" if what == "ITL" else "requests"
    caption = f"Share of {of} with at most this {what}.{' The dashed line is the SLO.' if limit else ''}"
    return Plot(f"{what} distribution", caption, draw)


def _ttft(percentile: float, window: Sequence[Record]) -> float:
    """Return a percentile of TTFT in ms; NaN where nothing was answered."""
    times = [record.ttft * 1000 for record in window if record.ttft is not None]
    return float(np.percentile(times or [np.nan], percentile))


def _hit_rate(window: Sequence[Record]) -> float:
    return sum(record.cached_tokens for record in window) / sum(record.prompt_tokens for record in window)


def _over_time(
    title: str,
    caption: str,
    records: Records,
    drawn: Mapping[str, Line],
    figure: Callable[[Sequence[Record]], float],
    form: Callable[[float, object], str],
    upper: Callable[[Sequence[Record]], float] | None = None,
) -> Plot | None:
    """Plot `figure` over time; `upper` is the upper end of a band above it."""
    most = _FEWER_WINDOWS if len(records) >= _MANY else _MOST_WINDOWS
    series = {name: _windows(done, figure, most) for name, done in records.items() if len(done) > 1}
    bands = {name: _windows(records[name], upper, most)[1] for name in series} if upper else {}
    if not series:
        return None

    def draw(axes: Axes, ink: Ink) -> None:
        for name, above in bands.items():
            axes.fill_between(*series[name], above, color=drawn[name].colour, alpha=0.16, linewidth=0)
        for name, (times, values) in series.items():
            axes.plot(times, values, marker="o" if len(times) < 10 else None, markersize=4, **drawn[name].look)
        axes.set_xlim(0, None)
        _clock(axes)
        axes.yaxis.set_major_formatter(FuncFormatter(form))
        axes.set_ylim(0, min(axes.get_ylim()[1] * 1.15, 1.02) if form is _percent else None)

    return Plot(title, caption, draw)


def _windows(
    records: Sequence[Record], figure: Callable[[Sequence[Record]], float], most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the middles of equal time windows and the figure of the requests sent in each; NaN where none was."""
    zero = began(records)
    sent = np.array([record.sent - zero for record in records])
    number = min(max(len(records) // _WINDOW_REQUESTS, 4), most)
    edges = np.linspace(0, max(sent.max(), 1e-9), number + 1)
    windows: list[list[Record]] = [[] for _ in range(number)]
    for record, window in zip(records, np.clip(np.searchsorted(edges, sent, "right") - 1, 0, number - 1)):
        windows[window].append(record)
    return (edges[1:] + edges[:-1]) / 2, np.array([figure(window) if window else np.nan for window in windows])


def in_flight(records: Sequence[Record], edges: np.ndarray, zero: float) -> np.ndarray:
    """Return the mean number of requests in flight between neighbouring `edges` (seconds from `zero`)."""

    def spent(moments: Iterable[float]) -> np.ndarray:
        """Return, at each edge, the sum of the seconds since each earlier moment."""
        moments = np.sort([moment - zero for moment in moments])
        before = np.searchsorted(moments, edges)
        return before * edges - np.concatenate(([0.0], np.cumsum(moments)))[before]

    gone = spent(record.sent for record in records) - spent(record.last for record in records)
    return np.diff(gone) / np.diff(edges)


def _load(records: Records, reports: Reports, drawn: Mapping[str, Line]) -> Plot | None:
    """Plot requests in flight: a band per target with a row per replica, darker with more requests."""
    bands = {}
    for name, done in records.items():
        if done:
            zero, end = began(done), max(record.last for record in done)
            edges = np.linspace(0, max(end - zero, 1e-9), 161)
            by_replica: dict[str, list[Record]] = {one: [] for one in reports[name]["replicas"]}
            for record in done:
                by_replica[record.replica].append(record)
            bands[name] = (
                edges[-1],
                [*by_replica],
                np.array([in_flight(one, edges, zero) for one in by_replica.values()]),
            )
    if not bands:
        return None
    most = max(float(rows.max()) for _, _, rows in bands.values()) or 1.0

    def draw(axes: Axes, ink: Ink) -> None:
        for number, (name, (end, _, rows)) in enumerate(bands.items()):
            image = np.empty((*rows.shape, 4))
            image[..., :3], image[..., 3] = to_rgb(drawn[name].colour), np.clip(rows / most, 0.0, 1.0) ** _SHADE
            axes.imshow(image, extent=(0, end, number + 0.94, number + 0.06), aspect="auto", interpolation="nearest")
            for row in range(1, len(rows)) if len(rows) * len(bands) <= 40 else ():
                axes.axhline(number + 0.06 + 0.88 * row / len(rows), color=ink.line, linewidth=0.6)
        axes.set_xlim(0, max(end for end, _, _ in bands.values()))
        axes.set_ylim(len(bands), 0)
        (_, replicas, _), *others = bands.values()
        if others:
            axes.set_yticks(np.arange(len(bands)) + 0.5, map(_short, bands))
        elif len(replicas) <= _NAMED_ROWS:
            axes.set_yticks(0.06 + 0.88 * (np.arange(len(replicas)) + 0.5) / len(replicas), map(_short, replicas))
        else:
            axes.set_yticks([0.5], [f"{len(replicas)} replicas"])
        axes.grid(False)
        _clock(axes)

    caption = f"A row per replica; full colour is {most:.0f} requests in flight, none is 0."
    return Plot("Load of each replica over time", caption, draw)


def _predicted(records: Records, drawn: Mapping[str, Line]) -> Plot | None:
    points = {
        name: np.array([(record.predicted_tokens, record.cached_tokens) for record in done])
        for name, done in records.items()
        if done
    }
    if not points:
        return None
    all_of_them = np.concatenate(list(points.values()))
    most, exact = float(all_of_them.max()) or 1.0, float((all_of_them[:, 0] == all_of_them[:, 1]).mean())

    def draw(axes: Axes, ink: Ink) -> None:
        axes.plot((0, most), (0, most), color=ink.soft, linewidth=0.8)
        shown = {name: pairs[:: math.ceil(len(pairs) / _MOST_POINTS)] for name, pairs in points.items()}
        # mix the order, so that the last target does not cover the others
        mixed = np.random.default_rng(0).permutation(sum(map(len, shown.values())))
        colours = np.array([to_rgb(drawn[name].colour) for name, pairs in shown.items() for _ in pairs])[mixed]
        across, up = np.concatenate(list(shown.values()))[mixed].T
        axes.scatter(across, up, s=11, c=colours, alpha=0.5, linewidths=0, rasterized=True)
        axes.set_xlim(-0.02 * most, 1.03 * most)
        axes.set_ylim(-0.02 * most, 1.05 * most)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(_thousands))
        axes.set_xlabel("cached tokens, predicted", color=ink.soft)
        axes.set_ylabel("delivered", color=ink.soft)

    caption = f"Cached tokens of each prompt: exactly as the gateway predicted for {percent(exact)} of the requests. Above the line the engine found more."
    return Plot("Predicted against delivered", caption, draw)


def of_sweep(
    steps: Sequence[Mapping[str, object]],
    slo: Mapping[str, float],
    attainment: float,
    found: float | None,
    knee: float | None,
) -> list[Plot]:
    """Return the plots of latency, throughput, attainment and hit rate against the request rate.

    `steps` have a `rate`, the `share` within the SLO and a `report`; `found` is the rate that keeps the SLO.
    """
    steps = sorted(steps, key=lambda step: step["rate"])
    rates = [step["rate"] for step in steps]

    def curve(name: str, read: Callable[[Mapping[str, object]], float | None], colour: str = _COLOURS[0]) -> Curve:
        return Curve(name, rates, [_known(read(step)) for step in steps], colour)

    sign = " The line upright is the rate that was found." if found else ""
    against = partial(_against, across="requests a second, offered", upright=found)
    plots = []
    for what, about in (("TTFT", "to the first token"), ("TPOT", "per token after the first")):
        key, limit = what.lower(), slo.get(what.lower())
        curves = [
            curve(name, lambda step, key=key, name=name: (step["report"][f"{key}_ms"] or {}).get(name), colour)
            for name, colour in zip(("p50", "p90", "p99"), _COLOURS)
        ]
        caption = f"Time {about}.{' Dashed: the SLO.' if limit else ''}{sign}"
        plots.append(against(f"{what} against load", caption, curves, limit=limit, form=_ms))
    answered = curve("answered", lambda step: step["report"]["request_throughput"])
    caption = f"Requests a second.{' The line upright is the knee.' if knee else ''}"
    plots += [
        against("Answered against offered", caption, [answered], upright=knee, form=_thousands, most=None),
        against(*_within(attainment), [curve("share", lambda step: step["share"])], limit=attainment),
        against(*_HITS, [curve("hit rate", _hits)]),
    ]
    return [plot for plot in plots if plot]


def of_plan(points: Sequence[Mapping[str, object]], attainment: float, drawn: Mapping[str, Line]) -> list[Plot]:
    """Return the plots of attainment and hit rate against the number of replicas, one line per cache size.

    `drawn` has as many line styles, in the order of the sizes.
    """
    points = sorted(points, key=lambda point: (point["tokens"], point["replicas"]))
    sizes = [(tokens, list(some)) for tokens, some in groupby(points, lambda point: point["tokens"])]

    def curves(read: Callable[[Mapping[str, object]], float | None]) -> list[Curve]:
        return [
            Curve(
                f"{tokens:,} tokens",
                [one["replicas"] for one in some],
                [_known(read(one)) for one in some],
                line.colour,
            )
            for (tokens, some), line in zip(sizes, drawn.values(), strict=True)
        ]

    against = partial(_against, across="replicas", whole=True)
    plots = [
        against(*_within(attainment), curves(lambda point: point["share"]), limit=attainment),
        against(*_HITS, curves(_hits), most=None),
    ]
    return [plot for plot in plots if plot]


def _within(attainment: float) -> tuple[str, str]:
    return "Within the SLO", f"Share of the requests; dashed: the {attainment * 100:g} % asked for."


_HITS = ("Hit rate", "Cached tokens over prompt tokens, as engines report them.")


def _hits(point: Mapping[str, object]) -> float | None:
    return point["report"]["cache"]["hit_rate"]


def _known(value: float | None) -> float:
    return np.nan if value is None else value


@dataclass(frozen=True, slots=True)
class Curve:
    """Figures against the rate or the size of a fleet; NaN where unknown."""

    name: str
    at: Sequence[float]
    figures: Sequence[float]
    colour: str


def _against(
    title: str,
    caption: str,
    curves: Sequence[Curve],
    *,
    across: str,
    limit: float | None = None,
    upright: float | None = None,
    form: Callable[[float, object], str] = _percent,
    whole: bool = False,
    most: float | None = 1.02,
) -> Plot | None:
    """Plot curves against a common x axis.

    `limit`: y of a dashed line; `upright`: x of a vertical line; `whole`: the x axis has whole numbers; `most`: top of
    the y axis.
    """
    known = np.concatenate([curve.figures for curve in curves])
    if np.isnan(known).all():
        return None

    def draw(axes: Axes, ink: Ink) -> None:
        for curve in curves:
            figures = np.maximum(curve.figures, _LEAST_MS) if form is _ms else curve.figures
            axes.plot(curve.at, figures, color=curve.colour, marker="o", markersize=4, label=curve.name)
        if upright:
            axes.axvline(upright, color=ink.soft, linewidth=0.8)
        if limit:
            axes.axhline(limit, color=ink.soft, linewidth=1, linestyle=_DASHED)
        axes.set_xlabel(across, color=ink.soft)
        axes.set_xlim(0, None)
        if whole:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if form is _ms:
            _time_scale(axes.yaxis, max(np.nanmin(known), _LEAST_MS), max(np.nanmax(known), limit or 0.0))
        else:
            axes.yaxis.set_major_formatter(FuncFormatter(form))
            axes.set_ylim(0, most)
        if whole or len(curves) > 1:
            axes.legend(loc="best", labelcolor=ink.text, fontsize=9.5, handlelength=1.2)

    return Plot(title, caption, draw)


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
            _panel(plot, axes, _PAPER)
            axes.set_title(plot.title, loc="left", fontsize=11, fontweight="bold", color=_PAPER.text)
        if len(drawn) > 1:
            marks = [matplotlib.lines.Line2D([], [], **line.look) for line in drawn.values()]
            names = [_short(name, 40) for name in drawn]
            figure.legend(marks, names, loc="outside lower left", ncols=min(len(drawn), 6), labelcolor=_PAPER.text)
        figure.savefig(path, dpi=110, format="png", metadata={"Software": None})


def _panel(plot: Plot, axes: Axes, ink: Ink) -> None:
    axes.grid(axis="y", color=ink.line, linewidth=0.7)
    axes.tick_params(colors=ink.soft, which="both")
    axes.spines["bottom"].set_color(ink.line)
    plot.draw(axes, ink)


def _time_scale(axis, low: float, high: float) -> None:
    """Set a logarithmic axis of milliseconds; the wider its range, the fewer labels per decade."""
    low, high = low / 1.15, max(high, low * 2) * 1.15
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    subs = (
        (1, 2, 3, 5, 7) if high < 8 * low else (1, 2, 5) if high < 100 * low else (1, 3) if high < 1000 * low else (1,)
    )
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(_ms))
    axis.minorticks_off()


def _clock(axes: Axes) -> None:
    """Label the x axis in seconds, or in minutes for long runs."""
    minutes = axes.get_xlim()[1] > 600
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 3, 6, 10) if minutes else None))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 60:g} min" if minutes else f"{value:g} s")


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
