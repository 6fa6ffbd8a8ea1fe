"""When requests are due. Pure: seconds from the start of the run, no clock.

Open loop: the schedule is fixed before the first request is sent and never waits for an answer,
so a slow server meets the load it would meet from strangers. What the generator itself adds, the
lateness between due and sent, is measured by `drive` and reported: a large lateness means that
the figures describe the generator (coordinated omission) and not the server.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Yield the times (s) of a Poisson process of `rate` events per second, without end.

    The first event is at 0, so that a run of n events lasts n - 1 gaps. An infinite rate puts all
    of them at 0, which is what `--request-rate inf` means to vLLM's benchmark.
    """
    if not rate > 0:
        raise ValueError(f"a rate must be above zero, not {rate}")
    at = 0.0
    while True:
        yield at
        if not math.isinf(rate):
            at += rng.expovariate(rate)


def conversation_starts(turns: list[int], request_rate: float, rng: random.Random) -> list[float]:
    """Start times (s) for conversations of the given numbers of turns.

    `request_rate` counts requests, as vLLM's benchmark does. Later turns follow their
    conversation's replies, so what arrives as a Poisson process is the conversations, at
    request_rate / mean turns.
    """
    if not turns:
        return []
    starts = poisson(request_rate * len(turns) / sum(turns), rng)
    return [next(starts) for _ in turns]
