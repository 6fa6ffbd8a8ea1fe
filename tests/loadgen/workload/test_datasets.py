"""The flags as a user gives them, and the load they make."""

import argparse
import json
import re
from pathlib import Path

import pytest

from loadgen.cli import build_parser
from loadgen.drive import target
from loadgen.drive.run import CHAT, COMPLETIONS
from loadgen.options import BadOption
from loadgen.workload import datasets
from loadgen.workload.conversations import spans_of


def given(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    target.add_asking(parser)
    datasets.add_workload(parser)
    args = parser.parse_args([str(flag) for flag in flags])
    datasets.check(args)
    return args


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": at * 1000, "input_length": 600, "output_length": 3, "hash_ids": [0, at]})
            for at in range(1, 41)
        )
    )
    return path


def test_a_trace_plays_at_its_own_times_unless_told_otherwise(trace):
    assert datasets.workload(given("--dataset-path", trace)).starts == list(range(40))
    quick = given("--dataset-path", trace, "--trace-speed", 2, "--num-prompts", 3)
    assert datasets.workload(quick).starts == [0, 0.5, 1]
    paced = datasets.workload(given("--dataset-path", trace, "--request-rate", 10, "--burstiness", "inf"))
    assert paced.starts == pytest.approx([at / 10 for at in range(40)])
    ramp = "--burstiness inf --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 4".split()
    ramped = datasets.workload(given("--dataset-path", trace, *ramp))
    assert ramped.starts[2] - ramped.starts[1] > 2 * (ramped.starts[-1] - ramped.starts[-2])
    assert datasets.workload(given("--dataset-path", trace, "--users", 3)).starts == [0.0] * 40


def test_a_trace_of_another_kind(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 7, "input_length": 10, "output_length": 1, "hash_ids": [1, 2, 3]}\n')
    load = datasets.workload(
        given("--dataset-name", "timed_trace", "--dataset-path", path, "--timed-trace-chunk-hash-size", 4)
    )
    (span,) = spans_of(load.conversations[0].turns[0].messages)
    assert (list(span.ids), span.length, span.block) == ([1, 2, 3], 10, 4)


@pytest.mark.parametrize(
    "flags, endpoint, completions, ignore_eos",
    [
        ((), CHAT, False, False),
        (("--dataset-name", "rag"), COMPLETIONS, True, False),
        (("--dataset-name", "rag", "--backend", "openai-chat"), CHAT, False, False),
        (("--backend", "vllm"), COMPLETIONS, True, False),
        (("TRACE",), COMPLETIONS, True, True),
        (("TRACE", "--no-ignore-eos"), COMPLETIONS, True, False),
        (("--ignore-eos", "--endpoint", "/x"), "/x", False, True),
    ],
)
def test_how_is_asked(trace, flags, endpoint, completions, ignore_eos):
    flags = [part for flag in flags for part in (("--dataset-path", trace) if flag == "TRACE" else (flag,))]
    asking = target.asking(given(*flags), "m")
    assert (asking.endpoint, asking.completions, asking.ignore_eos) == (endpoint, completions, ignore_eos)


def test_another_seed_load_or_file_has_other_tokens(trace):
    flags = [
        ("--dataset-name", "rag"),
        ("--dataset-name", "chat"),
        ("--dataset-name", "rag", "--seed", 1),
        ("--dataset-path", trace),
        ("--dataset-path", trace, "--seed", -1),
    ]
    salts = [target.asking(given(*one), "m").salt for one in flags]
    assert len(set(salts)) == len(flags) and salts == [target.asking(given(*one), "m").salt for one in flags]


@pytest.mark.parametrize("name", datasets._GENERATORS)
def test_every_made_up_load_by_its_name(name):
    args = given("--dataset-name", name, "--num-prompts", 30)
    load = datasets.workload(args)
    assert load.requests == 30 and load.starts == sorted(load.starts) and len(load.starts) == len(load.conversations)
    assert datasets.workload(args) == load
    described = datasets.describe(args, load)
    assert described["dataset_name"] == name and described["requests"] == 30 and described["output_len"] > 0


def test_the_record_says_the_defaults_and_what_was_given(trace):
    args = given("--dataset-path", trace, "--trace-jitter", 3)
    described = datasets.describe(args, datasets.workload(args))
    assert described["dataset_name"] == "mooncake" and described["timed_trace_chunk_hash_size"] == 512
    assert (described["trace_jitter"], described["trace_speed"], described["dataset_path"]) == (3, 1.0, str(trace))


def test_the_names_of_vllms_benchmark():
    flags = "--random-input-len 50 --random-output-len 7 --random-range-ratio 0.5 --num-prompts 9"
    load = datasets.workload(given("--dataset-name", "random", *flags.split()))
    turns = [conversation.turns[0] for conversation in load.conversations]
    assert all(25 <= span.length <= 75 for turn in turns for span in spans_of(turn.messages))
    assert all(4 <= turn.max_tokens <= 10 for turn in turns)
    flags = {"num-prefixes": 2, "prefix-len": 64, "suffix-len": 16, "output-len": 4}
    words = [word for name, value in flags.items() for word in (f"--prefix-repetition-{name}", value)]
    load = datasets.workload(given("--dataset-name", "prefix_repetition", *words))
    spans = [list(spans_of(conversation.turns[0].messages)) for conversation in load.conversations]
    assert len({prefix for prefix, _ in spans}) == 2
    assert {(prefix.length, suffix.length) for prefix, suffix in spans} == {(64, 16)}


def test_the_document_names_every_load_and_only_flags_there_are():
    text = (Path(__file__).parents[3] / "docs/loadgen.md").read_text()
    assert set(re.findall(r"^\| `(\w[\w-]*)` \|", text, re.M)) == set(datasets.DATASETS)
    known = {
        flag
        for verb in ("run", "compare", "simulate", "sweep")
        for flag in build_parser("loadgen")._subparsers._group_actions[0].choices[verb]._option_string_actions
    }
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--dataset-name", "rag", "--turns", "3"), "--turns means nothing to rag"),
        (("--trace-speed", "2"), "--trace-speed means nothing to multi-turn"),
        (("--dataset-name", "mooncake"), "--dataset-name mooncake needs --dataset-path FILE"),
        (("--dataset-name", "random", "--dataset-path", "x"), "--dataset-path means nothing to random"),
        (("--users", "2", "--request-rate", "3"), "--users is a closed loop"),
        (("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1"), "--ramp-up-strategy needs"),
        (("--ramp-up-end-rps", "1"), "need --ramp-up-strategy"),
        (
            "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2 --request-rate 1".split(),
            "and no --request-rate",
        ),
        (("--dataset-name", "chat", "--replies", "engine"), "replies are text; add --backend openai-chat"),
    ],
)
def test_flags_that_do_not_go_together(flags, said):
    with pytest.raises(BadOption, match=said):
        given(*flags)
