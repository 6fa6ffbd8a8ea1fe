"""Runs as they come out of the generator, made up, and what a terminal shows of reports."""

import io
import random
import types

import pytest
from rich.console import Console

from loadgen.drive.records import Record
from loadgen.report.summary import summarise
from loadgen.workload.conversations import Offer


def drawn(thing: object, width: int = 100) -> str:
    """What a terminal of this width shows of it, without colours."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(thing)
    return console.file.getvalue()


def made(number: int, seed: int = 0, **fields) -> list[Record]:
    rng, at, records = random.Random(seed), 100.0, []
    for index in range(number):
        at += rng.expovariate(4)
        prompt, first = rng.randint(100, 9000), at + rng.expovariate(5)
        cached = prompt // 32 * 16
        times = {"sent": at, "first": first, "last": first + rng.random(), "gaps": [0.1] * 4}
        tokens = {"prompt_tokens": prompt, "output_tokens": 5, "cached_tokens": cached, "predicted_tokens": cached}
        known = {"status": 200, "replica": f"r{rng.randrange(3)}"}
        records.append(Record(f"c{index // 3}", index % 3, **{"due": at, **times, **tokens, **known, **fields}))
    return records


def run_of(records: list[Record], began: float, ended: float, **fields) -> types.SimpleNamespace:
    """A load that was sent from `began` to `ended`, as `summarise` reads it."""
    none = dict.fromkeys(("interrupted", "not_sent", "busiest_second"), 0) | dict.fromkeys(("max_concurrency", "users"))
    known = {"cpu_seconds": 0.5, "conversations": [1], "connections": 1, "replicas": ()}
    offered = Offer(4.0, 10.0, 0, 0.0)
    made = {"done": records, "began": began, "ended": ended, "offered": offered, **none, **known, **fields}
    return types.SimpleNamespace(**made)


def report_of(records: list[Record], slo=None) -> dict:
    return summarise(run_of(records, 100.0, max((record.last for record in records), default=101.0)), slo)


@pytest.fixture
def runs():
    """`runs(names, number)` -> reports and records by name."""

    def make(names, number=40, slo=None, **fields):
        records = {name: made(number, seed, **fields) for seed, name in enumerate(names)}
        return {name: report_of(done, slo) for name, done in records.items()}, records

    return make
