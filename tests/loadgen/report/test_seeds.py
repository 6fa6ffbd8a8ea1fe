"""Several seeds become one report: means, and every seed's own figures beside them."""

import pytest

from loadgen.report import seeds, show


def test_means_of_what_is_known():
    same = {"requests": 4, "model": "m"}
    one = {**same, "interrupted": False, "ttft_ms": {"p50": 10.0}, "errors": {"closed": 1}, "tpot_ms": None}
    two = {**same, "interrupted": True, "ttft_ms": {"p50": 14.0}, "errors": {"closed": 2}, "tpot_ms": {"p50": 3.0}}
    made = seeds.merged([one, two])
    assert seeds.merged([one]) is one
    assert made["ttft_ms"] == {"p50": 12.0} and made["tpot_ms"] == {"p50": 3.0} and made["requests"] == 4
    assert made["errors"] == {"closed": 3} and made["interrupted"] and made["model"] == "m"
    assert made["by_seed"] == [one, two]


@pytest.mark.parametrize(
    "values, said",
    [
        ([12.0], "12.0 ms"),
        ([12.0, 14.0], "13.0 ms (12.0–14.0 ms)"),
        ([9000, 11_000], "10.0 s (9,000 ms–11.0 s)"),
        ([5, 5], "5.0 ms"),
    ],
)
def test_a_figure_has_the_range_over_its_seeds(values, said):
    report = seeds.merged([{"ttft_ms": {"p50": value}, "errors": {}} for value in values])
    assert show.written(report, show.path_of("ttft_ms", "p50"), show.milliseconds) == said


def test_plots_show_the_first_seed():
    assert seeds.first({"a": {}}, {"a, seed 3": [1], "a, seed 4": [2]}, 3) == {"a": [1]}
    assert seeds.first({"a": {}}, {"a": [1]}, 3) == {"a": [1]}
