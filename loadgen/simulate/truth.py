"""What a request would truly take on each replica: for the oracle, from the engines themselves.

Seconds to the first token = the rest of the step under way + what must end before there is room + the steps that
compute the prompts before it and its own, with the decoding there in each; plus what it costs others: the seconds of
its own prefill for each stream that stands still meanwhile, at the weight `least_time` gives them. Still a forecast in
three places: who waits is taken to find in the cache what was there when first looked at, blocks that ending requests
share count for each, and requests that come later are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies import Demand
from policies.rules.least_time import _INTERFERENCE as INTERFERENCE

from .replica import Replica


class Truth:
    """`among`: the replicas, by index, that are the candidates now; the gateway that asks says so."""

    def __init__(self, replicas: Sequence[Replica], now: Callable[[], float]) -> None:
        self._replicas, self._now = replicas, now
        self.among: Sequence[int] = range(len(replicas))

    def seconds(self, index: int, asked: Demand) -> float:
        replica = self._replicas[self.among[index]]
        engine, profile, now = replica.engine, replica.engine.profile, self._now()
        hits = engine.cached(asked.hashes, asked.tokens)
        ahead, short, streams, context = engine.outlook()
        uncached = asked.tokens - hits * profile.block_size
        usage = profile.in_use(context)

        def prefill(tokens: int) -> float:
            """Steps of prompts, each with all that decodes."""
            room, time, took = profile.max_num_batched_tokens - streams, profile.step, 0.0
            while tokens > 0:
                took += time.seconds(min(tokens, room), 0.0, streams, context, usage)
                tokens -= room
            return took / profile.speedup

        pairs = profile.step.attention * uncached * (hits * profile.block_size + uncached / 2) * 1e-3 / profile.speedup
        first = replica.step_ends(now) - now + prefill(ahead + uncached) + pairs
        own = prefill(uncached) + pairs
        short += -(-asked.tokens // profile.block_size) - hits
        if short > 0:
            step = profile.step.seconds(0, 0.0, streams, context, usage) / profile.speedup
            first += engine.steps_until_free(short) * step
        return first + INTERFERENCE * streams * own
