from loadgen.report import seeds
from loadgen.report.comparison import comparison
from loadgen.report.summary import fair_share


def figures(**changes):
    counts = {"requests": 100, "completed": 100, "not_sent": 0, "failed": 0, "errors": {}, "interrupted": False}
    cache = {"hit_rate": 0.4, "prefill_tokens": 60_000}
    times = {"percentiles": ["p50", "p99"], "ttft_ms": {"p50": 100.0, "p99": 900.0}}
    return {**counts, "cache": cache, **times, "replicas": {"a": {"requests": 10}, "b": {"requests": 10}}, **changes}


def test_a_comparison_that_is_void_has_no_better_and_no_worse():
    new = figures(completed=40, failed=60, ttft_ms={"p50": 10.0, "p99": 20.0})
    assert comparison("new", new, "old", figures()) == [
        "new cannot be compared with old: they did not answer the same requests, and 60 failed with new, 0 with old."
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


def test_a_few_of_the_figures_that_got_worse_are_named_the_worst_first_and_all_are_counted():
    """The table has them all: said again, they are a paragraph that nobody reads."""
    latencies = {"mean": 100.0, "p50": 100.0, "p99": 900.0}
    old = figures(ttft_ms=latencies, tpot_ms=latencies, goodput={"share": 0.9})
    new = figures(
        ttft_ms={"mean": 150.0, "p50": 110.0, "p99": 3600.0},
        tpot_ms={"mean": 120.0, "p50": 99.0, "p99": 450.0},
        goodput={"share": 0.6},
        replicas={"a": {"requests": 19}, "b": {"requests": 1}},
        failed=3,
    )
    assert comparison("new", new, "old", old) == [
        "Worse with new than with old: requests failed 3 instead of 0; TTFT p99 3,600 ms instead of 900 ms (+300 %); "
        "requests of the busiest replica over an even share: 1.90 instead of 1.00 (+90 %); 4 more in the table.",
        "Better with new: TPOT p99 450 ms instead of 900 ms (-50 %).",
        "new against old: 1 better, 7 worse, 3 about the same.",
    ]
    assert comparison("old", old, "new", new) == [
        "Worse with old than with new: TPOT p99 900 ms instead of 450 ms (+100 %).",
        "Better with old: requests failed 0 instead of 3 (-100 %); TTFT p99 900 ms instead of 3,600 ms (-75 %); "
        "requests of the busiest replica over an even share: 1.00 instead of 1.90 (-47 %); 4 more in the table.",
        "old against new: 7 better, 1 worse, 3 about the same.",
    ]


def test_what_is_unknown_is_left_out():
    blank = figures(cache={"hit_rate": None, "prefill_tokens": None}, ttft_ms=None, replicas={})
    said = ["Worse with new than with old: nothing.", "new against old: 0 better, 0 worse, 1 about the same."]
    assert comparison("new", blank, "old", figures()) == said, "requests that failed are known"
    assert fair_share(blank) is None
    assert fair_share(figures(replicas={"a": {"requests": 4}})) is None
