"""What is not all is never shown as all, and what is not nothing never as nothing."""

import pytest

from loadgen.report import show, warm
from loadgen.report.shares import percent, share
from loadgen.report.summary import cache_figures

from .test_summary import record


@pytest.mark.parametrize(
    "value, digits, said",
    [
        (2080 / 2085, 0, "99.8 %"),
        (2080 / 2085, 1, "99.8 %"),
        (0.998, 0, "99.8 %"),
        (0.99998, 1, "99.998 %"),
        (0.00002, 1, "0.002 %"),
        (0.004, 0, "0.4 %"),
        (1.0, 0, "100 %"),
        (1.0, 1, "100.0 %"),
        (0.0, 1, "0.0 %"),
        (0.994, 0, "99 %"),
        (0.1 + 0.2 + 0.7 - 1e-16, 1, "100.0 %"),
    ],
)
def test_percent(value, digits, said):
    assert percent(value, digits) == said


def test_a_report_and_its_sentences_keep_it():
    assert [share(*of) for of in ((1, 3), (99_999, 100_000), (1, 100_000))] == [0.3333, 0.99999, 0.00001]
    assert [share(*of) for of in ((5, 5), (0, 5), (0, 0))] == [1.0, 0.0, None]
    figures = cache_figures([record(prompt_tokens=100_000, cached_tokens=99_998, predicted_tokens=99_999)])
    assert show.percent(figures["hit_rate"]) == "99.998 %"
    assert show.percent(figures["predicted_hit_rate"]) == "99.999 %"
    (said,) = warm.notice(
        {"warm_caches": {"requests": 3, "prompt_tokens": 2085, "cached_tokens": 2080, "is_text": True}}
    )
    assert "2,080 of 2,085 tokens were cached (99.8 %)" in said
