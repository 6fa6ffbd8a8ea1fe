"""Estimates: the latency that a candidate would give a request, predicted before it is sent.

    ttft = the prediction of `costs` by the present load + fetching from slower tiers
           + the wait for free KV cache blocks and for a place among the requests that the engine runs
    tpot = a decode step with the streams that are there when the first token is out

Where one replica computes the prompt and another writes the answer (`options.pairs`), `first_leg` predicts the first
replica's part, and `after_prefill` combines it with the second's.

A stream that decodes now still does so after `ttft` seconds with probability exp(-ttft / left). Here `left` is the mean
time that an answer under way still takes: `Load.output_tokens` per request of the load, times a decode step. Prompts
that wait on the replica are computed before the request's own, so they count as streams by then. As streams end, they
free blocks of a full cache, and places among the max_num_seqs requests that the engine runs at once. The k-th of these
places comes free after k / max_num_seqs of `left`.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from .ledger import Load
from .vocabulary import Candidate, Demand

# Where a request is served: the replica that computes the prompt and, if it is another, the one that writes the answer.
Place = tuple[str, ...]


class Estimate(NamedTuple):
    """The predicted latency of a request on one candidate, and the load by which it was predicted."""

    ttft: float  # seconds to its first token
    wait: float  # the part of `ttft` before its own prompt is computed
    tpot: float  # seconds from one token to the next
    left: float = 0.0  # seconds that an answer under way on the candidate still takes, on average
    there: int = 0  # requests on the candidate now
    computing: int = 0  # how many of these have no first token yet
    full: float = 0.0  # share of the candidate's KV cache that these and this request take, 0 if unknown
    streams: float = 1.0  # the number of streams for which `tpot` was predicted
    context: float = 0.0  # the context tokens of these streams

    @property
    def own(self) -> float:
        """The predicted seconds to the request's first token if nothing were ahead of it."""
        return self.ttft - self.wait


class FirstLeg(NamedTuple):
    """The predicted time of computing a prompt on one candidate.

    `ttft`: seconds until the prompt is computed. `wait`: how many of these seconds pass before its computation begins.
    `load`: the candidate's present load.
    """

    ttft: float
    wait: float
    load: Load


def estimate(candidate: Candidate, demand: Demand) -> Estimate:
    """Return the predicted latency of a request that one candidate serves alone.

    Before the call, what the candidate holds of the prompt must be set on it (`Router.weighed`), and the expected
    `output` on the demand.
    """
    load, prompt = candidate.load, _prompt(candidate, demand, demand.output)
    return _estimate(candidate, demand, prompt.ttft, prompt.wait, load.requests, load.prefilling)


def first_leg(candidate: Candidate, demand: Demand) -> FirstLeg:
    """Return the predicted time until the candidate has computed the prompt, waits for free KV cache blocks included.

    What the candidate holds of the prompt must have been set on it before (`Router.weighed`).
    """
    return _prompt(candidate, demand, 0.0)


def after_prefill(first: FirstLeg, moving: float, decoder: Candidate, demand: Demand) -> Estimate:
    """Return the predicted latency of a request whose prompt one replica computes and whose answer `decoder` writes.

    `first`: the prediction for the replica that computes the prompt. `moving`: seconds from the end of the prefill
    until the decoder has the prompt's KV cache. The decoder works off its own queue during the prefill, so only the
    time by which that queue outlasts the prefill is added.
    """
    load = decoder.load
    base, own, queue, crowd = decoder.costs.ttft_parts(load, 1, max(0, demand.tokens - 1), demand.now)
    late = max(0.0, queue + _until_it_fits(decoder, _held(load, demand)) - first.ttft)
    ttft, there = first.ttft + moving + late + base + own + crowd, first.load.requests + load.requests
    return _estimate(decoder, demand, ttft, first.wait + late, there, first.load.prefilling)


def _estimate(candidate: Candidate, demand: Demand, ttft: float, wait: float, there: int, computing: int) -> Estimate:
    """Return the estimate with these figures, and with the TPOT that it predicts from them.

    The TPOT is predicted for the streams that will still decode on the candidate after `ttft` seconds, and the new one.
    `ttft`, `wait`, `there`, `computing`: the fields of `Estimate` with these names.
    """
    load, left = candidate.load, _left(candidate)
    stay = exp(-ttft / left) if left > 0.0 else 0.0
    all_ = load.decoding * stay + load.prefilling + 1
    streams = min(all_, candidate.max_num_seqs)
    context = (load.context_tokens * stay + load.prefill_tokens + demand.tokens + 0.5 * demand.output) * streams / all_
    tpot, full = candidate.costs.stream_step(streams, context), _held(load, demand) / load.capacity_tokens
    return Estimate(ttft, wait, tpot, left, there, computing, full, streams, context)


def _prompt(candidate: Candidate, demand: Demand, output: float) -> FirstLeg:
    """Return the predicted time until the candidate has computed the prompt.

    The computation begins once the KV cache has room for the prompt and an answer of `output` tokens.
    """
    cached, costs, load = candidate.cached, candidate.costs, candidate.load
    base, own, queue, crowd = costs.ttft_parts(load, demand.tokens - cached, cached, demand.now)
    fetched = candidate.fetch_seconds if candidate.lower else 0.0
    free = _until_it_fits(candidate, _held(load, demand) - demand.output + output)
    return FirstLeg(base + own + queue + crowd + fetched + free, queue + free, load)


def _held(load: Load, demand: Demand) -> float:
    """Return how many KV cache tokens a replica's present requests and the new one (`demand`) need together."""
    return load.context_tokens + load.prefill_tokens + demand.tokens + demand.output


def _left(candidate: Candidate) -> float:
    """Return the seconds that an answer under way on the candidate still takes, on average."""
    load = candidate.load
    return load.output_tokens / load.requests * candidate.costs.step_seconds(load) if load.requests else 0.0


def _until_it_fits(candidate: Candidate, held: float) -> float:
    """Return the seconds until answers that end on the candidate have made room for a new request.

    There is room once the KV cache has blocks for `held` tokens (those of the present requests and of the new one), and
    once the new request and all before it are among the `max_num_seqs` requests that the engine runs at once.
    """
    load, left, blocks = candidate.load, _left(candidate), 0.0
    if held > load.capacity_tokens and load.context_tokens:
        blocks = left * (held - load.capacity_tokens) / load.context_tokens
    waiting = load.requests + 1 - candidate.max_num_seqs
    return max(blocks, left * waiting / candidate.max_num_seqs if waiting > 0.0 else 0.0)
