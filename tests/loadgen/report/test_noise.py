"""What counts as a difference, of single runs and of several seeds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.report import noise, show
from loadgen.report.noise import Verdict
from loadgen.report.seeds import merged

FIGURES = st.floats(0.1, 1e5)


def report(ttft: float, **fields) -> dict:
    return {"requests": 100, "ttft_ms": {"mean": ttft, "p99": ttft}, "percentiles": ["p50"], "errors": {}, **fields}


def judged(new: list[float], old: list[float], label: str = "TTFT mean") -> Verdict:
    rows = {row.label: row for row in show.rows_of({"": {"percentiles": ["p50", "p99"]}})}
    return noise.judged(rows[label], merged([report(one) for one in new]), merged([report(one) for one in old]))


@pytest.mark.parametrize(
    "new, old, label, verdict",
    [
        ([104], [100], "TTFT mean", Verdict.SAME),
        ([106], [100], "TTFT mean", Verdict.WORSE),
        ([94], [100], "TTFT mean", Verdict.BETTER),
        ([115], [100], "TTFT p99", Verdict.SAME),  # few requests make a tail
        ([125], [100], "TTFT p99", Verdict.WORSE),
        ([104, 105, 106], [100, 101, 102], "TTFT mean", Verdict.WORSE),  # below 5 %, but no seed disagrees
        ([104, 105, 101], [100, 101, 102], "TTFT mean", Verdict.SAME),
        ([150, 200, 90], [100, 101, 102], "TTFT mean", Verdict.SAME),
        ([104, 106], [100, 101], "TTFT mean", Verdict.SAME),  # two seeds tell nothing about noise
        ([100.4, 100.5, 100.6], [100, 100.1, 100.2], "TTFT mean", Verdict.SAME),  # sure, and of no use
    ],
)
def test_a_difference_counts_when_it_is_more_than_noise(new, old, label, verdict):
    assert judged(new, old, label) is verdict


@given(st.lists(FIGURES, min_size=1, max_size=5), st.lists(FIGURES, min_size=1, max_size=5))
def test_what_is_better_one_way_is_worse_the_other_way(new, old):
    turned = {Verdict.BETTER: Verdict.WORSE, Verdict.WORSE: Verdict.BETTER, Verdict.SAME: Verdict.SAME}
    if min(len(new), len(old)) >= noise.ENOUGH_SEEDS:
        one, other = judged(new, old), judged(old, new)
        assert one is turned[other] or Verdict.SAME in (one, other)  # 1 % of which of the two
    assert judged(old, old) is Verdict.SAME


def test_nobody_is_better_by_a_figure_that_one_side_lacks():
    row = show.rows_of({"": {"percentiles": []}})[0]
    assert noise.judged(row, {"cache": {"hit_rate": 0.5}}, {"cache": None}) is Verdict.NEITHER
