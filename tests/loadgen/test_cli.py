"""The command as a user meets it: its exit code, what it prints and writes."""

import argparse
import asyncio
import contextlib
import csv
import json
import os
import signal
import subprocess
import sys

import pytest

from loadgen.cli import COMMANDS, act, build_parser, main
from loadgen.report import comparison, seeds

from .report.conftest import made, report_of


@pytest.fixture
def loadgen(monkeypatch, capfd):
    """`await loadgen(*words)` runs the command and returns its exit code, its output and what it says of errors.

    Words are split at blanks, but for JSON.
    """

    async def run(*words: str, env=None):
        args = [one for word in words for one in ([word] if word.startswith("{") else word.split())]
        for name, value in {"COLUMNS": "120", **(env or {})}.items():
            monkeypatch.setenv(name, value)
        async with asyncio.timeout(100):
            code = await act(build_parser("loadgen").parse_args(args))
        return code, *capfd.readouterr()

    return run


async def test_run_against_any_endpoint(loadgen, engine, wire, tmp_path):
    async with engine(wire.openai()) as server:
        code, out, err = await loadgen(
            f"run --base-url {server.url}/v1 --num-prompts 12 --request-rate 200 --think-time 0 --slo ttft:5s,tpot:5s",
            f"--json {tmp_path / 'r.json'} --header X-Team=a=b --seed 3 --extra-body",
            '{"temperature": 0}',
            env={"OPENAI_API_KEY": "sk-1"},
        )
        assert (code, err) == (0, "")
        assert "12 of 12 requests answered" in out and "cached, reported" in out
        asked = [request for request in server.requests if request.path == "/v1/chat/completions"]
        assert len(asked) == 12
        assert asked[0].headers["authorization"] == "bearer sk-1" and asked[0].headers["x-team"] == "a=b"
        assert asked[0].json["model"] == "tiny" and asked[0].json["temperature"] == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["completed"] == 12 and report["replicas"] == {} and report["goodput"]["share"] == 1
    assert report["cache"]["hit_rate"] == 0.64 and report["cache"]["predicted_hit_rate"] is None
    assert report["workload"]["seed"] == 3 and report["setting"]["machine"]


async def test_the_same_seed_sends_the_same_bodies(loadgen, engine, wire):
    bodies = []
    for _ in range(2):
        async with engine(wire.openai()) as server:
            code, _, _ = await loadgen(
                f"run --base-url {server.url} --num-prompts 6 --request-rate inf --think-time 0 --seed 5"
            )
            assert code == 0
            bodies.append(sorted(request.raw for request in server.requests))
    assert bodies[0] == bodies[1] and len(bodies[0]) == 7


async def test_a_file_of_conversations(loadgen, engine, wire, tmp_path):
    path = tmp_path / "c.jsonl"
    said = {"user": "hi", "assistant": "ho"}, {"user": "bye"}
    messages = [{"role": role, "content": text} for part in said for role, text in part.items()]
    path.write_text(json.dumps({"messages": messages}))
    async with engine(wire.openai()) as server:
        code, out, _ = await loadgen(f"run --base-url {server.url} --dataset-path {path} --think-time 0")
        assert code == 0 and "2 of 2 requests answered" in out
        assert [message["content"] for message in server.requests[-1].json["messages"]] == ["hi", "ho", "bye"]


async def test_a_trace_with_a_bad_line_left_out(loadgen, engine, wire, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, at + 3]})
            for at in range(6)
        )
        + "\n{\n"
    )
    flags = ("--dataset-name", "bailian", "--dataset-path", str(path), "--trace-speed", "50")
    async with engine(wire.openai()) as server:
        code, _, err = await loadgen(f"run --base-url {server.url}", *flags)
        assert code == 2 and err.startswith(f"loadgen run: --dataset-path {path}, line 7: not JSON")
        assert server.requests == []
        skip = f"--bad-lines skip --json {tmp_path / 'r.json'}"
        code, out, err = await loadgen(f"run --base-url {server.url}", *flags, skip)
        assert (code, err) == (0, "")
        assert "1 of 7 entries left out" in out and "line 7: not JSON" in out and "6 of 6 requests answered" in out
        prompts = [tuple(one.json["prompt"]) for one in server.requests if one.path == "/v1/completions"]
        assert len(prompts) == len(set(prompts)) == 6 and len({prompt[:32] for prompt in prompts}) == 1
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["workload"]["trace_speed"] == 50 and report["generator"]["loop"] == "open"
    assert report["workload"]["notes"][1].startswith("line 7: ")


async def test_a_closed_loop_is_called_one(loadgen, engine, wire):
    async with engine(wire.openai()) as server:
        code, out, _ = await loadgen(f"run --base-url {server.url} --dataset-name random --num-prompts 5 --users 2")
    assert code == 0 and "closed loop of 2" in out


async def test_compare_targets(loadgen, engine, wire, tmp_path):
    headers = ("x-hitherto-replica: r1", "x-hitherto-cached-tokens: 48")
    async with (
        engine(wire.openai()) as plain,
        engine(wire.openai(wire.answer("one two three", headers=headers))) as named,
    ):
        code, out, err = await loadgen(
            f"compare --target plain={plain.url} named={named.url} --num-prompts 8",
            f"--request-rate 200 --think-time 0 --json {tmp_path / 'c.json'}",
        )
    assert (code, err) == (0, "")
    assert "cache hit rate, engines' replies" in out and "48.0 %" in out and "Worse with" in out
    reports = json.loads((tmp_path / "c.json").read_text())["targets"]
    assert list(reports) == ["plain", "named"]
    assert reports["named"]["replicas"]["r1"]["requests"] == 8
    assert reports["named"]["cache"]["predicted_hit_rate"] == 0.48


async def test_json_on_standard_output_is_alone_there(loadgen, engine, wire):
    async with engine(wire.openai()) as server:
        code, out, err = await loadgen(f"run --base-url {server.url} --num-prompts 2 --request-rate inf --json -")
    assert code == 0 and json.loads(out)["completed"] == 2
    assert "2 of 2 requests answered" in err


async def test_interrupting_gives_the_report_of_what_was_done(engine, wire, tmp_path):
    """First turns are answered and second ones held: a second turn shows that the first reply was read."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps(talk) for _ in range(3)))
    held = asyncio.Semaphore(0)

    async def respond(request, writer):
        if len(request.json["messages"]) > 1:
            held.release()
            await asyncio.Event().wait()
        writer.write(wire.answer())

    async with engine(respond) as server:
        load = f"--base-url {server.url} --model m --dataset-path {path} --request-rate inf --think-time 0"
        command = [sys.executable, "-m", "loadgen.cli", "run", *load.split()]
        environment = {**os.environ, "COLUMNS": "120"}
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
        async with asyncio.timeout(100):
            for _ in range(3):
                await held.acquire()
            process.send_signal(signal.SIGINT)
            out, _ = await process.communicate()
        assert process.returncode == 130
        assert b"3 of 3 requests answered" in out and b"3 not sent" in out and b"stopped early" in out


TWICE = """
import asyncio, os, signal, types, uvloop
from loadgen.drive.target import stopped_by_interrupt

async def go():
    stopped = asyncio.Event()
    with stopped_by_interrupt(types.SimpleNamespace(stop=stopped.set)):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        await stopped.wait()
    os.kill(os.getpid(), signal.SIGINT)
    print("report")

uvloop.run(go())
"""


def test_two_interrupts_at_once_are_one():
    """As `timeout -s INT` sends them: one to its child, one to the whole group."""
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "report\n", "")


ENDLESS = """
import asyncio, types, uvloop
from loadgen.drive.target import stopped_by_interrupt

async def go():
    with stopped_by_interrupt(types.SimpleNamespace(stop=lambda: print("stopping", flush=True))):
        print("begun", flush=True)
        await asyncio.Event().wait()

uvloop.run(go())
"""


async def test_a_second_interrupt_ends_a_load_that_does_not_stop():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ENDLESS, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(100):
            await process.stdout.readuntil(b"begun\n")
            process.send_signal(signal.SIGINT)
            await process.stdout.readuntil(b"stopping\n")
            while process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGINT)  # `send_signal` would take the exit code from asyncio
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 0.05)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 130


def test_an_interrupt_while_the_program_loads_is_no_traceback():
    interrupted = "import os, signal, sys; sys.argv = ['loadgen', '--help']; "
    slow = "sys.modules['loadgen.cli'] = type('Slow', (), {'__getattr__': lambda *_: os.kill(os.getpid(), signal.SIGINT)})(); "
    code = f"{interrupted}{slow}from loadgen.__main__ import main; raise SystemExit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (130, "")


async def test_interrupting_a_comparison_tells_of_the_targets_measured_until_then(loadgen, engine, wire, tmp_path):
    asked, path = asyncio.Event(), tmp_path / "c.json"

    async def hold(request, writer):
        asked.set()
        await asyncio.Event().wait()

    async with engine(wire.openai()) as quick, engine(hold) as slow:
        targets = (f"quick={quick.url}", f"slow={slow.url}", f"more={quick.url}")
        load = ("--num-prompts", "3", "--request-rate", "inf", "--think-time", "0", "--model", "m")
        running = asyncio.create_task(loadgen("compare --target", *targets, *load, f"--json {path}"))
        async with asyncio.timeout(100):
            await asked.wait()
            running.cancel()  # as Ctrl-C does
            code, out, _ = await running
    assert code == 130 and "Stopped by hand" in out
    reports = json.loads(path.read_text())["targets"]
    assert list(reports) == ["quick"] and reports["quick"]["completed"] == 3  # and the third is not begun


async def test_seeds_are_measured_one_after_the_other_and_shown_with_their_range(loadgen, engine, wire, tmp_path):
    async with engine(wire.openai()) as server:
        code, out, err = await loadgen(
            f"run --base-url {server.url} --dataset-name random --num-prompts 4",
            "--request-rate inf --seeds 3 --seed 5 --percentiles 50,99.9",
            f"--json {tmp_path / 'r.json'} --csv {tmp_path / 'r.csv'} --html {tmp_path / 'r.html'}",
        )
        assert (code, err) == (0, "")
        prompts = {tuple(one.json["prompt"]) for one in server.requests if one.path == "/v1/completions"}
    assert len(prompts) == 12 and "mean of 3 seeds, range in brackets" in out and "p99.9" in out and "p90" not in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert [one["completed"] for one in report["by_seed"]] == [4, 4, 4] and report["setting"]["seeds"] == 3
    assert report["setting"]["date"] and report["workload"]["vocab_size"] == 32_000
    # the stand-in answers that 64 of 100 tokens were cached, of the first prompt too
    assert "The caches were warm: of 4 prompts" in " ".join(out.split())
    with (tmp_path / "r.csv").open() as lines:
        assert [row["target"][-6:] for row in csv.DictReader(lines)] == [f"seed {seed}" for seed in "555566667777"]
    assert "seeds 5 to 7" in (tmp_path / "r.html").read_text()


async def test_all_requests_failed_is_exit_code_1(loadgen, engine, wire):
    async with engine(wire.whole({"error": {"message": "no"}}, 500)) as server:
        code, out, _ = await loadgen(f"run --base-url {server.url} --model m --num-prompts 2 --request-rate inf")
        assert code == 1 and "× http_500" in out


@pytest.mark.parametrize(
    "url, why",
    [
        ("http://127.0.0.1:1", "nothing listens there"),
        ("http://nowhere.invalid", "host name 'nowhere.invalid' does not resolve"),
    ],
)
async def test_a_server_that_is_not_there(loadgen, url, why):
    code, out, err = await loadgen("run", "--base-url", url)
    assert (code, out) == (1, "") and err.startswith(f"loadgen run: {url} does not answer (connect: {why})")


async def test_a_server_that_lists_no_model(loadgen, engine, wire):
    async with engine(wire.whole({})) as server:
        code, _, err = await loadgen("run", "--base-url", server.url)
        assert code == 1 and "name one with --model" in err


@pytest.mark.parametrize(
    "args, said",
    [
        (("run", "--num-prompts", "0"), "flag --num-prompts/--requests: '0' is not a whole number above zero"),
        (("run", "--request-rate", "-1"), "--request-rate: -1 is not above zero"),
        (("run", "--think-time", "-1"), "--think-time: -1 is not zero or above"),
        (("run", "--slo", "ttft:soon"), "--slo: 'ttft:soon': an SLO reads"),
        (("run", "--endpoint", "v1/x"), "--endpoint: 'v1/x' is no path; write /v1/x."),
        (("run", "--endpoint", "http://gw/v1/x"), "'http://gw/v1/x' is no path; write one like /v1/completions"),
        (("run", "--extra-body", "{"), "--extra-body: not JSON"),
        (("run", "--extra-body", "3"), "expected a JSON object"),
        (("run", "--header", "nonsense"), "expected NAME=VALUE"),
        (
            ("run", "--base-url", "ftp://x"),
            "flag --base-url: 'ftp://x' is not an http:// or https:// URL; write http://HOST:PORT",
        ),
        (
            ("run", "--dataset-path", "/nonexistent"),
            "No such file or directory; name a trace, a file of conversations or",
        ),
        (("run", "--dataset-path", "/dev/null"), "--dataset-path /dev/null: the file holds no text; name a UTF-8 text"),
        (
            ("run", "--dataset-path", "/dev/null", "--dataset-name", "conversations"),
            "--dataset-path /dev/null: no conversation in it has a message to answer; name a trace, ",
        ),
        (
            ("compare", "--target", "a=ftp://x"),
            "--target a: 'ftp://x' is not an http:// or https:// URL; write http://",
        ),
        (("run", "--dataset-name", "conversations"), "needs --dataset-path"),
        (("run", "--dataset-name", "chta"), "Did you mean 'chat'?"),
        (("run", "--seed", "x"), "--seed: invalid int value: 'x'"),
        (("run", "--base-url", "http://a b"), "there is a space or a control character in it"),
        (("run", "--base-url", "http://h:99999"), "Port out of range 0-65535; write http://HOST:PORT"),
        (("run", "--base-url", "http://h/v1?x=1"), "a base URL has neither ? nor #"),
        (("run", "nonsense"), "unknown argument 'nonsense'. `loadgen run --help` lists what there is"),
        (("--seed", "3"), "unknown argument '--seed': a command comes first"),
        (("sweep", "--attainment", "90"), "--attainment: 90 is not a share above 0 and up to 1: it reads 0.9 for 90 %"),
        (("demo", "--vllm", "/nonexistent"), "--vllm /nonexistent: /nonexistent/bin/vllm is not there"),
        (("run", "--replies", "file"), "needs a file of conversations"),
        (("run", "--json", "/nonexistent/x.json"), "can't be written"),
        (("compare",), "one of the arguments --target --policies/--policy is required"),
        (("compare", "--polices", "random"), "unknown argument '--polices'. Did you mean '--policies'?"),
        (("compare", "--seed", "3", "--replicas=2"), "unknown argument '--replicas'. Did you mean '--launch'?"),
        (("simulate", "--launch", "2"), "'--launch'. Did you mean '--replicas'?"),
        (("compare", "--target", "x"), "expected NAME=URL"),
        (("compare", "--target", "a=http://h", "a=http://h"), "'a' is given twice"),
        (("compare", "--policies", "least_tme"), "there is no policy 'least_tme'"),
        (("compare", "--policies", "random,random"), "name each policy once"),
        (("runn",), "loadgen: unknown command 'runn'. Did you mean 'run'?"),
        (("run", "--rate", "20"), "loadgen run: unknown argument '--rate'. Did you mean '--request-rate'?"),
    ],
)
def test_a_wrong_flag_gets_one_line_and_exit_code_2(args, said, capsys):
    try:
        code = main(list(args))
    except SystemExit as end:  # argparse's own way out
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert said in err and err.count("\n") == 1


def test_the_command_alone_helps_and_tells_its_version(capsys):
    assert main([]) == 0
    assert "usage: loadgen" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["-V"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and printed.startswith("loadgen ")
    assert main(["version"]) == 0 and capsys.readouterr().out == printed


def test_a_shell_completes_commands_and_flags(capsys):
    assert main(["completion", "bash"]) == 0
    assert "--num-prompts" in capsys.readouterr().out


@pytest.mark.parametrize("columns, wide", [("", True), ("100", False)])
def test_a_pipe_has_as_many_columns_as_it_needs_and_no_blanks_at_the_ends_of_lines(monkeypatch, capsys, columns, wide):
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    reports = {
        f"policy_number_{number}": seeds.merged([report_of(made(9, 3 * number + seed)) for seed in range(3)])
        for number in range(10)
    }

    async def verb(args, console) -> int:
        comparison.print_table(console, reports)
        return 0

    assert asyncio.run(act(argparse.Namespace(json=None, act=verb))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.endswith(" ")]
    assert (max(map(len, lines)) > 250) == wide and (min(len(line) for line in lines if "TTFT" in line) > 250) == wide


def test_a_loop_of_links_is_refused_before_the_load_is_offered(capsys, tmp_path):
    (loop := tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert main(["run", "--json", str(loop)]) == 2
    assert f"--json {loop}: can't be written" in capsys.readouterr().err


@pytest.mark.parametrize("verb", COMMANDS)
def test_each_command_says_what_it_does(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    assert usage.startswith("usage: loadgen ") and rest.split("\n\n")[0].endswith(".")
