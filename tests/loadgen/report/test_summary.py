from pathlib import Path

import pytest

from loadgen.drive.records import Record
from loadgen.options import BadOption
from loadgen.report import summary
from loadgen.report.summary import cache_figures, fair_share, machine, meets, parse_slo, setting, spread, summarise

from . import conftest


def record(ttft=0.1, gaps=(0.02, 0.02), sent=10.0, late=0.001, **fields) -> Record:
    made = Record(
        "c", 0, due=sent - late, sent=sent, first=sent + ttft, gaps=list(gaps), last=sent + ttft + sum(gaps), status=200
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def run_of(records, **fields):
    return conftest.run_of(records, 10.0, 20.0, **fields)


def test_latencies_are_those_of_the_fields_benchmark():
    one = record(ttft=0.1, gaps=(0.02, 0.04), output_tokens=5)
    assert one.ttft == pytest.approx(0.1)
    assert one.e2e == pytest.approx(0.16)
    assert one.tpot == pytest.approx(0.06 / 4)  # over the tokens the server counted, not over chunks
    assert record(gaps=()).tpot is None
    assert record(gaps=(0.02, 0.04)).tpot == pytest.approx(0.03)  # no usage: chunks are counted
    report = summarise(run_of([one, record(ttft=0.3, gaps=(0.1,))]))
    assert report["ttft_ms"]["mean"] == pytest.approx(200)
    assert report["itl_ms"]["max"] == pytest.approx(100)
    assert report["e2el_ms"]["max"] == pytest.approx(400)
    assert report["ttft_from_due_ms"]["mean"] == pytest.approx(201)
    assert report["request_throughput"] == 0.2
    assert report["total_output_tokens"] == 5 + 2


def test_percentiles_interpolate():
    assert spread(value / 1000 for value in range(101)) == {"mean": 50, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert spread([0.001, 0.002])["p50"] == 1.5
    assert spread([None]) is None


def test_failures_are_counted_by_class_and_left_out_of_latencies():
    bad = record(ttft=9.0, error="http_503", detail="busy")
    report = summarise(
        run_of([record(), bad, record(error="truncated", detail="x"), record(error="http_503", detail="later")])
    )
    assert report["errors"] == {"http_503": 2, "truncated": 1}
    assert report["error_examples"] == {"http_503": "busy", "truncated": "x"}
    assert (report["requests"], report["completed"], report["failed"]) == (4, 1, 3)
    assert report["ttft_ms"]["max"] == pytest.approx(100)


def test_nothing_answered_is_a_report_too():
    report = summarise(run_of([record(error="connect", detail="refused")]), {"ttft": 1.0})
    assert report["ttft_ms"] is None and report["goodput"]["share"] == 0 and report["cache"]["hit_rate"] is None
    assert summarise(run_of([]))["requests"] == 0


@pytest.mark.parametrize(
    "text, slo",
    [
        ("ttft:500ms,tpot:50ms", {"ttft": 500, "tpot": 50}),
        ("ttft:500 tpot:50", {"ttft": 500, "tpot": 50}),
        ("e2el:1.5s", {"e2el": 1500}),
        ("e2e:2s", {"e2el": 2000}),
        ("ttft=500ms,tpot=50ms", {"ttft": 500, "tpot": 50}),
    ],
)
def test_slo(text, slo):
    assert parse_slo(text) == slo


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:0", "itl:5ms", "ttft:5m", "ttft:5sm", "ttft:nan"]
)
def test_a_bad_slo_is_refused(text):
    with pytest.raises(BadOption, match="an SLO reads ttft:500ms"):
        parse_slo(text)


def test_goodput_needs_every_limit():
    slo = parse_slo("ttft:200ms,tpot:25ms")
    assert meets(record(), slo)
    assert not meets(record(ttft=0.3), slo)
    assert not meets(record(gaps=(0.1, 0.1)), slo)
    assert meets(record(gaps=()), slo)  # one token has no TPOT
    report = summarise(run_of([record(), record(ttft=0.3), record(error="closed")]), slo)
    assert report["goodput"] == {"slo_ms": slo, "met": 1, "share": 0.3333, "request_goodput": 0.1}  # of all three


@pytest.mark.parametrize("interrupted, share", [(False, 0.2), (True, 0.5)])
def test_what_was_not_sent_kept_no_limit_unless_nobody_wanted_it(interrupted, share):
    run = run_of([record(), record(ttft=0.3)])
    run.not_sent, run.interrupted = 3, interrupted
    assert summarise(run, parse_slo("ttft:200ms"))["goodput"]["share"] == share


def test_cache_rates_are_over_those_who_tell():
    told = record(prompt_tokens=100, cached_tokens=80, predicted_tokens=64)
    silent = record(prompt_tokens=1000)
    figures = cache_figures([told, silent, record()])
    assert figures == {
        "prompt_tokens": 1100,
        "reported_on": 1,
        "predicted_on": 1,
        "cached_tokens": 80,
        "predicted_tokens": 64,
        "hit_rate": 0.8,
        "predicted_hit_rate": 0.64,
        "prefill_tokens": 20,
    }
    assert cache_figures([record()])["prompt_tokens"] is None


def test_requests_per_replica():
    told = record(replica="b", prompt_tokens=10, cached_tokens=5)
    report = summarise(run_of([told, record(replica="a"), record(replica="b", error="truncated")]))
    assert list(report["replicas"]) == ["a", "b"]
    assert report["replicas"]["b"]["requests"] == 2 and report["replicas"]["b"]["failed"] == 1
    assert report["replicas"]["b"]["hit_rate"] == 0.5
    assert summarise(run_of([record()]))["replicas"] == {}


class Compared(str):
    """A name that counts how often it is compared."""

    times = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Compared.times += 1
        return str.__eq__(self, other)


def test_requests_of_many_replicas_are_not_searched_for_each():
    report = summarise(run_of([record(replica=Compared(f"r{number}")) for number in range(100)]))
    assert len(report["replicas"]) == 100 and Compared.times < 1000


@pytest.mark.parametrize(
    "late, ttft, fields, limit, full",
    [
        (0.001, 0.1, {}, False, False),
        (0.001, 0.1, {"cpu_seconds": 9.5}, True, True),
        (0.001, 0.1, {"busiest_second": 0.97}, False, True),  # full, and yet in time
        (0.2, 0.1, {}, True, False),
        (0.2, 0.1, {"busiest_second": 0.97}, True, True),
        (0.03, 0.1, {}, True, False),  # 30 ms late matters beside a TTFT of 100 ms,
        (0.03, 2.0, {}, False, False),  # not beside one of 2 s
    ],
)
def test_a_generator_that_was_busy_or_late_is_named(late, ttft, fields, limit, full):
    generator = summarise(run_of([record(ttft, late=late)], **fields))["generator"]
    assert (generator["was_the_limit"], generator["core_was_full"]) == (limit, full)


@pytest.mark.parametrize(
    "requests, late, limit",
    [
        (40, 1, False),  # of 40 requests p99 is the one latest
        (40, 5, True),
        (99, 1, False),
        (100, 2, True),
        (1000, 9, False),
        (1000, 11, True),
    ],
)
def test_it_takes_more_than_the_one_latest_request(requests, late, limit):
    run = run_of([*(record(late=0.0003) for _ in range(requests - late)), *(record(late=0.03) for _ in range(late))])
    assert summarise(run)["generator"]["was_the_limit"] is limit


def test_docs_state_the_rule():
    said = " ".join((Path(__file__).parents[3] / "docs" / "loadgen.md").read_text().split())
    assert (
        f"more than {summary.BUSY_CORE * 100:.0f} % of a core, or if its lateness at p50, p90 or p99 was more than "
        f"{summary.LATE_MS:.0f} ms and more than {summary.LATE_SHARE * 100:.0f} % of the TTFT there; p99 counts from "
        f"{summary.ENOUGH_FOR_P99} requests on"
    ) in said


@pytest.mark.parametrize("bound, loop", [({}, "open"), ({"max_concurrency": 3}, "bounded"), ({"users": 3}, "closed")])
def test_what_loop_it_was(bound, loop):
    assert summarise(run_of([record()], **bound))["generator"]["loop"] == loop


def test_the_setting_names_machine_and_date_and_a_command_that_can_be_run_again():
    made = setting(["loadgen", "run", "--extra-body", '{"a": 1}'], 7)
    assert made["command"] == """loadgen run --extra-body '{"a": 1}'""" and made["seed"] == 7
    assert "python" in made["versions"] and "cores" in machine()
    assert "date" not in made, "virtual time has none"
    assert setting(["loadgen"], 0, date="2026-11-23 22:00:00+00:00")["date"].startswith("2026-11-23")


def test_a_known_replica_without_requests_is_one_too():
    report = summarise(run_of([record(replica="r1", prompt_tokens=10, cached_tokens=5)], replicas=["r0", "r1"]))
    assert list(report["replicas"]) == ["r0", "r1"] and report["replicas"]["r0"]["requests"] == 0
    assert report["replicas"]["r0"]["hit_rate"] is None and fair_share(report) == 2.0


def test_further_percentiles_stand_between_the_usual_ones():
    figures = spread((value / 1000 for value in range(1001)), (50, 95, 99.9))
    assert list(figures) == ["mean", "p50", "p90", "p95", "p99", "p99.9", "max"]
    assert (figures["p95"], figures["p99.9"]) == (950, 999)
