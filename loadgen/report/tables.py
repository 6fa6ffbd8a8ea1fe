"""Tables as data, which the HTML page and the terminal both draw.

Where a terminal is narrower than a table, Rich folds cells at their blanks; a pipe or a file has lines of any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

STYLES = {"best": "bold green", "better": "green", "worse": "red", "yes": "green", "no": "red", "soft": "dim"}


class Cell(NamedTuple):
    """A cell of a table; `look` is a key of STYLES and a CSS class of the HTML page, or "" for a plain cell."""

    text: str
    look: str = ""


class Grid(NamedTuple):
    """A table: the headings of its columns and its rows; the first column has the rows' names."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def drawn(grid: Grid, left: Sequence[int] = (0,), header_style: str = "bold", title: str | None = None) -> Table:
    """Return a grid as a table for the terminal; columns are right-aligned, except those numbered in `left`."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, header_style=header_style, title_justify="left", title=title)
    for number, heading in enumerate(grid.heads):
        made.add_column(heading, overflow="fold", justify="left" if number in left else "right")
    for row in grid.rows:
        made.add_row(*(Text(cell.text, STYLES.get(cell.look, "")) for cell in row))
    return made


def plain(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> Table:
    """Return a table of texts for the terminal, with a title above it."""
    return drawn(Grid(heads, [[*map(Cell, row)] for row in rows]), left, title=title)
