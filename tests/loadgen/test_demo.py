import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from loadgen import demo
from loadgen.sources import BadSource
from replicas import profile


def test_the_plan_puts_the_caches_under_pressure():
    planned = demo.plan(None)
    held = planned.num_blocks * demo.BLOCK / planned.tokens
    assert 20 <= len(planned.documents) <= demo.TEXTS
    assert 0.3 < held < 0.45  # one engine can't hold all texts, the four of them can
    conversations, starts = demo.load(planned, demo.REQUESTS, 0)
    assert len(conversations) == len(starts)
    assert starts[-1] < 60


def test_its_launch_profile_is_one():
    made = profile.parse(demo.plan(None).profile)
    assert (made.engine, made.num_blocks, made.speedup) == ("sim", demo.plan(None).num_blocks, demo.SPEED)


def test_a_short_file_is_still_several_texts(tmp_path):
    path = tmp_path / "f.txt"
    path.write_text("\n\n".join(f"Paragraph {number}. " + "Words follow words. " * 30 for number in range(80)))
    planned = demo.plan(path)
    assert len(planned.documents) > 10
    longest = max(len(document.text) for document in planned.documents) // 4
    assert planned.num_blocks * demo.BLOCK >= demo.RUNNING * longest  # those that run at a time fit
    path.write_text(" ")
    with pytest.raises(BadSource, match="no text"):
        demo.plan(path)


def test_it_says_what_is_real_and_what_to_type_next():
    console = Console(width=100, record=True, file=open(os.devnull, "w"))
    with console.file:
        demo.introduce(console, demo.plan(None), demo_arguments())
        demo.next_steps(console)
        text = " ".join(console.export_text().split())
    assert "The engines are simulated" in text and "24 texts from Python's standard library" in text
    for typed in ("serve --replica-url", "serve --launch 4 --profile sim", "explain -", "loadgen run", "demo --file FILE"):
        assert typed in text


def demo_arguments(*argv):
    from loadgen.cli import build_parser
    return build_parser().parse_args(["demo", *argv])


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
