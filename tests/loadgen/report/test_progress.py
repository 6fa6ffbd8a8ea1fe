"""The view of a run, drawn on a recording console and read back as a person would."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadgen.drive.records import Record
from loadgen.report import progress


def drawn(view: progress.View, now: float, width: int = 92) -> str:
    with open("/dev/null", "w") as nowhere:
        console = Console(width=width, record=True, file=nowhere, color_system=None)
        console.print(view.frame(width, now))
        return console.export_text()


def answered(last: float, ttft: float = 0.25, **fields) -> Record:
    made = Record(
        "c",
        0,
        last - 1,
        sent=last - 1,
        first=last - 1 + ttft,
        last=last,
        output_tokens=20,
        prompt_tokens=1000,
        cached_tokens=500,
        replica="r0",
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def run_of(done, inflight=None) -> types.SimpleNamespace:
    return types.SimpleNamespace(done=list(done), inflight=inflight or {}, total=50, began=100.0)


def rows(text: str) -> dict[str, list[str]]:
    return {" ".join(line.split()[:2]): line.split() for line in text.splitlines() if line.strip()}


def test_now_and_so_far():
    early = [answered(101 + index / 10, 0.9, cached_tokens=0) for index in range(10)]
    late = [answered(121 + index / 10) for index in range(20)]
    text = drawn(progress.View(run_of(early + late), "fleet"), 130.0)
    told = rows(text)
    assert told["requests/s 2.0"][:3] == ["requests/s", "2.0", "1.0"]
    assert told["output tokens/s"][2:4] == ["40", "20"]
    assert told["TTFT p50"][2:6] == ["250", "ms", "250", "ms"] and told["TTFT p99"][2:6] == ["250", "ms", "900", "ms"]
    assert told["cache hit"][3:7] == ["50.0", "%", "33.3", "%"]
    assert "fleet   0 in flight" in text and "30/50  30 s" in text and "failed" not in text


def test_replicas_in_their_order_and_what_is_in_flight_there():
    going = {index: answered(0, replica="r2") for index in range(3)}
    text = drawn(
        progress.View(run_of([answered(101, replica=name) for name in ("r10", "r2", "r2")], going), "fleet"), 102.0
    )
    lines = [line for line in text.splitlines() if line.startswith("r") and "requests" not in line]
    assert (
        [line.split()[0] for line in lines] == ["r2", "r10"]
        and lines[0].split()[1] == "2"
        and "●●●" in lines[0]
        and "●" not in lines[1]
    )
    assert "3 in flight" in text


def test_many_replicas_are_cut_and_none_named_are_left_out():
    text = drawn(progress.View(run_of(answered(101, replica=f"r{index}") for index in range(20)), "fleet"), 102.0)
    assert "and 4 more" in text and "r15" in text and "r16" not in text
    assert "replica" not in drawn(progress.View(run_of([answered(101, replica=None)]), "fleet"), 102.0)


def test_in_flight_in_other_processes_is_a_number():
    assert "7 in flight" in drawn(progress.View(run_of([answered(101)], range(7)), "fleet"), 102.0)


def test_failures_count_and_spoil_no_latency():
    text = drawn(progress.View(run_of([answered(101), answered(102, 9.0, error="closed")]), "fleet"), 110.0)
    assert "1 failed" in text and rows(text)["TTFT p99"][2:6] == ["250", "ms", "250", "ms"]


def test_a_run_that_has_not_begun():
    run = run_of([])
    run.began = 0.0
    text = drawn(progress.View(run, "fleet"), 5000.0)
    assert "0/50  0 s" in text and rows(text)["TTFT p50"][2:4] == ["–", "–"]


def test_figures_change_once_a_second_and_leave_a_line_of_the_past():
    run = run_of([answered(101)])
    view = progress.View(run, "fleet")
    drawn(view, 101.5)
    run.done += [answered(101.6)] * 30
    assert rows(drawn(view, 101.6))["TTFT p50"][-1] == "█" and view.figures[0][1] == "0.7"
    drawn(view, 102.6)
    assert view.figures[0][3][-1] == "█" and len(view.figures[0][3]) == 2


@given(st.lists(st.floats(0, 1e6), max_size=32))
def test_a_spark_line_has_a_letter_per_value(values):
    line = progress.spark(values)
    assert len(line) == len(values) and set(line) <= set("▁▂▃▄▅▆▇█")
    if any(values):
        assert line[values.index(max(values))] == "█"


def test_a_long_past_is_a_line_of_means():
    line = progress.spark([1.0, 3.0] * 32 + [8.0, 0.0] * 32)
    assert line == "▅" * 16 + "█" * 16


@pytest.mark.parametrize("width", [20, 40, 92])
def test_a_narrow_terminal_is_no_trouble(width):
    assert "1/50" in drawn(progress.View(run_of([answered(101)]), "f" * 60), 102.0, width)
