import csv

from loadgen.drive.records import Record
from loadgen.report import files


def test_a_line_per_request_in_the_order_of_sending(tmp_path):
    times = {"due": 10.0, "sent": 10.5, "first": 10.75, "last": 11.75, "gaps": [0.5, 0.5]}
    tokens = {"prompt_tokens": 100, "output_tokens": 5, "cached_tokens": 64, "predicted_tokens": 48}
    first = Record("a,b", 1, status=200, replica="r0", **times, **tokens)
    failed = Record("c", 0, due=12.0, sent=12.0, last=12.1, error="connect")
    files.write_csv(tmp_path / "r.csv", {"one": [failed, first], "none": []})
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = {
        "due_s": "0.0",
        "sent_s": "0.5",
        "lateness_ms": "500.0",
        "ttft_ms": "250.0",
        "tpot_ms": "250.0",
        "e2el_ms": "1250.0",
    }
    tokens = {"prompt_tokens": "100", "output_tokens": "5", "cached_tokens": "64", "predicted_tokens": "48"}
    said = {"target": "one", "conversation": "a,b", "turn": "1", "replica": "r0", "status": "200", "error": ""}
    assert rows[0] == {**said, **times, **tokens}
    empty = {rows[1][key] for key in ("ttft_ms", "tpot_ms", "status", "replica")}
    assert rows[1]["error"] == "connect" and empty == {""}
    assert len(rows) == 2
