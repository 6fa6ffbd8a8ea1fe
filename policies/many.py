"""The sum of `least_time`'s terms for many candidates at once.

The same sum as in `least_time`, which says what it means, put in another order: what a replica's load and speeds make
of it is kept in a `Roster` (`figures`), and a decision is one product of those with the group's coefficients, and some
twenty operations on arrays. A test holds that both are equal. 64 candidates take 29 us where one after the other takes
87, 1,024 take 56 us instead of 1.4 ms.
"""
from __future__ import annotations

from math import inf

import numpy as np

from .costs import STEP_TOKENS
from . import least_time as one    # its weights; it imports this
from .roster import Roster
from .vocabulary import Candidate, Demand

(SPEED, OWN, DECODES, STREAMS, CONTEXT, RECENT, WAITING, BEGUN, STEPS, PAIRS, SAVED, SQUARE, SINCE, SHARE, DECODING, EACH, CAPACITY, HELD) = range(18)
ONE = np.array(1.0)    # an operation with an array of one number takes 0.4 us, with a float 0.7


def figures(candidate: Candidate) -> tuple[float, ...]:
    """What `totals` needs of one replica, in the order of the names above; 0 for what it fills in by itself, SAVED and SQUARE."""
    load, costs = candidate.load, candidate.costs
    speed, pace, streams, waiting = costs.ttft.value, costs.step.value, load.decoding, load.prefilling
    tokens, context, recent, since = load.prefill_tokens, load.context_tokens, load.recent, load.since
    own = 1.0 + one._INTERFERENCE * streams + one._EVICTION * (load.kv_usage or 0.0) + one._BATCHED * waiting
    if not waiting:
        queue = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    elif since is None:    # as if the step began in a far future: all of it is left
        queue = speed * tokens, 0.0, speed, 0.0, 0.0, 0.0, inf
    else:
        begun = load.begun_tokens
        own += (1.0 - one._BATCHED) * (waiting - load.begun)
        queue = speed * (tokens - begun), speed * begun, speed, speed * begun * begun / (load.begun or 1), 0.0, 0.0, since
    if not streams:
        return (speed, speed * own, 0.0, 0.0, 0.0, pace * recent, *queue, recent, 0.0, 1.0, 0.0, 0.0)
    return (speed, speed * own, pace, pace * streams, pace * context, pace * recent, *queue,
            recent, streams, 1.0, load.capacity_tokens or 0.0, context + tokens)


def totals(demand: Demand, roster: Roster, follow: float) -> np.ndarray:
    """For each candidate the sum of its TERMS, in seconds, if `follow` requests go on from this one.

    None may have blocks in lower tiers, and the time must be known."""
    columns, tokens = roster.columns(figures), demand.tokens
    base, token, pair, queued, busy, crowd = roster.group.ttft.coefficients
    step_base, step_stream, step_context = roster.group.step.coefficients
    crowding = (one._LONGER + crowd) * (step_stream + step_context * tokens)
    step, stream, context = crowd * step_base, crowd * step_stream, crowd * step_context
    half, later = 0.5 * pair, 0.0
    if follow:
        recent, streams = columns[SHARE:EACH].dot(columns[EACH]).tolist()    # half of what `sum` takes
        later = crowding * follow * streams / recent if recent else 0.0
    held = roster.overlaps
    np.multiply(held, columns[OWN], columns[SAVED])    # rows of ours among the others, so that the one product takes them along
    np.multiply(held, columns[SAVED], columns[SQUARE])
    product = np.array((
        # all but the step under way; what is held need not be computed: held x (token + pair x held / 2)
        base, tokens * (token + half * tokens), step, stream + crowding, context, later, queued, 0.0, 0.0, 0.0, -token, -half,
        # that one, as if it began now
        0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, queued, busy, 0.0, 0.0, 0.0,
        # how long it lasts
        base, 0.0, step, stream, context, 0.0, 0.0, token, 0.0, half, 0.0, 0.0,
    )).reshape(3, SINCE).dot(columns[:SINCE])
    total, under_way, left = product[0], product[1], product[2]    # 1.3 us less than by iteration
    left = (columns[SINCE] - demand.now) / left
    left += ONE
    np.abs(left, left)
    np.minimum(left, ONE, out=left)
    left *= under_way
    total += left
    if tokens > STEP_TOKENS:
        total += _longer(tokens - held, columns, step, stream, context)
    capacity = columns[CAPACITY]
    if capacity.item(capacity.argmax()):
        total += _room(tokens, columns, step_base, step_stream, step_context)
    return total


def held_alone(roster: Roster, block_size: int) -> float:
    """As `least_time.held_alone`."""
    overlaps = roster.overlaps
    longest = overlaps.item(overlaps.argmax())    # 0.2 us, `max` takes 1
    return longest if len((overlaps >= longest - block_size).nonzero()[0]) == 1 else 0.0


def _longer(uncached: np.ndarray, columns: np.ndarray, step: float, stream: float, context: float) -> np.ndarray:
    """What decodes in all steps of a long prompt but the first."""
    steps = np.maximum(uncached / STEP_TOKENS - 1.0, 0.0)
    return steps * (step * columns[DECODES] + stream * columns[STREAMS] + context * columns[CONTEXT])


def _room(tokens: int, columns: np.ndarray, step_base: float, step_stream: float, step_context: float) -> np.ndarray:
    capacity = columns[CAPACITY]
    known = np.where(capacity > 0.0, capacity, np.inf)
    short = np.maximum((columns[HELD] + tokens) / known - 1.0 + one._SPARE, 0.0)
    return short * one._REPLY * (step_base * columns[DECODES] + step_stream * columns[STREAMS] + step_context * columns[CONTEXT])
