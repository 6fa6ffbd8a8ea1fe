import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.report.comparison import comparison, less_or_more
from loadgen.report.summary import fair_share


def figures(**changes):
    made = {
        "requests": 100,
        "percentiles": ["p50", "p99"],
        "cache": {"hit_rate": 0.4, "prefill_tokens": 60_000},
        "ttft_ms": {"p50": 100.0, "p99": 900.0},
        "failed": 0,
        "replicas": {"a": {"requests": 10}, "b": {"requests": 10}},
    }
    return made | changes


@pytest.mark.parametrize(
    "new, old, said",
    [
        (50, 100, "2.0× faster"),
        (100, 50, "2.0× slower"),
        (100, 104, "about the same"),
        (96, 100, "about the same"),
        (100, 100, "about the same"),
        (1, 40, "40× faster"),
        (0, 0, "about the same"),
        (0, 5, "faster (from or to nothing, so no ratio)"),
    ],
)
def test_ratios_in_words(new, old, said):
    assert less_or_more(new, old, "faster", "slower") == said


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6))
def test_worse_is_said_as_readily_as_better(new, old):
    said = less_or_more(new, old, "faster", "slower")
    if "faster" in said:
        assert new < old
    elif "slower" in said:
        assert new > old
    else:
        assert abs(new - old) <= 0.05 * old


def test_a_comparison_reads_as_sentences():
    better = figures(
        cache={"hit_rate": 0.9, "prefill_tokens": 10_000},
        ttft_ms={"p50": 50.0, "p99": 910.0},
        replicas={"a": {"requests": 12}, "b": {"requests": 8}},
    )
    assert comparison("new", better, "old", figures()) == [
        "new found 90 % of all prompt tokens in a cache, old 40 %: 2.2× as many.",
        "Its engines computed 10,000 prompt tokens instead of 60,000: 6.0× less work.",
        "The first token came after 50 ms at p50 (old 100 ms, 2.0× faster) and 910 ms at p99 (old 900 ms, about the same).",
        "Better with new than with old: cache hit rate, engines' replies 90.0 % instead of 40.0 % (+50.0 points); "
        "prefill tokens computed 10,000 instead of 60,000 (-83 %); TTFT p50 50.0 ms instead of 100 ms (-50 %).",
        "Worse with new than with old: busiest replica, even share is 1 1.20 instead of 1.00 (+20 %).",
    ]


@pytest.mark.parametrize(
    "asked, said",
    [
        (
            ["p50", "p95", "p99.9"],
            "50 ms at p50 (old 100 ms, 2.0× faster) and 950 ms at p99.9 (old 900 ms, 1.1× slower)",
        ),
        (["p95"], "70 ms at p95 (old 70 ms, about the same)"),
    ],
)
def test_the_first_token_is_told_at_the_percentiles_that_were_asked_for(asked, said):
    old = figures(percentiles=asked, ttft_ms={"p50": 100.0, "p95": 70.0, "p99": 800.0, "p99.9": 900.0})
    new = figures(percentiles=asked, ttft_ms={"p50": 50.0, "p95": 70.0, "p99": 800.0, "p99.9": 950.0})
    assert f"The first token came after {said}." in comparison("new", new, "old", old)


def test_a_comparison_that_came_out_badly_says_so():
    worse = figures(cache={"hit_rate": 0.2, "prefill_tokens": 80_000}, ttft_ms={"p50": 300.0, "p99": 1800.0}, failed=3)
    text = " ".join(comparison("new", worse, "old", figures()))
    assert "2.0× fewer" in text and "1.3× more work" in text and "3.0× slower" in text
    assert "Better with new than with old: nothing." in text
    assert "TTFT p99 1,800 ms instead of 900 ms (+100 %); requests failed 3 instead of 0." in text
    assert "Requests failed: 3 with new, 0 with old." in text


def test_what_is_unknown_is_left_out():
    blank = figures(cache={"hit_rate": None, "prefill_tokens": None}, ttft_ms=None, replicas={})
    said = [
        "Better with new than with old: nothing.",
        "Worse with new than with old: nothing.",
    ]  # requests that failed are known
    assert comparison("new", blank, "old", figures()) == said
    assert fair_share(blank) is None
    assert fair_share(figures(replicas={"a": {"requests": 4}})) is None
