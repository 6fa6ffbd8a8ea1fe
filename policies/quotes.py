"""Quotes: what a candidate would give a request, before it is sent.

    ttft = what `costs.ttft_features` predicts by the load there now + fetching from slower tiers
           + until blocks and a seat are free
    tpot = a decode step with the streams that are there when its first token is out

Where one replica computes the prompt and another writes the answer (`pairs`), `first_leg` is what the former predicts,
and `after_prefill` what the latter makes of it.

A stream that is there now is still there after `ttft` with probability exp(-ttft / left), where `left` is the time that
an answer has left when it is met at a random moment (`Load.output_tokens` over its requests). Prompts that wait there
are computed before its own, so they are streams by then. While the cache is full, blocks come free as streams end, and
so do seats while all are taken: of as many answers the k-th ends after k / seats of the time that one has left.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from .ledger import Load
from .vocabulary import Candidate, Demand

Place = tuple[str, ...]  # the replicas of a way: the one that computes the prompt, and the one that writes, if another


class Quote(NamedTuple):
    """Predicted seconds on one candidate. `wait` is the part of `ttft` before its own prompt is computed; `left`: what
    answers that are under way there still take, on average. `there`: requests on it now, `computing` those of which the
    first token is not out; `full`: the share of its cache that they and it take, 0 if that is not known. `streams` and
    their `context` in tokens are what `tpot` was predicted for."""

    ttft: float
    wait: float
    tpot: float
    left: float = 0.0
    there: int = 0
    computing: int = 0
    full: float = 0.0
    streams: float = 1.0
    context: float = 0.0

    @property
    def own(self) -> float:
        """Seconds to its first token where nobody is ahead of it."""
        return self.ttft - self.wait


class FirstLeg(NamedTuple):
    """A prompt computed on one candidate: seconds until that is done, those of them before it is begun, and what is
    there now."""

    ttft: float
    wait: float
    load: Load


def quote(candidate: Candidate, demand: Demand) -> Quote:
    """Return what the candidate would give it. The demand has been weighed and has its `output`."""
    load = candidate.load
    ttft, queue = _prompt(candidate, demand)
    left, held = _left(candidate), _held(load, demand)
    free = _until_it_fits(candidate, held, left)
    return _quote(candidate, demand, left, held, ttft + free, queue + free, load.requests, load.prefilling)


def first_leg(candidate: Candidate, demand: Demand) -> FirstLeg:
    """Return when the candidate would have computed its prompt, for which it has to have blocks, too. The demand has
    been weighed."""
    ttft, queue = _prompt(candidate, demand)
    free = _until_it_fits(candidate, _held(candidate.load, demand) - demand.output, _left(candidate))
    return FirstLeg(ttft + free, queue + free, candidate.load)


def after_prefill(first: FirstLeg, moving: float, decoder: Candidate, demand: Demand) -> Quote:
    """Return what it would be given by a `decoder` that the prompt's cache takes `moving` seconds to, once the first
    leg is done. What the decoder has to do before it counts as far as that takes longer than the first leg."""
    load, costs = decoder.load, decoder.costs
    left, held = _left(decoder), _held(load, demand)
    base, own, queue, crowd = costs.ttft_parts(load, 1, max(0, demand.tokens - 1), demand.now)
    free = _until_it_fits(decoder, held, left)
    late = max(0.0, queue + free - first.ttft)
    ttft, there = first.ttft + moving + late + base + own + crowd, first.load.requests + load.requests
    return _quote(decoder, demand, left, held, ttft, first.wait + late, there, first.load.prefilling)


def _quote(
    candidate: Candidate, demand: Demand, left: float, held: float, ttft: float, wait: float, there: int, computing: int
) -> Quote:
    """By the streams that are there after `ttft`."""
    load = candidate.load
    stay = exp(-ttft / left) if left > 0.0 else 0.0
    all_ = load.decoding * stay + load.prefilling + 1
    streams = min(all_, candidate.seats)
    context = (load.context_tokens * stay + load.prefill_tokens + demand.tokens + 0.5 * demand.output) * streams / all_
    tpot = candidate.costs.stream_step(streams, context)
    return Quote(ttft, wait, tpot, left, there, computing, held / load.capacity_tokens, streams, context)


def _prompt(candidate: Candidate, demand: Demand) -> tuple[float, float]:
    """Seconds in which the candidate computes its prompt, once there is room, and those of them before it is begun."""
    cached, costs = candidate.cached, candidate.costs
    base, own, queue, crowd = costs.ttft_parts(candidate.load, demand.tokens - cached, cached, demand.now)
    fetched = candidate.fetch_seconds if candidate.lower else 0.0
    return base + own + queue + crowd + fetched, queue


def _held(load: Load, demand: Demand) -> float:
    """Tokens of cache that those there and this one take."""
    return load.context_tokens + load.prefill_tokens + demand.tokens + demand.output


def _left(candidate: Candidate) -> float:
    """Seconds that an answer there has left, on average."""
    load = candidate.load
    return load.output_tokens / load.requests * candidate.costs.step_seconds(load) if load.requests else 0.0


def _until_it_fits(candidate: Candidate, held: float, left: float) -> float:
    """Seconds until there are blocks for what it would hold, and a seat."""
    load = candidate.load
    return max(_until_free(load, held - load.capacity_tokens, left), _until_seat(load, candidate.seats, left))


def _until_free(load: Load, short: float, left: float) -> float:
    """Seconds until streams that end have left room for so many tokens, of which there is none now."""
    return left * short / load.context_tokens if short > 0.0 and load.context_tokens else 0.0


def _until_seat(load: Load, seats: float, left: float) -> float:
    """Seconds until enough answers have ended for this one to run, all that are ahead of it included."""
    short = load.requests + 1 - seats
    return left * short / seats if short > 0.0 else 0.0
