import argparse
import asyncio
import io
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from loadgen.cli import main
from loadgen.demo import scenes
from loadgen.demo import verb as demo
from loadgen.demo.scenes import SIMULATED
from loadgen.options import BadInput
from loadgen.workload.conversations import BadWorkload
from replicas.launch import profile

from ...test_house import ROOT
from ..report.conftest import made as records_made
from ..report.conftest import report_of


def test_the_plan_puts_the_caches_under_pressure():
    planned = demo.plan(None)
    held = planned.num_blocks * SIMULATED.block / planned.tokens
    assert 20 <= len(planned.documents) <= SIMULATED.texts
    assert 0.3 < held < 0.45  # one engine can't hold all texts, the four of them can
    conversations, starts = demo.load(planned, SIMULATED.requests, 0)
    assert len(conversations) == len(starts)
    assert starts[-1] < 60


def test_its_launch_profile_is_one():
    made = profile.parse(demo.plan(None).profile)
    assert (made.engine, made.num_blocks, made.speedup) == ("sim", demo.plan(None).num_blocks, scenes.SPEED)


def test_a_short_file_is_still_several_texts(tmp_path):
    path = tmp_path / "f.txt"
    path.write_text("\n\n".join(f"Paragraph {number}. " + "Words follow words. " * 30 for number in range(80)))
    planned = demo.plan(path)
    assert len(planned.documents) > 10
    longest = max(len(document.text) for document in planned.documents) // 4
    assert planned.num_blocks * SIMULATED.block >= SIMULATED.running * longest  # those that run at a time fit
    path.write_text(" ")
    with pytest.raises(BadWorkload, match="no text"):
        demo.plan(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadWorkload, match="--file .*pipe: it is a pipe, which cannot be read more than once; name"):
        demo.plan(tmp_path / "pipe")


def test_it_says_what_is_real_and_what_to_type_next():
    console = Console(width=100, record=True, file=open(os.devnull, "w"))
    with console.file:
        demo.introduce(console, demo.plan(None), None, SIMULATED.requests)
        demo.next_steps(console, SIMULATED)
        text = " ".join(console.export_text().split())
    assert "The engines are simulated" in text and "24 texts from Python's standard library" in text
    for typed in (
        "serve --replica-url",
        "serve --launch 4 --profile sim",
        "explain -",
        "loadgen run",
        "demo --file FILE",
    ):
        assert typed in text


def concluded(width: int) -> list[str]:
    """What ends the demo, after two rounds in which fewer requests a second were answered than offered."""
    console = Console(width=width, file=io.StringIO())
    demo.conclude(console, {policy: report_of(records_made(40, seed)) for seed, policy in enumerate(demo.POLICIES)})
    return console.file.getvalue().splitlines()


def test_its_table_says_why_fewer_were_answered_than_offered():
    lines = concluded(250)
    assert sum("4.00 requests/s offered" in line for line in lines) == 1
    for policy in demo.POLICIES:
        [line] = [line for line in lines if line.startswith(f"{policy}: ")]
        assert re.fullmatch(rf"{policy}: \d.\d\d answered: the last answer came [\d.]+ s after the last .*", line)


def test_it_ends_with_its_table_and_says_nothing_of_it_twice():
    *_, last = [line for line in concluded(250) if line]
    assert re.match(rf"{demo.POLICIES[-1]}: \d.\d\d answered", last), "what to type comes next"


async def test_interrupted_between_its_rounds_it_says_so_and_shows_the_first(monkeypatch, tmp_path):
    async def play(console, planned, requests, seed, policy, profile, which):
        if policy == demo.POLICIES[1]:
            raise asyncio.CancelledError
        return report_of(records_made(40), None)

    monkeypatch.setattr(demo, "play", play)
    console = Console(width=100, file=io.StringIO())
    args = argparse.Namespace(vllm=None, file=None, num_prompts=None, seed=0, json=None)
    assert await demo.demo_verb(args, console) == 130
    said = console.file.getvalue()
    assert "Stopped by hand" in said and "TTFT p99" in said and "least_time " not in said.partition("Stopped")[2]


def test_the_readme_shows_its_table():
    def table(lines: list[str]) -> list[str]:
        """The names of its rows, and its rules."""
        start = next(number for number, line in enumerate(lines) if line.split() == [*demo.POLICIES])
        return [re.split("  +", line)[0] for line in lines[start + 1 : lines.index("", start)]]

    readme = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
    rows = table([line.strip() for line in concluded(250)])
    said = table(readme)
    assert [row for row in said if "─" not in row] == [row for row in rows if "─" not in row]
    assert "─" in said[0] and "─" in rows[0]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """What looks like an environment with vLLM, and a cache folder of its own."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "vllm").write_text("#!/bin/sh\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "env"


def test_with_real_engines_it_plays_the_same_story(environment):
    scene = scenes.real(environment)
    planned = demo.plan(None, scene)
    made = profile.parse(planned.profile)
    assert (made.engine, made.device, made.num_gpu_blocks_override) == ("vllm", "cpu", planned.num_blocks)
    assert made.executable == str(environment / "bin" / "vllm")
    assert planned.num_blocks * made.block_size >= made.max_model_len
    assert 0.6 < planned.num_blocks * scene.block / planned.tokens < 0.7
    text = Tokenizer.from_file(str(scene.model / "tokenizer.json"))
    longest = max(len(text.encode(document.text).ids) for document in planned.documents)
    assert longest + 6 * (scene.reply_tokens * 1.5 + 100) + 200 < made.max_model_len  # six turns of them fit
    assert scenes.real(environment).model == scene.model  # built once


def test_with_real_engines_it_says_so_and_what_starts_them_again(environment):
    scene = scenes.real(environment)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))
    with console.file:
        demo.introduce(console, demo.plan(None, scene), None, scene.requests)
        demo.next_steps(console, scene)
        text = " ".join(console.export_text().split())
    assert "Everything is real but the model" in text and "two layers" in text
    assert f"--profile {scene.folder / 'demo.yaml'} --model {scene.model}" in text and '"model": "tiny-llama"' in text


def test_a_machine_that_cannot_have_real_engines_is_told_why(environment, monkeypatch, tmp_path):
    with pytest.raises(BadInput, match="make demo-vllm"):
        scenes.real(tmp_path / "nothing")
    monkeypatch.setattr(scenes, "available_bytes", lambda: 1 << 30)
    with pytest.raises(scenes.NoEngines, match="need 4 GiB of free memory, this machine has 1.0"):
        scenes.real(environment)
    assert main(["demo", "--vllm", str(environment)]) == 1


def test_commands_are_named_as_they_can_be_typed(monkeypatch, tmp_path):
    folder = tmp_path / "clone" / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "hitherto"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path / "clone")
    monkeypatch.setenv("PATH", "/usr/bin")
    assert demo.command("hitherto") == ".venv/bin/hitherto"
    assert demo.command("unknown") == "unknown"
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin")
    assert demo.command("hitherto") == "hitherto"
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir("/")
    assert demo.command("hitherto") == str(Path(str(folder / "hitherto")).relative_to("/"))
