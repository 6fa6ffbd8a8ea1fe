"""The view of a run, drawn on a recording console and read back as a person would."""

import types

import pytest

from loadgen.drive.records import Record
from loadgen.report import progress

from .conftest import drawn


def frame(view: progress.View, now: float, width: int = 92) -> str:
    return drawn(view.frame(width, now), width)


def answered(last: float, ttft: float = 0.25, **fields) -> Record:
    tokens = {"output_tokens": 20, "prompt_tokens": 1000, "cached_tokens": 500}
    sent = last - 1
    return Record("c", 0, sent, sent=sent, first=sent + ttft, last=last, **{**tokens, "replica": "r0", **fields})


def run_of(done, inflight=None) -> types.SimpleNamespace:
    return types.SimpleNamespace(done=list(done), inflight=inflight or {}, total=50, began=100.0)


def test_figures_are_those_of_the_last_seconds():
    early = [answered(101 + index / 10, 0.9, cached_tokens=0) for index in range(10)]
    late = [answered(121 + index / 10) for index in range(20)]
    run = run_of(early)
    view = progress.View(run, "fleet")
    text = frame(view, 102.0)
    assert "requests/s 5.0 " in text and "TTFT p50 900 ms" in text and "hit rate 0.0 %" in text
    run.done += late
    text = frame(view, 130.0)
    assert "requests/s 2.0   output tokens/s 40   TTFT p50 250 ms   TTFT p99 250 ms   hit rate 50.0 %" in text
    assert "fleet   0 in flight" in text and "30/50  30 s" in text and "failed" not in text
    (mine,) = [line.split() for line in text.splitlines() if line.startswith("r0 ")]
    assert (mine[1], *mine[-2:]) == ("30", "33", "%"), "of a replica it shows all requests so far"


def test_replicas_in_their_order_and_what_is_in_flight_there():
    going = {index: answered(0, replica="r2") for index in range(3)}
    done = [answered(101, replica=name) for name in ("r10", "r2", "r2")]
    text = frame(progress.View(run_of(done, going), "fleet"), 102.0)
    lines = [line for line in text.splitlines() if line.startswith("r") and "requests" not in line]
    assert [line.split()[:2] for line in lines] == [["r2", "2"], ["r10", "1"]]
    assert "●●●" in lines[0] and "●" not in lines[1]
    assert "3 in flight" in text


def test_many_replicas_are_cut_and_none_named_are_left_out():
    text = frame(progress.View(run_of(answered(101, replica=f"r{index}") for index in range(20)), "fleet"), 102.0)
    assert "and 4 more" in text and "r15" in text and "r16" not in text
    assert "replica" not in frame(progress.View(run_of([answered(101, replica=None)]), "fleet"), 102.0)


def test_failures_count_and_spoil_no_latency():
    text = frame(progress.View(run_of([answered(101), answered(102, 9.0, error="closed")]), "fleet"), 110.0)
    assert "1 failed" in text and "TTFT p99 250 ms" in text


def test_a_run_that_has_not_begun():
    run = run_of([])
    run.began = 0.0
    text = frame(progress.View(run, "fleet"), 5000.0)
    assert "0/50  0 s" in text and "TTFT p50 –" in text


@pytest.mark.parametrize("width", [20, 40, 92])
def test_a_narrow_terminal_is_no_trouble(width):
    assert "1/50" in frame(progress.View(run_of([answered(101)]), "f" * 60), 102.0, width)
