"""Start times of conversations, in seconds from the start of the run; pure functions without a clock.

The schedule is an open loop: it is fixed before the first request is sent and never waits for an answer, so a slow
server meets the load that independent clients would send. `drive` measures how much later than due each request is
sent. If requests are much too late, the figures describe the generator (coordinated omission) and not the server.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ramp:
    """A request rate that changes from `start` to `end` (per second) over a run, linearly or exponentially."""

    start: float
    end: float
    exponential: bool = False

    def rate(self, progress: float) -> float:
        if self.exponential:
            return self.start * (self.end / self.start) ** progress
        return self.start + (self.end - self.start) * progress


def gap(rate: float, burstiness: float, rng: random.Random) -> float:
    """Draw the seconds until the next event, if there are `rate` events per second on average.

    The gaps are gamma-distributed with shape `burstiness`. As in `vllm bench serve`, burstiness 1 is a Poisson process;
    smaller values give bursts, larger ones more regular gaps, infinity equal gaps. With an infinite rate the result is
    0.
    """
    if math.isinf(rate):
        return 0.0
    if burstiness == 1:
        return rng.expovariate(rate)
    return 1 / rate if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / (rate * burstiness))


def conversation_starts(
    turns: list[int], request_rate: float, rng: random.Random, burstiness: float = 1.0, ramp: Ramp | None = None
) -> list[float]:
    """Return start times (seconds) for conversations with the given numbers of turns; the first begins at 0.

    `request_rate`: requests per second, as in `vllm bench serve`. Later turns wait for replies, so only conversations
    are started at random times: `request_rate` divided by the mean number of turns, per second. `ramp`: a changing
    request rate to use instead.
    """
    at, starts, all_turns = 0.0, [], sum(turns)
    for index in range(len(turns)):
        rate = ramp.rate(index / max(1, len(turns) - 1)) if ramp else request_rate
        at += gap(rate * len(turns) / all_turns, burstiness, rng) if index else 0.0
        starts.append(at)
    return starts
