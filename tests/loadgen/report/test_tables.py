"""Tables keep to the width of a terminal, and in it to all of their figures."""

import pytest
from rich.console import Console

from loadgen.report import seeds, show, tables


def read(thing, width: int) -> list[str]:
    """Return the lines of a table in a terminal of this width."""
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)
    with console.file:
        console.print(thing)
        lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines) and "…" not in "".join(lines)
    return lines


@pytest.mark.parametrize("width", (100, 250))
def test_targets_side_by_side_keep_their_names_and_their_figures(runs, width):
    reports = {}
    for name in ("round_robin", "least_load", "least_time"):
        made, _ = runs([f"{name} {seed}" for seed in range(3)], slo={"ttft": 300.0})
        reports[name] = seeds.merged(list(made.values()))
    grid = show.compared(reports)
    words = " ".join(read(tables.drawn(grid), width)).split()
    for row in grid.rows:
        for cell in row:
            assert set(cell.text.split()) <= set(words), cell
    assert set(reports) <= set(words)
