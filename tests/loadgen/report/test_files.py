import csv

from loadgen.drive.records import Record
from loadgen.report import files


def test_a_line_per_request_in_the_order_of_sending(tmp_path):
    first = Record(
        "a,b",
        1,
        due=10.0,
        sent=10.5,
        first=10.75,
        last=11.75,
        gaps=[0.5, 0.5],
        status=200,
        prompt_tokens=100,
        output_tokens=5,
        cached_tokens=64,
        predicted_tokens=48,
        replica="r0",
    )
    failed = Record("c", 0, due=12.0, sent=12.0, last=12.1, error="connect")
    files.write_csv(tmp_path / "r.csv", {"one": [failed, first], "none": []})
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {
        "target": "one",
        "conversation": "a,b",
        "turn": "1",
        "due_s": "0.0",
        "sent_s": "0.5",
        "lateness_ms": "500.0",
        "ttft_ms": "250.0",
        "tpot_ms": "250.0",
        "e2el_ms": "1250.0",
        "prompt_tokens": "100",
        "output_tokens": "5",
        "cached_tokens": "64",
        "predicted_tokens": "48",
        "replica": "r0",
        "status": "200",
        "error": "",
    }
    assert (
        rows[1]["error"] == "connect"
        and rows[1]["ttft_ms"] == rows[1]["tpot_ms"] == rows[1]["status"] == rows[1]["replica"] == ""
    )
    assert len(rows) == 2
