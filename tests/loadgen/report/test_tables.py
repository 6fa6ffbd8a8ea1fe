"""Tables keep to the width of a terminal, and in it to all of their figures."""

import pytest

from loadgen.report import seeds, show, tables

from .conftest import drawn


@pytest.mark.parametrize("width", (100, 250))
def test_targets_side_by_side_keep_their_names_and_their_figures(runs, width):
    reports = {}
    for name in ("round_robin", "least_load", "least_time"):
        made, _ = runs([f"{name} {seed}" for seed in range(3)], slo={"ttft": 300.0})
        reports[name] = seeds.merged(list(made.values()))
    grid = show.compared(reports)
    text = drawn(tables.drawn(grid), width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    words = text.split()
    for row in grid.rows:
        for cell in row:
            assert set(cell.text.split()) <= set(words), cell
    assert set(reports) <= set(words)
