"""Tables of figures that fit the terminal: a row's name stays whole, and what is told of a figure beside its mean gives
way, first to a second line and then altogether."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table

UNBOUNDED = 100_000  # columns, more than any table needs
LEFT_OUT = "wider terminals, pipes and files have the ranges over the seeds, too"

Put = Callable[[str], str]  # a figure as `show.written` writes it -> what stands in its cell


def beside(figure: str) -> str:
    return figure


def below(figure: str) -> str:
    """The range over the seeds, if there is one, on a line of its own."""
    return figure.replace(" (", "\n(", 1)


def without(figure: str) -> str:
    return figure.partition(" (")[0]


class Fitting:
    """The first of several ways to draw the same thing for which the console is wide enough, or the last."""

    def __init__(self, *ways: RenderableType):
        self.ways = ways

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=UNBOUNDED)
        fitting = (way for way in self.ways if Measurement.get(console, wide, way).maximum <= options.max_width)
        yield next(fitting, self.ways[-1])


def table(named: bool = True, header_style: str = "bold", ranges_left_out: bool = False) -> Table:
    """An empty one, whose first column has the rows' names if they are `named`."""
    made = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        header_style=header_style,
        caption=LEFT_OUT if ranges_left_out else None,
        caption_justify="left",
    )
    if named:
        made.add_column("", no_wrap=True)
    return made
