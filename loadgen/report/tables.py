"""Tables as data, drawn in full by the page and as far as they fit by a terminal.

Where a terminal is narrow, row names stay whole; what stands in brackets after a figure, such as the range over the
seeds, moves to a second line, and in an even narrower terminal is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

UNBOUNDED = 100_000  # columns, more than any table needs
LEFT_OUT = "wider terminals, pipes and files have the ranges over the seeds, too"
STYLES = {"best": "bold green", "better": "green", "worse": "red", "yes": "green", "no": "red", "soft": "dim"}
_PUTS = (str, lambda figure: figure.replace(" (", "\n(", 1), lambda figure: figure.partition(" (")[0])


class Cell(NamedTuple):
    """A cell; `look` is a key of STYLES, which is also a CSS class of the page."""

    text: str
    look: str = ""


class Grid(NamedTuple):
    """A table: rows, and `heads` of the columns, the first of which has the row names."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class Fitting:
    """A renderable that shows the first of `ways` for which the console is wide enough, else the last one."""

    def __init__(self, *ways: RenderableType):
        self.ways = ways

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=UNBOUNDED)
        fitting = (way for way in self.ways if Measurement.get(console, wide, way).maximum <= options.max_width)
        yield next(fitting, self.ways[-1])


def table(*columns: str, left: Sequence[int] = (0,), header_style: str = "bold", wrap: bool = False, **about) -> Table:
    """Return an empty table; columns are right-aligned except those in `left`. `about`: its title and caption."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, header_style=header_style, title_justify="left", caption_justify="left", **about)  # fmt: skip
    for number, heading in enumerate(columns):
        made.add_column(heading, no_wrap=not wrap, justify="left" if number in left else "right")
    return made


def fitted(
    grid: Grid, seeded: bool, left: Sequence[int] = (0,), header_style: str = "bold", split: bool = False
) -> Fitting:
    """Return a grid's rendering for the width of the console.

    `seeded`: its figures have ranges over seeds. `left`: columns that are left-aligned. `split`: where no rendering
    fits, tables of fewer columns follow each other; headings are then not folded to two lines.
    """

    def drawn(put, fold: bool = False, first: int = 1, last: int | None = None) -> Table:
        at_the_end = last is None or last >= len(grid.heads)  # of several tables only the last one has the caption
        heads = [grid.heads[0], *grid.heads[first:last]]
        heads = [head.replace(" ", "\n", 1) for head in heads] if fold else heads
        caption = LEFT_OUT if put is _PUTS[-1] and seeded and at_the_end else None
        made = table(*heads, left=left, header_style=header_style, caption=caption)
        for row in grid.rows:
            made.add_row(*(Text(put(one.text), STYLES.get(one.look, "")) for one in (row[0], *row[first:last])))
        return made

    columns = range(1, len(grid.heads))
    ways: list[RenderableType] = [drawn(put, fold) for put in _PUTS for fold in ((False,) if split else (False, True))]
    for most in reversed(columns[:-1]) if split else ():
        ways.append(Group(*(drawn(_PUTS[-1], False, at, at + most) for at in columns[::most])))
    return Fitting(*ways)
