"""Pairs of replicas that compute a request's prompt and write its answer, and the latency that each would give it.

    ttft = the prefiller's prediction for the prompt alone + the transfer + the decoder's step
           + what delays the decoder beyond that: prompts that it computes itself, blocks that must come free
    tpot = a step of the decoder with the streams that are there when the first token is out

A decoder's load includes requests whose prompts are still being computed elsewhere, so it covers what is about to
arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from . import two_legs
from .estimates import Estimate, Place, after_prefill, first_leg
from .legs import FEW, LegChoice
from .placement import Evaluation, Pairing
from .router import Router
from .vocabulary import Candidate, Demand


class Pair(NamedTuple):
    """A prefiller, a decoder, and the estimate of both together."""

    prefiller: Candidate
    decoder: Candidate
    estimate: Estimate

    @property
    def place(self) -> Place:
        """The names of both replicas, the prefiller's first."""
        return self.prefiller.replica, self.decoder.replica


def pairs(router: Router, whole: Evaluation, pairings: Sequence[Pairing], now: float) -> list[Pair]:
    """Return the pairs that could take a request, right after the request's evaluation.

    They are all pairs, or, where replicas are many, those of the fastest FEW on each side and one for every other
    replica.
    """
    return [
        Pair(first, second, estimated(router, first, second, whole.demand))
        for ways in two_legs.ways(router, whole, pairings, now)
        for first, second in _combined(ways.demand, ways.prefillers, ways.decoders)
        if first is not second and ways.can_pair(first, second)
    ]


def estimated(router: Router, prefiller: Candidate, decoder: Candidate, demand: Demand) -> Estimate:
    """Return the estimate of this pair; both replicas must have been weighed for the request."""
    moving = router.transfers.seconds(prefiller.replica, decoder.replica, demand.tokens - decoder.overlap, demand.now)
    return after_prefill(first_leg(prefiller, demand), moving, decoder, demand)


def best_legs(
    router: Router,
    whole: Evaluation,
    pairings: Sequence[Pairing],
    now: float,
    among: Collection[Place],
    must: bool = False,
) -> LegChoice | None:
    """Return the legs that the gateway's rule takes among these pairs, or None; with `must`, the cheapest legs."""
    found = two_legs.ways(router, whole, pairings, now)
    return two_legs.choose_among(router, [only for one in found if (only := one.only(among)) is not None], must)


def _combined(
    demand: Demand, prefillers: Sequence[Candidate], decoders: Sequence[Candidate]
) -> Iterator[tuple[Candidate, Candidate]]:
    """Yield pairs: all of the fastest FEW of each side, and every other replica with the other side's fastest."""
    firsts = sorted(prefillers, key=lambda one: first_leg(one, demand).ttft)
    seconds = sorted(decoders, key=lambda one: one.costs.step_seconds(one.load))
    yield from [(first, second) for first in firsts[:FEW] for second in seconds[:FEW]]
    yield from [(first, seconds[0]) for first in firsts[FEW:]]
    yield from [(firsts[0], second) for second in seconds[FEW:]]
