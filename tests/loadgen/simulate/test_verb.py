"""`loadgen simulate` as a command: the same bytes again, and what is wrong said in one line."""

import json
import os
import random
import re
import signal
import subprocess
import sys

import pytest

from loadgen.cli import main
from loadgen.simulate.verb import asked

SMALL = [
    *"simulate --dataset-name agents --requests 40 --replicas 3 --num-blocks 2000 --policies round_robin,least_time".split()
]

FASTER = "gpu-8b takes longer with the share of the engine's own cache in use"

POOLS = "{p: {launch: 1, role: prefill}, d: {launch: 2, role: decode}}"


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """Runs it with these arguments; gives the bytes it wrote."""

    def run(*args: str) -> bytes:
        out = tmp_path / f"{random.getrandbits(40)}.json"  # another name each time
        monkeypatch.setattr("sys.argv", ["loadgen", *args, "--json", str(out)])
        assert main([*args, "--json", str(out)]) == 0
        return out.read_bytes()

    return run


def test_the_same_seed_gives_the_same_bytes_in_any_number_of_processes_and_another_does_not(figures, capsys):
    once = figures(*SMALL, "--seed", "1")
    assert figures(*SMALL, "--seed", "1") == once
    assert figures(*SMALL, "--seed", "2") != once
    report, spread = json.loads(once), json.loads(figures(*SMALL, "--seed", "1", "--processes", "2"))
    assert (spread["targets"], spread["fleet"]) == (report["targets"], report["fleet"])
    assert report["void"] is None and "void" not in capsys.readouterr().out, "the same work is compared without a word"
    assert list(report["targets"]) == ["round_robin", "least_time"]
    assert [one["completed"] for one in report["targets"].values()] == [40, 40]
    assert len(report["targets"]["round_robin"]["replicas"]) == 3 == report["fleet"]["replicas"]
    assert report["setting"]["seed"] == 1 and report["workload"]["dataset_name"] == "agents"


def test_a_trace_and_every_flag_of_the_fleet(figures, tmp_path):
    trace, lengths = tmp_path / "trace.jsonl", {"input_length": 1000, "output_length": 20}
    trace.write_text(
        "".join(f"{json.dumps(lengths | {'timestamp': 200 * n, 'hash_ids': [n % 3, n + 100]})}\n" for n in range(30))
    )
    fleet = "--replicas 4 --policies least_load --profile cpu-tiny --speeds 1,0.5 --outage 1:2:4 --outage 2:3 --gateways 2 --own-ledgers"
    rest = "--requests 25 --event-delay 0.1 --event-loss 0.1 --slo ttft:1s --max-concurrency 8"
    report = json.loads(figures("simulate", "--trace", str(trace), *fleet.split(), *rest.split()))
    assert report["targets"]["least_load"]["requests"] == 25 and report["targets"]["least_load"]["goodput"]
    assert report["fleet"]["speeds"] == [1.0, 0.5]
    assert report["fleet"]["outages"][0] == {"replica": 1, "at": 2.0, "until": 4.0}
    assert report["targets"]["least_load"]["generator"]["loop"] == "bounded"


def test_a_closed_loop_keeps_its_users_busy(figures):
    asked = "simulate --dataset-name random --requests 30 --users 5 --replicas 1"
    one = json.loads(figures(*asked.split()))["targets"]["least_time"]
    assert one["completed"] == 30 and one["generator"]["loop"] == "closed" and one["ttft_ms"]["max"] < 1000


def test_no_more_than_the_bound_are_in_flight():
    from loadgen.simulate import Setting, simulate
    from loadgen.workload.conversations import Workload
    from loadgen.workload.generators import random_tokens
    from replicas.simulated.profile import load_profile

    load = Workload(random_tokens(random.Random(1), 40), [0.0] * 40)
    done = simulate(load, Setting("least_load", [load_profile("gpu-8b")] * 2, max_concurrency=4)).done
    changes = sorted([(record.sent, 1) for record in done] + [(record.last, -1) for record in done])
    most = flight = 0
    for _, change in changes:
        flight += change
        most = max(most, flight)
    assert len(done) == 40 and most == 4
    assert all(record.due == 0 for record in done) and max(record.lateness for record in done) > 0


def test_pools_have_roles_and_speeds_and_the_report_says_what_was_moved(figures):
    asked = ("simulate", "--dataset-name", "chat", "--requests", "60", "--legs", "always", "--itl", "--pools")
    report = json.loads(figures(*asked, POOLS))
    (told,) = report["targets"].values()
    assert told["legs"]["requests"] == told["completed"] == 60 and told["legs"]["share"] == 1.0
    assert told["legs"]["tokens_moved"] > 0 and told["legs"]["transfer_ms"]["p50"] >= 10.0 and told["itl_ms"]["p50"] > 0
    fleet = report["fleet"]
    assert (fleet["replicas"], fleet["legs"], fleet["pools"]) == (3, "always", POOLS)
    assert fleet["network"] == {"gbit_per_s": 100.0, "fixed": 0.01, "lease": 30.0}
    quick = json.loads(figures(*asked, POOLS.replace("launch: 1,", "launch: 1, speed: 2,")))
    assert quick["targets"]["least_time"]["ttft_ms"]["mean"] < told["ttft_ms"]["mean"]


@pytest.mark.parametrize(
    "args, complaint",
    [
        (["--policies", "fastest"], "there is no policy 'fastest'"),
        (["--policies", "random,random"], "name each policy once"),
        (["--profile", "gpu-9000"], "no profile 'gpu-9000'"),
        (["--outage", "8:1"], "there are replicas 0 to 7"),
        (["--outage", "1:5:4"], "it can't be back before it is lost"),
        (["--pools", "4"], "expected NAME: {launch: N"),
        (["--pools", "{p: {launch: 0}}"], "p.launch: Input should be greater than or equal to 1, got 0"),
        (["--pools", "{p: {launch: yes}}"], "p.launch: Input should be a valid integer"),
        (["--pools", "{p: {launch: 1, role: prefil}}"], "p.role: Input should be 'prefill', 'decode' or 'both'"),
        (["--pools", "{p: {launch: 1, sped: 2}}"], "p: 'sped' is an unknown setting. Did you mean 'speed'?"),
        (["--pools", "{p: {launch: 1, speed: 0}}"], "p.speed: Input should be greater than 0"),
        (["--pools", "{p: {launch: 1, profile: gpu-9000}}"], "p: no profile 'gpu-9000'"),
        (["--pools", "{p: {launch: 2, role: prefill}}"], "none has role=decode or role=both"),
        (["--pools", "{p: {launch: 2"], "--pools: line 1 is not YAML"),
        (["--pools", "{p: {launch: 2}}", "--replicas", "2"], "leave --replicas and --speeds out"),
        (["--pools", POOLS, "--policies", "oracle"], "an oracle knows nothing of legs"),
        (["--pools", POOLS, "--outage", "3:1"], "there are replicas 0 to 2"),
        (["--legs", "over"], "there are seconds, pauses:N, always, over:N, llmd:N, never, queue"),
        (["--pulls"], "--pulls needs engines with host memory: give --cpu-blocks"),
        (["--trace", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(args, complaint, capsys):
    try:
        code = main(["simulate", *args])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == 2 and complaint in said and said.count("\n") == 1


def test_engines_with_several_cache_groups_are_refused(tmp_path, capsys):
    profile = tmp_path / "gemma.yaml"
    profile.write_text("step: {base: 1.0}\nwindows: [1024, 0]\n")
    assert main(["simulate", "--profile", str(profile)]) == 2
    assert "engines with windows are not simulated" in capsys.readouterr().err


def test_where_results_are_written_is_no_part_of_the_command():
    written = ["--json", "a", "--html=b", "--csv", "c"]
    assert asked(["simulate", *written, "--seed", "1"]) == ["simulate", "--seed", "1"]


def test_policies_that_answered_different_requests_are_not_compared_in_silence(tmp_path, capsys):
    """A replica that is lost cuts the streams it has begun: which those are, and how many, depends on the policy."""
    out = tmp_path / "out.json"
    assert main([*SMALL, "--requests", "60", "--outage", "0:0.5", "--json", str(out)]) == 0
    report = json.loads(out.read_bytes())
    completed = {name: one["completed"] for name, one in report["targets"].items()}
    printed = " ".join(capsys.readouterr().out.split())
    assert len(set(completed.values())) == 2
    assert "This comparison is void: the targets did not answer the same requests" in printed
    assert all(f"{name} {count}" in report["void"] for name, count in completed.items())


def test_admission_by_the_limits_of_goodput_refuses_who_cannot_be_in_time(figures, capsys):
    crowd = ["simulate", "--dataset-name", "random", "--suffix-len", "3000", "--output-len", "100", "--num-prompts",
             "300", "--request-rate", "15", "--replicas", "1", "--goodput", "ttft:1s"]  # fmt: skip
    sent = json.loads(figures(*crowd))["targets"]["least_time"]
    for mode in ("wait", "reject"):
        report = json.loads(figures(*crowd, "--admission", mode))
        one = report["targets"]["least_time"]
        assert report["fleet"]["admission"] == mode
        assert one["failed"] > 0 and one["completed"] + one["failed"] == 300
        assert one["goodput"]["share"] > sent["goodput"]["share"]
    assert main([*crowd[:-2], "--admission", "wait"]) == 2
    assert "--goodput ttft:2s" in capsys.readouterr().err


def test_admission_judges_requests_by_both_their_legs(figures):
    crowd = ["simulate", "--dataset-name", "random", "--suffix-len", "3000", "--output-len", "100", "--num-prompts", "400",
             "--request-rate", "30", "--pools", POOLS, "--legs", "always", "--goodput", "ttft:1s"]  # fmt: skip
    sent = json.loads(figures(*crowd))["targets"]["least_time"]
    one = json.loads(figures(*crowd, "--admission", "wait"))["targets"]["least_time"]
    assert one["failed"] > 0 and one["completed"] + one["failed"] == 400 and one["legs"]["requests"] > 20
    assert one["goodput"]["share"] > 2 * sent["goodput"]["share"]


def test_interrupted_it_tells_of_the_policies_played_until_then(tmp_path):
    path = tmp_path / "s.json"
    command = [sys.executable, "-m", "loadgen.cli", "simulate", "--dataset-name", "random", "--num-prompts", "400"]
    flags = ["--policies", "round_robin,oracle,least_time", "--seeds", "50", "--json", str(path)]
    playing = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    first = playing.stdout.readline()
    playing.send_signal(signal.SIGINT)
    rest, _ = playing.communicate(timeout=60)
    assert playing.returncode == 130 and first.startswith("round_robin, seed 0") and "Stopped by hand" in rest
    assert json.loads(path.read_text())["targets"]["round_robin"]["completed"] == 400


def test_the_rate_that_was_typed_is_told_beside_the_one_that_was_drawn(capsys):
    flags = "--dataset-name random --num-prompts 20 --replicas 2 --percentiles 50 --seed 3".split()
    assert main(["simulate", *flags, "--request-rate", "4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    offered = r"[\d.]+ requests/s offered \(drawn for 4: Poisson, 20 conversations\)"
    assert re.search(rf" {offered} least_time: [\d.]+ answered", out)
    assert main(["simulate", *flags, "--policies", "least_time,round_robin", "--request-rate", "4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert len(re.findall(offered, out)) == 1, "all policies have the same load"
    assert re.search(r" least_time: [\d.]+ answered.* round_robin: [\d.]+ answered", out)
    for exact in (["--request-rate", "4", "--burstiness", "inf"], ["--users", "3"]):
        assert main(["simulate", *flags, *exact]) == 0
        assert "asked for" not in capsys.readouterr().out
