"""`loadgen diff` on files as the other verbs write them."""

import json

import pytest

from loadgen.cli import main


@pytest.fixture
def file(tmp_path):
    """`file(name, **ttft)` -> the path of figures as `compare` writes them, a target for each name in `ttft`."""

    def write(name: str, seeds: int = 1, load: dict | None = None, answered: int = 100, **ttft: float):
        def report(value: float) -> dict:
            return {
                "requests": 100, "completed": answered, "failed": 0, "not_sent": 0, "interrupted": False, "errors": {},
                "percentiles": ["p50"], "ttft_ms": {"mean": value, "p50": value}, "cache": {"hit_rate": 0.5}, "replicas": {},
            }  # fmt: skip

        targets = {}
        for target, value in ttft.items():
            of_seeds = {"by_seed": [report(value + one) for one in range(seeds)]} if seeds > 1 else {}
            targets[target] = report(value) | of_seeds
        workload = {"request_rate": 4, **(load or {})}
        path = tmp_path / name
        path.write_text(json.dumps({"targets": targets, "workload": workload, "setting": {"seed": 0}}))
        return str(path)

    return write


def test_alike_is_0_and_worse_is_1(file, tmp_path, capsys):
    same = [file("a.json", one=100, two=100), file("b.json", one=103, two=97)]
    assert main(["diff", *same]) == 0
    assert "one: No difference beyond noise: 0 better, 0 worse" in capsys.readouterr().out
    verdict = tmp_path / "d.json"
    assert main(["diff", file("a.json", one=100), file("b.json", one=130), "--json", str(verdict)]) == 1
    written = json.loads(verdict.read_text())["targets"]["one"]
    assert written["verdict"].startswith("one: Worse") and len(written["worse"]) == 2 and written["void"] is None
    out = " ".join(capsys.readouterr().out.split())
    assert "one: Worse: 0 better, 2 worse" in out and "TTFT mean 130 ms instead of 100 ms (+30 %)" in out
    assert main(["diff", file("a.json", one=130), file("b.json", one=100)]) == 0
    assert "one: Better: 2 better, 0 worse" in capsys.readouterr().out


def test_seeds_say_what_is_noise_and_a_pipe_has_tables_of_full_width(monkeypatch, file, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["diff", file("a.json", seeds=3, one=100), file("b.json", seeds=3, one=104)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "do not overlap" in out
    assert "TTFT mean 101 ms (100–102 ms) 105 ms (104–106 ms) worse (+4 %)" in out
    assert main(["diff", file("a.json", seeds=3, one=100), file("b.json", seeds=3, one=101)]) == 0


def test_what_was_set_differently_is_named_first_and_what_only_one_has_is_said_to_be_that_ones(file, capsys):
    loads = {"turns": 3, "zipf": None}, {"forks": 2, "request_rate": 8}
    assert main(["diff", file("a.json", load=loads[0], one=100), file("b.json", load=loads[1], one=100)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    said = "They were made differently: request_rate 4 → 8; turns 3 in A alone; forks 2 in B alone."
    assert said in out and "None" not in out


def test_others_requests_are_no_comparison(file, tmp_path, capsys):
    files = file("a.json", one=100), file("b.json", answered=40, one=190)
    assert main(["diff", *files, "--json", str(tmp_path / "d.json")]) == 1
    out = capsys.readouterr().out
    assert (
        "one: This comparison is void: the targets did not answer the same requests: A 100 of 100, B 40 of 100." in out
    )
    assert "worse" not in out.lower() and "better" not in out.lower() and "+90 %" in out
    written = json.loads((tmp_path / "d.json").read_text())["targets"]["one"]
    assert "is void" in written["verdict"] and written["void"] and "worse" not in written


def test_a_single_target_is_compared_whatever_its_name(file, capsys):
    assert main(["diff", file("a.json", round_robin=100), file("b.json", least_time=50)]) == 0
    assert "round_robin → least_time: Better" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "No such file"),
        ("{", "not JSON"),
        (
            "[]",
            "it has no figures of `loadgen run`, `compare`, `simulate` or `sweep`. Name two files that --json wrote",
        ),
        ('{"plan": 1}', "it has no figures of `loadgen run`"),
        ('{"targets": {"x": {"ttft_ms": null}, "y": {}}}', "nothing to compare"),
        ('{"ttft_ms": null}', "x.json has one run: nothing to compare"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(file, tmp_path, capsys, content, said):
    other = tmp_path / "x.json"
    if content is not None:
        other.write_text(content)
    assert main(["diff", file("a.json", one=1, two=2), str(other)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("loadgen diff: ") and said in err and "x.json" in err and err.count("\n") == 1
