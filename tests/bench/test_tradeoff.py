"""Which cells and aims the curves of weights are of, from figures made up by hand."""

import pytest

from bench import tradeoff
from bench.field import Grid
from bench.field_cells import CELLS
from bench.field_tables import OURS, judged
from bench.field_verdict import gaps, missed
from policies import Candidate, CostGroup, Demand, Load
from policies.rules import least_time

OPEN = [f"agents {at}%" for at in (10, 30, 50, 70)]
CLOSED = [f"coders {users} users a replica" for users in (2, 4, 8)]


def run(e2e=1000.0, ttft=100.0, wall=100.0, hit=0.9, e2e_p99=1000.0, ttft_p99=100.0):
    latencies = {"ttft_mean": ttft, "ttft_p99": ttft_p99, "e2e_mean": e2e, "e2e_p99": e2e_p99, "tpot_p99": 10.0}
    return latencies | {"wall": wall, "hit": hit}


def field(behind=0.2):
    """Ours is behind in everything, the further the later the cell is named."""
    found = {}
    for place, name in enumerate((*OPEN, *CLOSED)):
        more = 1 + behind * (place + 1) / 10
        ours = run(1000 * more, 100 * more, 100 * more, 0.9 - behind * (place + 1) / 100, 1000 * more, 100 * more)
        rules = {"round_robin": run(), "sticky_least_loaded": run()}
        found[name] = {"rate": 1.0} | {rule: {"1": figures} for rule, figures in ({OURS: ours} | rules).items()}
    return gaps(judged(found))


def test_every_missed_aim_has_a_panel_in_the_two_cells_that_miss_it_by_the_most():
    found = field(behind=1.0)
    chosen = tradeoff.panels(found)
    assert {panel.aim.short for panel in chosen} == {aim.short for aim in missed(found)}
    assert {"E2E mean", "E2E blind", "TTFT mean", "TTFT p99", "E2E p99", "wall"} == {aim.short for aim in missed(found)}
    for aim in missed(found):
        assert [panel.cell for panel in chosen if panel.aim == aim and not panel.hits] == [CLOSED[2], CLOSED[1]]
    assert [panel.cell for panel in chosen if panel.hits] == [CLOSED[2], CLOSED[1]]


def test_what_is_met_has_no_panel():
    found = field(behind=0.0)
    assert {panel.title for panel in tradeoff.panels(found)} == {"wall"}  # nobody is 10 % under oneself; hits are even


def played(seeds=(1,)):
    """As `bench.tradeoff` keeps it: later first tokens and earlier last ones, the larger the weight."""
    found = {}
    for cell in (OPEN[3], CLOSED[1], CLOSED[2]):
        variants = {rule: {str(seed): run() for seed in seeds} for rule in ("round_robin", "sticky_least_loaded")}
        for place, factor in enumerate(tradeoff.FACTORS):
            variants[tradeoff.variant(factor)] = {
                str(seed): run(1100 - 10 * place + 10 * seed, 101 + place, 103, 0.88, 1200, 150) for seed in seeds
            }
        found[cell] = variants
    return found


def test_the_table_has_wall_time_and_hits_of_closed_loops_and_errors_over_seeds():
    chosen = tradeoff.panels(field(behind=1.0))
    said = tradeoff.text(played(), chosen)
    table = said[said.index(f"{CLOSED[2]}: ") :].splitlines()
    assert "wall time" in table[2] and "hits, points" in table[2]
    assert table[6].split() == ["x1", "+4.0%", "+50.0%", "+8.0%", "+20.0%", "+3.0%", "-2.0%"]
    assert "+-" not in "\n".join(table)
    assert "+8.5 +-0.5%" in tradeoff.text(played(seeds=(1, 2)), chosen)


def test_the_weights_that_are_multiplied_are_those_of_the_cost(monkeypatch):
    """The share of a stream's own steps that a conversation which goes on pays."""

    def decode():
        idle = Candidate("r", 0, Load(), CostGroup().add("r"))
        [terms] = least_time.COST.of_all(Demand(100, output=100.0), [idle])
        return dict(zip(least_time.TERMS, terms))["decode"]

    for name in ("_BEGINNING", "_GOING_ON"):
        monkeypatch.setattr(least_time, name, getattr(least_time, name))  # so that it is put back
    assert (least_time._BEGINNING, least_time._GOING_ON) == tradeoff._WEIGHTS
    once = decode()
    tradeoff.weigh(2.0)
    assert tuple(2 * weight for weight in tradeoff._WEIGHTS) == (least_time._BEGINNING, least_time._GOING_ON)
    assert decode() == pytest.approx(2 * once)


def test_what_other_code_made_is_not_told(tmp_path):
    grid = Grid(tmp_path / "tradeoff.json", 0.0, 1)
    [cell] = [cell for cell in CELLS if cell.name == OPEN[3]]
    grid.kept["fleets"][cell.fleet] = {"saturation": 40.0, "working_set": 900}
    asked = tradeoff.wanted(grid, [cell], field(behind=1.0), (1, 2))
    for (name, variant, seed), of, _ in asked:
        grid.kept["cells"][name].setdefault(variant, {})[seed] = run() | {"of": of}
    assert set(tradeoff.current(grid, asked)[cell.name][OURS + "@x1"]) == {"1", "2"}
    grid.kept["cells"][cell.name][OURS + "@x4"]["2"]["of"] = "another"
    assert {len(runs) for runs in tradeoff.current(grid, asked)[cell.name].values()} == {1}
    rules = {variant for (_, variant, _), *_ in asked}
    assert rules == {*map(tradeoff.variant, tradeoff.FACTORS), "round_robin"}
