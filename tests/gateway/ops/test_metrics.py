"""Counters and histograms: what they hold and what a scrape shows."""

import asyncio

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PromHistogram
from prometheus_client.parser import text_string_to_metric_families

from gateway.ops.metrics import LATENCY_BUCKETS, Histogram, Metrics


def scrape(metrics: Metrics) -> dict[tuple, float]:
    page = asyncio.run(metrics.exposition())[0].decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_a_histogram_has_cumulative_buckets_and_a_sum():
    metrics = Metrics()
    for seconds in (0.005, 0.0051, 1000):
        metrics.replica_ttft_seconds.observe("r1", seconds)
    page = scrape(metrics)
    assert page["hitherto_replica_ttft_seconds_bucket", ("le", "0.005"), ("replica", "r1")] == 1
    assert page["hitherto_replica_ttft_seconds_bucket", ("le", "0.01"), ("replica", "r1")] == 2
    assert page["hitherto_replica_ttft_seconds_bucket", ("le", "300.0"), ("replica", "r1")] == 2
    assert page["hitherto_replica_ttft_seconds_bucket", ("le", "+Inf"), ("replica", "r1")] == 3
    assert page["hitherto_replica_ttft_seconds_count", ("replica", "r1")] == 3
    assert page["hitherto_replica_ttft_seconds_sum", ("replica", "r1")] == pytest.approx(1000.0101)
    assert metrics.replica_ttft_seconds.mean("r1") == pytest.approx(1000.0101 / 3)
    assert metrics.replica_ttft_seconds.mean("r2") is None


@given(st.lists(st.floats(0, 500), min_size=1, max_size=60))
def test_histogram_agrees_with_prometheus_client(numbers):
    registry = CollectorRegistry()
    reference = PromHistogram("x", "x", registry=registry, buckets=LATENCY_BUCKETS)
    ours = Histogram("x", LATENCY_BUCKETS, replica=())
    for number in numbers:
        reference.observe(number)
        ours.observe("r", number)
    expected = {s.labels["le"]: s.value for f in registry.collect() for s in f.samples if s.name == "x_bucket"}
    (family,) = text_string_to_metric_families("".join(ours.lines({})))
    assert {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")} == expected


@given(st.lists(st.floats(0, 299), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantile_is_within_the_bucket_of_the_true_one(numbers, share):
    histogram = Histogram("x", LATENCY_BUCKETS, replica=())
    for place, number in enumerate(numbers):
        histogram.observe("ab"[place % 2], number)
    rank = max(1, -(-share * len(numbers) // 1))
    true = sorted(numbers)[int(rank) - 1]
    bounds = (0, *LATENCY_BUCKETS)
    upper = next(bound for bound in bounds[1:] if true <= bound)
    assert bounds[bounds.index(upper) - 1] <= histogram.quantile(share) <= upper


def test_what_can_be_counted_is_there_at_zero_before_it_happens():
    """rate() sees no counter that appears with 1: the first failure of its kind would raise no alarm."""
    replicas = {"r1": object()}
    metrics = Metrics({"replica": replicas, "policy": ("random",), "tenant": ("a",)})
    page = scrape(metrics)
    assert set(page.values()) >= {0} and not [key for key, n in page.items() if key[0].startswith("hitherto_") and n]
    for series in (
        ("hitherto_requests_total", ("path", "chat"), ("status", "5xx")), ("hitherto_retries_total", ("reason", "connect")),
        ("hitherto_upstream_errors_total", ("kind", "status 500"), ("replica", "r1")), ("hitherto_heals_total", ("replica", "r1")),
        ("hitherto_replica_ttft_seconds_count", ("replica", "r1")), ("hitherto_request_seconds_bucket", ("le", "0.005"), ("path", "chat")),
        ("hitherto_shadow_decisions_total", ("choice", "same"), ("policy", "random")), ("hitherto_rejections_total", ("reason", "413")),
    ):  # fmt: skip
        assert page.get(series) == 0, series
    known = {"replica": replicas, "policy": ("random",), "class": ("free",), "model": ("m",), "tenant": ("a",)}
    assert [metric.name for metric in metrics.all() if len([*metric.lines(known)]) < 2] == []
    replicas["r2"] = replicas.pop("r1")
    names = {value for key in scrape(metrics) for label, value in key[1:] if label == "replica"}
    assert names == {"r2"}, "those of a replica come and go with it"


def test_what_several_processes_count_adds_up():
    processes, together = [Metrics(), Metrics()], Metrics()
    for number, one in enumerate(processes):
        one.requests.inc("chat", "2xx", by=number + 1)
        for replica in ("a", "b")[: number + 1]:
            one.replica_ttft_seconds.observe(replica, 0.02 * (number + 1))
        together.add(orjson.loads(orjson.dumps(one.counts())))
    assert together.requests.values == {("chat", "2xx"): 3}
    assert (together.replica_ttft_seconds.count("a"), together.replica_ttft_seconds.count("b")) == (2, 1)


def test_a_removed_replica_leaves_no_series():
    metrics = Metrics()
    for replica in ("r1", "r2"):
        metrics.prompt_tokens.inc(replica, by=10)
        metrics.upstream_errors.inc(replica, "connect")
        metrics.replica_ttft_seconds.observe(replica, 0.1)
    metrics.requests.inc("chat", "2xx")
    metrics.forget("r1")
    page = scrape(metrics)
    assert not [key for key in page if ("replica", "r1") in key]
    assert page["hitherto_prompt_tokens_total", ("replica", "r2")] == 10
    assert page["hitherto_requests_total", ("path", "chat"), ("status", "2xx")] == 1


def test_what_others_know_is_read_at_scrape():
    metrics, inflight = Metrics(), {"r1": 0}
    metrics.read_from(lambda: {"inflight_requests": inflight, "map_blocks": 7, "map_evicted_blocks": 3,
                               "replica_state": {("r1", "ready"): 1}})  # fmt: skip
    inflight["r1"] = 5
    page = scrape(metrics)
    assert page["hitherto_inflight_requests", ("replica", "r1")] == 5
    assert page["hitherto_map_blocks",] == 7 and page["hitherto_map_evicted_blocks_total",] == 3
    assert page["hitherto_replica_state", ("replica", "r1"), ("state", "ready")] == 1


async def test_the_event_loop_goes_on_while_a_page_is_made(monkeypatch):
    monkeypatch.setattr("gateway.ops.metrics.SLICE_SECONDS", 0.0)
    metrics = Metrics({"replica": [f"10.0.0.{i}:8000" for i in range(200)]})
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            metrics.requests.inc("chat", "2xx")
            metrics.replica_ttft_seconds.observe(f"10.0.1.{turns}:8000", 0.1)  # replicas come while it is made
            if turns == 5:
                metrics.forget("10.0.0.7:8000")
            await asyncio.sleep(0)

    task = asyncio.get_running_loop().create_task(others())
    page, _ = await metrics.exposition()
    task.cancel()
    assert turns > 50
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if sample.name == "hitherto_replica_ttft_seconds_count" and sample.value:
                labels = f'{{le="+Inf",replica="{sample.labels["replica"]}"}}'
                assert f"hitherto_replica_ttft_seconds_bucket{labels} {sample.value}" in page.decode()


def test_a_reader_may_only_return_declared_names():
    metrics, wrong = Metrics(), []
    metrics.on_failure = lambda part, error: wrong.append(str(error))
    metrics.read_from(lambda: {"map_blokcs": 1})
    scrape(metrics)
    assert wrong == ["'map_blokcs'"]


def test_a_part_that_cannot_be_read_takes_no_other_from_the_page(monkeypatch):
    metrics, wrong = Metrics(), []
    metrics.on_failure = lambda part, error: wrong.append((part, str(error)))

    def broken():
        raise ValueError("no figures")

    metrics.read_from(broken)
    metrics.read_from(lambda: {"map_blocks": 7})
    metrics.requests.inc("chat", "complete")
    monkeypatch.setattr("gateway.ops.metrics.generate_latest", lambda registry: broken())
    names = {name: value for (name, *_), value in scrape(metrics).items()}
    assert names["hitherto_map_blocks"] == 7 and "hitherto_requests_total" in names
    assert [error for _, error in wrong] == ["no figures"] * 2 and wrong[0][0] == "the process"
    assert wrong[1][0].endswith("broken")


def test_the_process_is_on_the_page_too_and_every_name_is_ours_or_pythons():
    names = {name for name, *_ in scrape(Metrics())}
    assert "process_cpu_seconds_total" in names
    assert all(name.startswith(("process_", "python_gc_", "hitherto_")) for name in names)


def test_label_values_are_escaped():
    metrics = Metrics()
    metrics.rejections.inc('a "b"\n\\c')
    assert scrape(metrics)["hitherto_rejections_total", ("reason", 'a "b"\n\\c')] == 1


def test_observations_that_wait_are_counted_when_they_are_read_and_none_waits_for_a_removed_replica():
    metrics = Metrics({"replica": ["a", "b"]})
    for replica, seconds in (("a", 0.1), ("b", 0.1), ("b", 0.3)):
        metrics.replica_ttft_seconds.waiting[replica,].append(seconds)
    assert (metrics.replica_ttft_seconds.count("b"), metrics.replica_ttft_seconds.mean("b")) == (2, 0.2)
    metrics.forget("a")
    assert [*metrics.replica_ttft_seconds.values] == [("b",)] and not metrics.replica_ttft_seconds.waiting
