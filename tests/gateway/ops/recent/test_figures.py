"""Figures of the last 15 minutes, from counters that are looked at once a second."""

import pytest

from gateway.ops.metrics import Metrics
from gateway.ops.recent.figures import REPLICA_SLOT, SLOT, SLOTS, WIDTH, Figures, merged, told

from ..stand_in import count

START = 1_000_000_000.0  # a whole multiple of slots and minutes, nearly


@pytest.fixture
def metrics():
    return Metrics()


def test_figures_are_of_the_window_and_leave_it_after_15_minutes(metrics):
    figures = Figures(metrics, START)
    metrics.ttft_seconds.observe((), 0.05)
    metrics.request_seconds.observe("chat", 1.2)
    count(
        metrics,
        requests={("chat", status): 1 for status in ("2xx", "5xx", "cut", "4xx", "aborted")},
        prompt_tokens={"a:1": 1000},
        predicted_cached_tokens={"a:1": 640},
        reported_prompt_tokens={"a:1": 500},
        reported_cached_tokens={"a:1": 250},
    )
    figures.look(START + 1, 3, 2, 7)
    for later in (1, 60, 899 - SLOT):
        figures.look(START + later, 0, 0, 0)
        whole = told(figures.kept(), START + later)["whole"]
        assert 0.04 <= whole["ttft_p50"] <= 0.06 and 1 <= whole["e2e_p99"] <= 1.5
        assert (whole["requests"], whole["errors"], whole["rejected"], whole["aborted"]) == (5, 2, 1, 1)
        assert (whole["hit_predicted"], whole["hit_reported"]) == (0.64, 0.5)
        assert (whole["inflight"], whole["queued"], whole["waiting"]) == (3, 2, 7)
    figures.look(START + 910, 0, 0, 0)
    whole = told(figures.kept(), START + 910)["whole"]
    assert whole["ttft_p50"] is None and whole["hit_reported"] is None and whole["requests"] == whole["waiting"] == 0


def test_curves_end_now_and_have_gaps_where_nothing_was(metrics):
    figures = Figures(metrics, START)
    metrics.ttft_seconds.observe((), 0.05)
    figures.look(START, 4, 0, 0)
    metrics.ttft_seconds.observe((), 2.5)
    figures.look(START + 60, 9, 0, 0)
    curves = told(figures.kept(), START + 60)["curves"]
    assert len(curves["ttft_p50"]) == 60 and 2 <= curves["ttft_p50"][-1] <= 3 and curves["inflight"][-1] == 9
    assert 0.04 <= curves["ttft_p50"][-5] <= 0.06 and curves["ttft_p50"][-2] is None


def test_a_replica_has_figures_of_its_own_until_it_is_forgotten(metrics):
    figures = Figures(metrics, START)
    metrics.replica_ttft_seconds.observe("a:1", 0.05)
    count(metrics, replica_requests={("a:1", "2xx"): 3, ("b:1", "5xx"): 1})
    figures.look(START, 0, 0, 0)
    found = told(figures.kept(), START)["replicas"]
    assert (found["a:1"]["requests"], found["a:1"]["errors"], found["b:1"]["errors"]) == (3, 0, 1)
    assert 0.04 <= found["a:1"]["ttft_p50"] <= 0.06 and found["b:1"]["ttft_p50"] is None
    figures.look(START + SLOT * SLOTS + REPLICA_SLOT, 0, 0, 0)
    assert told(figures.kept(), START)["replicas"]["a:1"]["requests"] == 0
    figures.forget("a:1")
    assert "a:1" not in told(figures.kept(), START)["replicas"]


def test_the_last_minute_is_told_beside_the_window_for_the_gateway_and_each_replica(metrics):
    figures = Figures(metrics, START)
    answered, seconds = ("a:1", "2xx"), "replica_answer_seconds"
    count(metrics, requests={("chat", "5xx"): 3}, replica_requests={answered: 3}, **{seconds: {"a:1": 6.0}})
    figures.look(START + 1, 0, 0, 0)
    count(metrics, requests={("chat", "2xx"): 2}, replica_requests={answered: 2}, **{seconds: {"a:1": 1.0}})
    count(metrics, replica_decode_seconds={"a:1": 4.0}, replica_decode_tokens={"a:1": 200})
    figures.look(START + 100, 0, 0, 0)
    found = told(figures.kept(), START + 100)
    assert (found["whole"]["errors"], found["minute"]["errors"], found["minute"]["requests"]) == (3, 0, 2)
    assert (found["minute_seconds"], found["seconds"]) == (60, 100)
    whole, minute = found["replicas"]["a:1"], found["replicas_minute"]["a:1"]
    assert (whole["answer_mean"], minute["answer_mean"], minute["tpot"]) == (1.4, 0.5, 0.02)
    assert figures.written(60) == {"a:1": (200, 4)}
    figures.look(START + 200, 0, 0, 0)
    assert figures.written(60) == {"a:1": (0, 0)} and figures.written(300) == {"a:1": (200, 4)}


def test_a_replica_that_was_forgotten_and_is_back_counts_from_nothing(metrics):
    figures = Figures(metrics, START)
    metrics.prompt_tokens.inc("a:1", by=1000)
    figures.look(START, 0, 0, 0)
    metrics.forget("a:1")
    count(metrics, prompt_tokens={"a:1": 10}, predicted_cached_tokens={"a:1": 505})
    figures.look(START + 1, 0, 0, 0)
    assert told(figures.kept(), START + 1)["whole"]["hit_predicted"] == 0.5, "505 of 1,010"


def test_memory_is_bounded_however_long_it_runs(metrics):
    figures = Figures(metrics, START)
    for second in range(0, 4000, 3):
        count(metrics, requests={("chat", "2xx"): 1}, replica_requests={("a:1", "2xx"): 1})
        figures.look(START + second, 1, 0, 0)
    kept = figures.kept()
    assert len(kept["rows"]) <= SLOTS and len(kept["replicas"]["a:1"]) == WIDTH
    assert figures._slots.rows.nbytes < 110_000 and figures._replicas["a:1"].rows.nbytes < 30_000


def test_workers_are_added_up_slot_by_slot():
    kept = []
    for number in (1, 2):
        metrics = Metrics()
        figures = Figures(metrics, START - number)
        count(metrics, requests={("chat", "2xx"): number}, replica_requests={("a:1", "2xx"): number})
        figures.look(START, number, 0, number)
        figures.look(START + 60 * (number - 1), 0, 0, 0)  # the second is ahead by a minute
        kept.append(figures.kept())
    both = told(merged(kept), START + 60)
    assert both["whole"]["requests"] == 3 and both["replicas"]["a:1"]["requests"] == 3
    assert both["whole"]["inflight"] == 3 and both["seconds"] == 62
    assert both["curves"]["requests"][-5] == 3 and sum(both["curves"]["requests"]) == 3
