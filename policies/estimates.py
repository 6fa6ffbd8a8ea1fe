"""Estimates: the latency that a candidate would give a request, predicted before it is sent.

    ttft = the prediction of `costs` by the present load + fetching from slower tiers
           + the wait for free blocks and for a place among those that run
    tpot = a decode step with the streams that are there when its first token is out

Where one replica computes the prompt and another writes the answer (`options.pairs`), `first_leg` predicts the first
replica's part, and `after_prefill` combines it with the second's.

A present stream is still there after `ttft` with probability exp(-ttft / left), where `left` is the time that an answer
observed at a random moment still takes (`Load.output_tokens` over its requests). Prompts that wait on the replica are
computed before the request's own, so they are streams by then. While the cache is full, blocks come free as streams
end, and so does a place among the max_num_seqs requests that the engine runs at once: of these answers, the k-th ends
after k / max_num_seqs of `left`.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from .ledger import Load
from .vocabulary import Candidate, Demand

# The replicas of one way to serve a request: the one that computes the prompt and, if another, the one that writes
Place = tuple[str, ...]


class Estimate(NamedTuple):
    """Predicted seconds for a request on one candidate, and the load by which they were predicted."""

    ttft: float  # seconds to its first token
    wait: float  # the part of `ttft` before its own prompt is computed
    tpot: float  # seconds from one token to the next
    left: float = 0.0  # seconds that an answer under way on the candidate still takes, on average
    there: int = 0  # requests on the candidate now
    computing: int = 0  # those of them without a first token
    full: float = 0.0  # share of the candidate's cache that they and this request take, 0 if unknown
    streams: float = 1.0  # the number of streams for which `tpot` was predicted
    context: float = 0.0  # the context tokens of these streams

    @property
    def own(self) -> float:
        """Seconds to its first token if nothing were ahead of it."""
        return self.ttft - self.wait


class FirstLeg(NamedTuple):
    """A prompt to be computed on one candidate.

    `ttft`: seconds until that is done; `wait`: those of them before it begins; `load`: the candidate's present load.
    """

    ttft: float
    wait: float
    load: Load


def estimate(candidate: Candidate, demand: Demand) -> Estimate:
    """Return a candidate's estimate for a whole request; the candidate was weighed for it and its `output` is set."""
    load, prompt = candidate.load, _prompt(candidate, demand, demand.output)
    return _estimate(candidate, demand, prompt.ttft, prompt.wait, load.requests, load.prefilling)


def first_leg(candidate: Candidate, demand: Demand) -> FirstLeg:
    """Return when the candidate would have computed the prompt, including the wait for blocks.

    The candidate was weighed for this demand.
    """
    return _prompt(candidate, demand, 0.0)


def after_prefill(first: FirstLeg, moving: float, decoder: Candidate, demand: Demand) -> Estimate:
    """Return the estimate of a `decoder` that gets the prompt's cache `moving` seconds after the first leg is done.

    Work that the decoder has to do first counts only by how much longer it takes than the first leg.
    """
    load = decoder.load
    base, own, queue, crowd = decoder.costs.ttft_parts(load, 1, max(0, demand.tokens - 1), demand.now)
    late = max(0.0, queue + _until_it_fits(decoder, _held(load, demand)) - first.ttft)
    ttft, there = first.ttft + moving + late + base + own + crowd, first.load.requests + load.requests
    return _estimate(decoder, demand, ttft, first.wait + late, there, first.load.prefilling)


def _estimate(candidate: Candidate, demand: Demand, ttft: float, wait: float, there: int, computing: int) -> Estimate:
    """Return the estimate, with the TPOT by the streams that are there after `ttft`; the rest are its fields."""
    load, left = candidate.load, _left(candidate)
    stay = exp(-ttft / left) if left > 0.0 else 0.0
    all_ = load.decoding * stay + load.prefilling + 1
    streams = min(all_, candidate.max_num_seqs)
    context = (load.context_tokens * stay + load.prefill_tokens + demand.tokens + 0.5 * demand.output) * streams / all_
    tpot, full = candidate.costs.stream_step(streams, context), _held(load, demand) / load.capacity_tokens
    return Estimate(ttft, wait, tpot, left, there, computing, full, streams, context)


def _prompt(candidate: Candidate, demand: Demand, output: float) -> FirstLeg:
    """Return when the candidate would have computed the prompt, if an answer of `output` tokens has to fit as well."""
    cached, costs, load = candidate.cached, candidate.costs, candidate.load
    base, own, queue, crowd = costs.ttft_parts(load, demand.tokens - cached, cached, demand.now)
    fetched = candidate.fetch_seconds if candidate.lower else 0.0
    free = _until_it_fits(candidate, _held(load, demand) - demand.output + output)
    return FirstLeg(base + own + queue + crowd + fetched + free, queue + free, load)


def _held(load: Load, demand: Demand) -> float:
    """Return the tokens of KV cache that the replica's present requests and the new one take together."""
    return load.context_tokens + load.prefill_tokens + demand.tokens + demand.output


def _left(candidate: Candidate) -> float:
    """Return the seconds that an answer under way on the candidate still takes, on average."""
    load = candidate.load
    return load.output_tokens / load.requests * candidate.costs.step_seconds(load) if load.requests else 0.0


def _until_it_fits(candidate: Candidate, held: float) -> float:
    """Return the seconds until ending answers have freed blocks for `held` tokens, and a place in its batch.

    There is a place once this request and all ahead of it can run.
    """
    load, left, blocks = candidate.load, _left(candidate), 0.0
    if held > load.capacity_tokens and load.context_tokens:
        blocks = left * (held - load.capacity_tokens) / load.context_tokens
    waiting = load.requests + 1 - candidate.max_num_seqs
    return max(blocks, left * waiting / candidate.max_num_seqs if waiting > 0.0 else 0.0)
