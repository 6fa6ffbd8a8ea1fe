"""The shared conversations as requests: every assistant turn is one, with the messages before it as its prompt."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

DATA = Path(os.environ.get("HITHERTO_DATA", Path(__file__).parents[2] / "shared" / "data"))
TAU = "tau_bench_airline_gpt4o_conversations.jsonl.gz"
MTBENCH = "mtbench101_conversations.jsonl.gz"


def missing() -> str:
    """What to say when the data is not there; empty when it is."""
    if (DATA / TAU).exists() and (DATA / MTBENCH).exists():
        return ""
    return f"skipped: no conversations in {DATA}; set HITHERTO_DATA to the folder that has {TAU} and {MTBENCH}"


def conversations(name: str) -> Iterator[list[dict]]:
    """The messages of each conversation in a file."""
    with gzip.open(DATA / name, "rt") as lines:
        for line in lines:
            yield json.loads(line)["messages"]


def turns(messages: list[dict]) -> list[list[dict]]:
    """The prompts of one conversation, in order."""
    return [messages[:at] for at, message in enumerate(messages) if at and message["role"] == "assistant"]
