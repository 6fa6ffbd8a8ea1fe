"""Views are drawn on a recording console and read back as a person would."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from loadgen.demo import live
from loadgen.drive.records import Record
from loadgen.report import progress, show, tables
from loadgen.report.summary import summarise

from . import conftest
from .conftest import drawn


def record(number=0, ttft=0.1, **fields) -> Record:
    made = Record(f"c{number}", 0, 1.0, f"question {number}?", 1.0, 1.0 + ttft, 1.4, [0.1], ["some ", "answer"], 200)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def run_of(*records, inflight=()):
    return conftest.run_of(list(records), 1.0, 11.0, total=10, inflight={id(item): item for item in inflight})


def told(number=0, **fields):
    tokens = {"prompt_tokens": 1000, "cached_tokens": 750, "predicted_tokens": 700, "output_tokens": 2}
    return record(number, replica=f"r{number % 2}", **tokens, **fields)


def test_a_report_with_everything():
    text = drawn(show.run_report(summarise(run_of(*(told(number) for number in range(4))), {"ttft": 50.0})))
    assert "4 of 4 requests answered in 10.0 s" in text
    for part in (
        *("TTFT", "ITL", "TPOT", "E2E", "mean", "p50", "p90", "p99", "100 ms"),
        "3,000 (75.0 %)",
        "2,800 (70.0 %)",
        "0.00 requests/s (0.0 % within TTFT 50.0 ms)",
        "r0 2  r1 2",
        "of a core",
        "4.00 requests/s offered, 0.40 answered",
    ):
        assert part in text, part
    assert "×" not in text and "generator itself" not in text


def test_a_report_says_what_is_missing():
    text = drawn(show.run_report(summarise(run_of(record()))))
    assert "the server reports no usage" in text and "hitherto doctor" in text
    assert "replicas" not in text and "predicted" not in text


def test_a_report_of_failures():
    busy = record(error="http_503", detail="engine [busy]")
    bad = summarise(run_of(busy, record(error="http_503"), record(error="closed", detail="gone")))
    text = drawn(show.run_report(bad))
    assert "0 of 3 requests answered" in text
    assert "2 × http_503  engine [busy]" in text and "1 × closed  gone" in text


def test_a_report_of_failures_alone_is_their_cause():
    """No table of dashes, and nothing on what an engine would report."""
    why = "the model `other` does not exist"
    text = drawn(show.run_report(summarise(run_of(record(error="http_404", detail=why)))))
    assert f"1 × http_404  {why}" in text and "--model and --endpoint" in text
    for part in ("–", "TTFT", "reports no usage", "hitherto doctor"):
        assert part not in text, part
    assert "TTFT" in drawn(show.run_report(summarise(run_of(record(), record(error="http_404", detail=why)))))


@pytest.mark.parametrize(
    "not_sent, interrupted, said",
    [
        (3, False, "3 not sent: later turns of conversations that failed"),
        (1, False, "1 not sent: later turn of conversations that failed"),
        (3, True, "3 not sent · stopped early"),
    ],
)
def test_a_report_says_why_requests_were_not_sent(not_sent, interrupted, said):
    run = run_of(record(error="http_404"), record(error="http_404"))
    run.not_sent, run.interrupted = not_sent, interrupted
    first = " ".join(drawn(show.run_report(summarise(run)), 160).split("\n\n")[0].split())
    assert first.endswith(said)


def test_a_report_of_failures_for_want_of_a_key_says_where_the_key_is_read():
    text = drawn(show.run_report(summarise(run_of(record(error="http_401", detail="an API key is needed")))))
    assert "1 × http_401  an API key is needed" in text
    said = "The server answers 401: it wants an API key, or another one; set OPENAI_API_KEY in the environment."
    assert said in " ".join(text.split())


@pytest.mark.parametrize(
    "busiest, why",
    [
        (0.97, "97 % in the busiest second): lower the rate, or send a share of it from a second loadgen"),
        (0.2, "busy with something else"),
    ],
)
def test_a_late_generator_says_why_and_shows_the_time_from_when_requests_were_due(busiest, why):
    run = run_of(record(due=0.9))
    run.busiest_second = busiest
    text = " ".join(drawn(show.run_report(summarise(run))).split())
    assert "The generator itself was late or busy" in text and why in text
    assert "TTFT 200 ms 200 ms 200 ms 200 ms from when it was due" in text
    assert "from when it was due" not in drawn(show.run_report(summarise(run_of(record()))))


def test_a_bound_on_concurrency_is_named_as_the_reason():
    run = run_of(record(due=0.0))
    run.max_concurrency = 2
    assert "--max-concurrency 2 held requests back" in drawn(show.run_report(summarise(run)))


def test_targets_side_by_side():
    one, other = summarise(run_of(told(0), told(1))), summarise(run_of(told(0, ttft=0.2), record(1, error="closed")))
    text = drawn(tables.drawn(show.compared({"first": one, "second": other})))
    rows = {line.split("  ")[0].strip(): line.split() for line in text.splitlines() if line.strip()}
    assert rows["TTFT p50"][-4:] == ["100", "ms", "200", "ms"]
    assert rows["requests failed"][-2:] == ["0", "1"]
    assert rows["requests/s, offered"][-4:] == ["4.00", "/s"] * 2 and "requests/s, answered" in rows
    assert rows["requests per replica"][-3:] == ["1", "1", "1"]
    assert rows["prefill tokens computed"][-2:] == ["500", "250"]
    assert "within the SLO" not in text and "engines' counters" not in text  # nobody knows them


def test_engines_counters_are_shown_where_replies_report_nothing():
    counted = {"engines": {"hit_rate": 0.8}}  # with requests that were not the load's
    one, other = {**summarise(run_of(told())), **counted}, {**summarise(run_of(record())), **counted}
    assert "counters" not in drawn(tables.drawn(show.compared({"both": one})))
    text = drawn(tables.drawn(show.compared({"none": other})))
    assert "cache hit rate, engines' counters" in text and "80.0 %" in text and "engines' replies" not in text


@pytest.mark.parametrize(
    "value, said", [(None, "–"), (0.25, "0.2 ms"), (99.96, "100.0 ms"), (1234, "1,234 ms"), (12_345, "12.3 s")]
)
def test_milliseconds(value, said):
    assert show.milliseconds(value) == said


def test_the_live_view_shows_engines_and_conversations():
    going = told(3)
    waiting = record(9, replica=None, pieces=[])
    view = progress.View(run_of(told(0), told(1), inflight=[going, waiting]), "least_time", 4)
    text = drawn(view.frame(92, 5.0), 92)
    assert "least_time   2 in flight" in text
    assert "? question 3?" in text and "some answer" in text and "? question 9?" in text
    assert "75 %" in text and "●" in text and "2/10" in text and "hit rate 75.0 %" in text
    height = text.count("\n")
    view.run.inflight.clear()
    view.run.done.append(going)
    again = drawn(view.frame(92, 5.0), 92)
    assert again.count("\n") == height  # nothing jumps
    assert "question 3?" not in again and "3/10" in again


@given(st.text(max_size=300), st.integers(12, 120), st.booleans())
def test_a_line_stays_a_line(text, width, end):
    line = progress.one_line("? ", text, "", width, end).plain
    assert cell_len(line) <= width
    assert line.isprintable()


async def test_plain_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.001)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    run = run_of(told(0), inflight=[told(1)])
    import asyncio

    async def go():
        async with asyncio.timeout(60):
            while "in flight" not in console.export_text(clear=False):
                await asyncio.sleep(0.001)

    run.go = go
    with console.file:
        await progress.watched(run, console, "least_time")
        assert "least_time: 1/10 after" in console.export_text()


def test_what_a_round_leaves_on_the_screen():
    text = live.result("least_time", summarise(run_of(told(0), told(1)))).plain
    assert text == "✓ least_time   2 answered in 10 s · hit rate 75 % · TTFT p50 100 ms, p99 100 ms"
    assert live.result("p", summarise(run_of())).plain.endswith("0 answered in 10 s")
