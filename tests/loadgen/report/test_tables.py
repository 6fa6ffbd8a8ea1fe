"""Tables keep the names of their rows and their headings whole on a terminal of any usual width."""

import pytest
from rich.console import Console

from loadgen import diff, sweep
from loadgen.report import seeds, show
from loadgen.report.tables import LEFT_OUT
from loadgen.sweep import Search, Sweep

WIDTHS = (80, 100, 250)


def drawn(thing, width: int) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)
    with console.file:
        console.print(thing)
        return [line.strip() for line in console.export_text().splitlines()]


@pytest.fixture
def several(runs):
    """`several(number)` -> reports of so many targets, each of three seeds."""

    def make(number: int) -> dict:
        made = {}
        for name in (f"target_{index}" for index in range(number)):
            reports, _ = runs([f"{name} {seed}" for seed in range(3)], slo={"ttft": 300.0})
            made[name] = seeds.merged(list(reports.values()))
        return made

    return make


def labels(report: dict) -> list[str]:
    return [row.label for row in show.rows_of({"": report}) if seeds.mean(report, row.read) is not None]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_diff_of_seeds_keeps_names_verdicts_and_means(several, width):
    old, new = several(2).values()
    lines = drawn(diff.table(old, new), width)
    assert all(len(line) <= width for line in lines) and not any("…" in line for line in lines)
    for label in labels(new):
        (line,) = [line for line in lines if line.startswith(f"{label} ")]
        row = next(row for row in show.rows_of({"": new}) if row.label == label)
        assert line.count(row.form(seeds.mean(new, row.read))) >= 2, line  # both files' mean
    assert any("about the same" in line for line in lines)
    assert any("(" in line for line in lines) or LEFT_OUT in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("targets", [1, 2, 3, 6])
@pytest.mark.parametrize("width", WIDTHS)
def test_targets_side_by_side_keep_names_and_means(several, width, targets):
    reports = several(targets)
    lines = drawn(show.comparison_table(reports), width)
    assert all(len(line) <= width for line in lines) and not any("…" in line for line in lines)
    text = "\n".join(lines)
    assert " ".join(text.split()).count(LEFT_OUT) <= 1
    assert all(text.count(name) == 1 for name in reports)
    report = reports["target_0"]
    for label in labels(report):
        row = next(row for row in show.rows_of({"": report}) if row.label == label)
        mine = [line for line in lines if line.startswith(f"{label} ")]
        assert sum(line.count(row.form(seeds.mean(report, row.read))) for line in mine) >= targets


def test_one_run_says_nothing_of_ranges(runs):
    reports, _ = runs(["one", "other"])
    assert LEFT_OUT not in "".join(drawn(show.comparison_table(reports), 80))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sweep_and_a_run_with_seeds_keep_their_headings(several, width):
    report = several(1)["target_0"]
    swept = Sweep(Search(2.0), {"ttft": 300.0}, 0.5, [])
    swept.add(2.0, report)
    lines = drawn(sweep.drawn(swept), width)
    text = " ".join(lines)
    assert all(word in text for word in ("offered", "answered", "within", "TTFT", "TPOT", "p50", "p99", "hit"))
    assert all(len(line) <= width for line in lines) and "…" not in text
    lines = drawn(show.run_report({**report, "interrupted": False}), width)
    table = [line for line in lines if line.startswith(("TTFT ", "ITL ", "TPOT ", "E2E "))]
    assert len(table) == 4 and not any("…" in line for line in lines)
    assert "to the first token" in table[0] and "per token after the first" in table[2]
