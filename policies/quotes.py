"""Quotes: what a candidate would give a request, before it is sent.

    ttft = what `costs.ttft_features` predicts by the load there now + fetching from slower tiers + blocks to come free
    tpot = a decode step with the streams that are there when its first token is out

A stream that is there now is still there after `ttft` with probability exp(-ttft / left), where `left` is the time that
an answer has left when it is met at a random moment (`Load.output_tokens` over its requests). Prompts that wait there
are computed before its own, so they are streams by then. While the cache is full, blocks come free as streams end.
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


def quote(candidate: Candidate, demand: Demand) -> Quote:
    """Return what the candidate would give it. The demand has been weighed and has its `output`."""
    load, costs, cached = candidate.load, candidate.costs, candidate.cached
    base, own, queue, crowd = costs.ttft_parts(load, demand.tokens - cached, cached, demand.now)
    left = _left(load, costs.step_seconds(load))
    held = load.context_tokens + load.prefill_tokens + demand.tokens + demand.output
    wait = queue + _until_free(load, held - load.capacity_tokens, left)
    ttft = base + own + crowd + wait
    if candidate.lower:
        ttft += costs.group.fetch.seconds(candidate.lower)
    stay = exp(-ttft / left) if left > 0.0 else 0.0
    streams = load.decoding * stay + load.prefilling + 1
    context = load.context_tokens * stay + load.prefill_tokens + demand.tokens + 0.5 * demand.output
    tpot = costs.stream_step(streams, context)
    return Quote(ttft, wait, tpot, left, load.requests, load.prefilling, held / load.capacity_tokens, streams, context)


def _left(load: Load, step: float) -> float:
    """Seconds that an answer there has left, on average."""
    return load.output_tokens / load.requests * step if load.requests else 0.0


def _until_free(load: Load, short: float, left: float) -> float:
    """Seconds until streams that end have left room for so many tokens, of which there is none now."""
    return left * short / load.context_tokens if short > 0.0 and load.context_tokens else 0.0
