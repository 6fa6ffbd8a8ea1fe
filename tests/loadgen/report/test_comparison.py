import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.report import seeds, show
from loadgen.report.comparison import comparison, less_or_more
from loadgen.report.summary import fair_share


def figures(**changes):
    made = {
        "requests": 100,
        "completed": 100,
        "not_sent": 0,
        "interrupted": False,
        "errors": {},
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
    assert in_words(ttft(p50=new), ttft(p50=old), "p50") == said


def ttft(**at):
    return figures(ttft_ms=at)


def in_words(new, old, at):
    return less_or_more(show.latency("TTFT", "ttft_ms", at), new, old, "faster", "slower")


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6))
def test_worse_is_said_as_readily_as_better(new, old):
    said = in_words(ttft(p50=new), ttft(p50=old), "p50")
    if "faster" in said:
        assert new < old
    elif "slower" in said:
        assert new > old
    else:
        assert abs(new - old) <= 0.05 * old


def seeded(at, *values):
    """A report over several seeds, of which each has one value at that percentile."""
    return seeds.merged([figures(percentiles=[at], ttft_ms={at: value}) for value in values])


@pytest.mark.parametrize(
    "new, old, at, said",
    [
        (ttft(p99=83), ttft(p99=100), "p99", "no difference beyond noise"),  # a tail of one run: 20 %
        (ttft(p99=117), ttft(p99=100), "p99", "no difference beyond noise"),
        (ttft(p99=70), ttft(p99=100), "p99", "1.4× faster"),
        (seeded("p99.9", 79.6, 81.4, 121.0), seeded("p99.9", 96.7, 97.3, 115.0), "p99.9", "no difference beyond noise"),
        (seeded("p50", 97, 97.5, 98), seeded("p50", 99, 100, 101), "p50", "1.03× faster"),  # little, but sure
        (seeded("p50", 98, 99, 100), seeded("p50", 99, 100, 101), "p50", "about the same"),
    ],
)
def test_words_follow_the_rule_of_better_and_worse(new, old, at, said):
    sentences = comparison("new", {**new, "percentiles": [at]}, "old", {**old, "percentiles": [at]})
    assert sentences[-1].endswith(f"; TTFT {at} {said}.")
    assert f"TTFT {at}" not in sentences[0], "it is no worse"


def test_a_comparison_that_is_void_has_no_better_and_no_worse():
    new = figures(completed=40, failed=60, ttft_ms={"p50": 10.0, "p99": 20.0})
    assert comparison("new", new, "old", figures()) == [
        "new cannot be compared with old: they did not answer the same requests, and 60 failed with new, 0 with old.",
    ]


def test_figures_that_differ_do_not_read_the_same():
    old, new = (
        seeds.merged([figures(tpot_ms={"mean": mean + off}) for off in (-0.01, 0.0, 0.01)]) for mean in (6.26, 6.34)
    )
    assert "Worse with new than with old: TPOT mean 6.34 ms instead of 6.26 ms (+1 %)." in comparison(
        "new", new, "old", old
    )


def test_points_add_up_with_the_shares_that_are_shown():
    old, new = (figures(cache={"hit_rate": rate, "prefill_tokens": None}) for rate in (0.3664, 0.8706))
    said = "engines' replies 36.6 % instead of 87.1 % (-50.5 points)"  # 50.4 as they are
    assert said in comparison("new", old, "old", new)[0]


def test_what_got_worse_and_one_line_of_the_rest_which_the_table_has():
    better = figures(
        cache={"hit_rate": 0.9, "prefill_tokens": 10_000},
        ttft_ms={"p50": 50.0, "p99": 910.0},
        replicas={"a": {"requests": 12}, "b": {"requests": 8}},
    )
    assert comparison("new", better, "old", figures()) == [
        "Worse with new than with old: requests of the busiest replica over an even share: 1.20 instead of 1.00 (+20 %).",
        "new against old: 90 % of all prompt tokens found in a cache against 40 % (2.2× as many); TTFT p50 2.0× faster; "
        "TTFT p99 about the same.",
    ]


@pytest.mark.parametrize(
    "asked, said",
    [
        (
            ["p50", "p95", "p99.9"],
            "TTFT p50 2.0× faster; TTFT p99.9 no difference beyond noise",
        ),
        (["p95"], "TTFT p95 about the same"),
    ],
)
def test_the_first_token_is_told_at_the_percentiles_that_were_asked_for(asked, said):
    old = figures(percentiles=asked, ttft_ms={"p50": 100.0, "p95": 70.0, "p99": 800.0, "p99.9": 900.0})
    new = figures(percentiles=asked, ttft_ms={"p50": 50.0, "p95": 70.0, "p99": 800.0, "p99.9": 950.0})
    assert comparison("new", new, "old", old)[-1].endswith(f"; {said}.")


def test_a_comparison_that_came_out_badly_says_so():
    worse = figures(cache={"hit_rate": 0.2, "prefill_tokens": 80_000}, ttft_ms={"p50": 300.0, "p99": 1800.0}, failed=3)
    text = " ".join(comparison("new", worse, "old", figures()))
    assert "2.0× fewer" in text and "80,000 instead of 60,000 (+33 %)" in text and "3.0× slower" in text
    assert "TTFT p99 1,800 ms instead of 900 ms (+100 %); requests failed 3 instead of 0." in text


def test_what_is_unknown_is_left_out():
    blank = figures(cache={"hit_rate": None, "prefill_tokens": None}, ttft_ms=None, replicas={})
    said = ["Worse with new than with old: nothing."]  # requests that failed are known
    assert comparison("new", blank, "old", figures()) == said
    assert fair_share(blank) is None
    assert fair_share(figures(replicas={"a": {"requests": 4}})) is None
