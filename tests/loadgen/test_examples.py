"""The examples in docs/loadgen.md: each command is one, and what virtual time printed it prints again."""

import json
import re
import shlex

import pytest

from loadgen.cli import build_parser, main
from loadgen.report import show, tables
from loadgen.sweep import Search, Sweep, table

from ..test_house import ROOT
from .report.conftest import drawn

PAGE = (ROOT / "docs/loadgen.md").read_text()


def chunks() -> list[list[str]]:
    """Indented lines that stand together, continued lines joined."""
    found, lines = [], []
    for line in [*PAGE.replace("\\\n", " ").split("\n"), ""]:
        if line.startswith("    "):
            lines.append(line.strip())
        elif lines:
            found.append(lines)
            lines = []
    return found


def examples() -> list[tuple[list[str], list[str]]]:
    """Commands, and the lines printed below them; none where no chunk follows."""
    every = chunks()
    found = []
    for number, chunk in enumerate(every):
        if chunk[0].startswith("loadgen ") and ": " not in chunk[0].partition("{")[0]:
            below = every[number + 1] if number + 1 < len(every) else [""]
            found.append((chunk, [] if below[0].startswith("loadgen ") else below))
    return found


def words(line: str) -> str:
    return " ".join(line.split())


def virtual(commands: list[str]) -> bool:
    """Whether they need no server and no file that this repository lacks."""
    return all(re.match(r"loadgen (simulate|diff) ", one) and "conversation_trace" not in one for one in commands)


def test_there_are_examples():
    assert len(examples()) >= 8 and sum(virtual(commands) for commands, _ in examples()) >= 3


@pytest.mark.parametrize("commands", [commands for commands, _ in examples()], ids=lambda one: one[0][:50])
def test_every_command_is_one(commands):
    for command in commands:
        build_parser("loadgen").parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize(
    "commands, printed", [one for one in examples() if virtual(one[0])], ids=lambda one: one[0][-50:]
)
def test_what_was_printed_is_printed_again(commands, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    for command in commands:
        capsys.readouterr()
        assert main(shlex.split(command)[1:]) in (0, 1)  # `diff` ends with 1 where something got worse
    out = {words(line) for line in capsys.readouterr().out.splitlines()}
    for line in printed:
        assert words(line) in out, line


def test_rows_of_measured_tables_are_rows_of_the_product():
    names = [row.label for row in show.rows_of({"": {"percentiles": ["p50", "p90", "p99"]}})] + ["requests per replica"]
    compared = [printed for commands, printed in examples() if re.match(r"loadgen (compare|simulate)", commands[-1])]
    labels = [re.split(r"  +", line)[0] for printed in compared for line in printed[1:]]
    assert len(labels) > 10
    for label in labels:
        assert label in names, label


def test_what_runs_against_servers_print_has_the_products_rows_and_columns(tmp_path, monkeypatch, capsys):
    """Their figures are the day's; what they are of, and where it stands, is today's."""
    monkeypatch.chdir(tmp_path)
    command = "simulate --replicas 2 --policies least_time --dataset-name random --num-prompts 20 --request-rate 9 --goodput ttft:1s"
    assert main([*command.split(), "--json", "one.json"]) == 0
    report = json.loads((tmp_path / "one.json").read_text())["targets"]["least_time"]
    labels = [re.split(r"  +", line.strip())[0] for line in drawn(show.run_report(report), 250).splitlines()]
    [run] = [printed for commands, printed in examples() if commands[0].startswith("loadgen run") and printed]
    assert re.fullmatch(r"38 of 38 requests answered in [\d.]+ s · [\d.]+ requests/s · \d+ output tokens/s", run[0])
    for line in run[1:]:
        assert re.split(r"  +", line)[0] in labels, line
    sweep = Sweep(Search(9.0), {"ttft": 1000.0}, 0.9, [])
    sweep.add(9.0, report)
    [swept] = [
        printed for commands, printed in examples() if commands[0].startswith("loadgen sweep") and len(printed) > 1
    ]
    assert words(swept[0]) in [words(line) for line in drawn(tables.drawn(table(sweep)), 250).splitlines()]
    assert all(len(re.split(r"  +", line)) == 8 for line in swept)
