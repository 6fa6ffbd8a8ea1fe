"""What `bench.overload` and `bench.chaos` ask their simulated fleets: requests, classes and limits."""

from __future__ import annotations

import random
from math import log

from loadgen.simulate import Record, Turn
from policies import QosClass, Slo

REPLICAS, BLOCK = 4, 16
SLO = Slo(2.0, 0.05)
CLASSES = tuple(
    QosClass(name, fraction, priority, SLO)
    for name, fraction, priority in (("premium", 0.1, 100), ("standard", 0.3, 50), ("free", 0.6, 10))
)


def turns(rate: float, begin: float, end: float, kind: int, seed: int, qos: str = "") -> list[tuple[float, Turn]]:
    """Requests of one kind and when they come; `kind` tells their blocks from those of others."""
    chance, when, found = random.Random(f"{kind} {seed}"), begin, []
    while rate and (when := when + chance.expovariate(rate)) < end:
        tenant = chance.randrange(16)
        tokens = int(min(12_000, max(64, chance.lognormvariate(log(850), 0.8)))) + 512
        output = int(min(1500, max(8, chance.lognormvariate(log(120), 0.7))))
        first = (kind << 48) + (len(found) << 12)
        blocks = [(1 << 60) + (tenant << 12) + index for index in range(512 // BLOCK)]
        blocks += [first + index for index in range((tokens + output) // BLOCK - len(blocks))]
        found.append((when, Turn(blocks[: tokens // BLOCK], tokens, output, blocks, qos=qos, tenant=f"t{tenant}")))
    return found


def met(record: Record) -> bool:
    answered = record.error is None and record.end > 0.0
    return (
        answered
        and record.first - record.sent <= SLO.ttft
        and record.end - record.first <= SLO.tpot * max(1, record.output - 1)
    )
