"""Runs as they come out of the generator, made up."""

import random
import types

import pytest

from loadgen.drive.records import Record
from loadgen.report.summary import summarise
from loadgen.workload.conversations import Offer


def made(number: int, seed: int = 0, **fields) -> list[Record]:
    rng, at, records = random.Random(seed), 100.0, []
    for index in range(number):
        at += rng.expovariate(4)
        prompt, first = rng.randint(100, 9000), at + rng.expovariate(5)
        cached = prompt // 32 * 16
        record = Record(
            f"c{index // 3}",
            index % 3,
            at,
            sent=at,
            first=first,
            last=first + rng.random(),
            status=200,
            gaps=[0.1] * 4,
            prompt_tokens=prompt,
            output_tokens=5,
            cached_tokens=cached,
            predicted_tokens=cached,
            replica=f"r{rng.randrange(3)}",
        )
        for name, value in fields.items():
            setattr(record, name, value)
        records.append(record)
    return records


def report_of(records: list[Record], slo=None) -> dict:
    return summarise(
        types.SimpleNamespace(
            done=records,
            began=100.0,
            ended=max((record.last for record in records), default=101.0),
            cpu_seconds=0.5,
            interrupted=False,
            not_sent=0,
            conversations=[1],
            connections=1,
            max_concurrency=None,
            users=None,
            processes=1,
            busiest_second=0.0,
            replicas=(),
            offered=Offer(4.0, 10.0, 0, 0.0),
        ),
        slo,
    )


@pytest.fixture
def runs():
    """`runs(names, number)` -> reports and records by name."""

    def make(names, number=40, slo=None, **fields):
        records = {name: made(number, seed, **fields) for seed, name in enumerate(names)}
        return {name: report_of(done, slo) for name, done in records.items()}, records

    return make
