"""`least_time`: the replica where the request's answer, and the other requests that it delays, lose the fewest seconds.

These are the terms of a candidate's cost, in seconds, with the coefficients that `costs` learns. The first five are the
predicted TTFT, the sixth is the delay of other requests' first tokens, and the rest is time between tokens, of this
answer and of others. A *stream* is a request that is decoding.

    prefill       base + uncached x (token + pair x (cached + uncached / 2))
    queue         tokens ahead x queued + the current step, less the part of both that is done by now; plus the time by
                  which the replica's next answer is overdue
    crowd         the decode steps that its prefill shares with the streams there; a longer prefill shares more of them
    fetch         tokens in slower tiers x the learned time to fetch one, by tier
    room          if its KV cache blocks do not fit: the shortfall x the time that the streams there still take
    interference  own prefill x (prompts that wait for the next step, as this one will, + 0.25 x prompts that may have
                  begun): in a shared batch, their first tokens come that much later
    stall         0.05 x own prefill x streams there, each of which pauses meanwhile
    decode        0.15 x its own decode steps (its tokens x the step of one stream alone), and after x shared x the time
                  that the streams there add to these steps
    crowding      after x shared x streams x the time that it adds to each step, and `crowd` x the same for prefills to
                  come
    eviction      own prefill x 0.2 x share of KV blocks in use: some evicted blocks will be requested again

A stream adds `per stream + per token x (prompt + half its output)` to each step. A step without the stream is what
`costs` has learned, including the pauses for other requests' prefills. `shared` is how many steps two streams have in
common: o x r / (o + r), the mean of the shorter of two exponential times, where o tokens are expected of this answer
and r tokens are still to come of the answers there (`outputs` learns both). As a result, long answers do not gather on
one replica: one more costs most where most is still to come. TetriInfer's second level (arXiv 2401.11181) keeps heavy
and light decodes apart by the same predicted lengths; LMetric (arXiv 2603.15202) scores by the product of new prefill
tokens and batch size, which is the `stall` here. Waiting prompts count as streams, since they will become streams.

`after` is the product of two factors: how much a second after the first token counts relative to one before it, and for
how many requests a difference between the replicas' batches lasts. The first factor is 1 where a conversation begins:
the batch is chosen for all its answers, and nothing is lost. It is 0.15 where a conversation continues: a move to a
smaller batch costs computing the history again, and with 1 the TTFT grows by more than the rest shrinks
(`docs/policies.md`). The second factor weighs two effects. Requests that continue this conversation meet the difference
again, until one of them moves. And each request that is free to choose goes where streams are fewer, which levels the
difference. The factor is 1 / (share of requests that begin a conversation x (1 + mean streams of a replica) + 0.4 that
move): nearly 0 where all requests begin a conversation and many decode, and two and a half where nearly all continue
one. Where a conversation begins, its next requests will meet other streams, too: `stall` and `crowding` also count how
many requests follow one that begins (learned) x the streams expected there (all streams x this replica's share of
recent choices).

Two legs (prompt on one replica, answer on another) are compared with one replica by the same terms (`legs`), except
that a pause of other streams also counts 0.15, as much as a second between the tokens of the request's own answer. If
one replica serves the whole request, its prompt is computed in front of some streams whichever replica it is, so only
the difference between replicas counts. A replica that only computes prompts spares the streams the whole pause.

The least sum wins; sums within 0.02 % or 0.1 ms are equal, and one of them is drawn. A hot prefix spreads by itself
once the queue of the replica that holds it costs more than computing elsewhere. It spreads earlier by ski-rental
replication. The *regret* of a prefix is the seconds that requests have lost, over all these terms, because a replica
lacks a copy of the prefix. Once the regret equals the cost of a copy, the next request makes the copy. If copies stay,
the total cost is at worst twice what it would be with knowledge of the future (Karlin et al., Algorithmica 3, 1988, on
snoopy caching). Since caches turn over, the regret fades.

Overlaps (the prompt tokens that replicas hold) show whether a conversation begins. A continuing request finds a whole
earlier prompt on one replica alone. A first request finds less than the shortest prompt with the same first block,
since instructions are shared and tasks are not. For a continuing request the costs of future requests are left out,
because a move costs the computation of its history at once.

Inputs: overlaps and tiers (if missing, the rule balances predicted time), the ledger, learned costs and lengths of
answers (a new replica starts from its group's), the last scrape (if missing, `room` and `eviction` are 0), the time (if
missing, queued work counts as not begun).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np

from ..costs import STEP_TOKENS
from ..roster import Roster
from ..vocabulary import Candidate, Choice, Demand
from .least_cost import Cost, least, least_of

# How much a second after the first token counts, relative to one before it: where a conversation begins, and where one
# continues.
_BEGINNING, _GOING_ON = 1.0, 0.15
_STALL = 0.05  # how much a second's pause of a stream there counts, relative to a second before the first token
_MOVES = 0.4  # share of the continuing requests that change replica, which bounds how long a placement matters
# A replica's pace (factor on decode steps) between these counts as its group's pace, since other requests' prefills
# make it differ by as much.
_SLOWER, _FASTER = 1.2, 0.8
# The probability that a prompt on the replica which may have begun shares a step with ours; one that has not begun
# will.
_BATCHED = 0.25
_EVICTION = 0.2  # the probability that a block which a full cache evicts is requested again
_LEAVE = 0.05  # the least share of continuing requests that leave; its inverse bounds the learned number of followers
_LATELY = 128  # requests over which the share of continuing ones is averaged
# The share of a prefix's regret that is kept at each request for it: a copy must pay off within some 16 requests, as it
# will be evicted.
_KEEP = 1 - 1 / 16
_SPACES = 64  # spaces (served models' tokenizers) whose habits are kept, including outdated ones of models that changed
_ROOTS = 4096  # first blocks whose shortest prompt is kept, and prefixes whose regret is kept
_REPLY = 200  # decode steps that a stream typically has left when blocks run out
_USABLE = 0.98  # the share of its blocks that an engine can use; the rest is lost in half filled ones
TERMS = ("prefill", "queue", "crowd", "fetch", "room", "interference", "stall", "decode", "crowding", "eviction")
WAITS = 5  # so many of the first TERMS make up this request's own TTFT; the others are later or other requests' costs


def _of_all(
    demand: Demand,
    candidates: Sequence[Candidate],
    future: float = 0.0,
    after: float = 1.0,
    held: int = 0,
    pauses: float = 1.0,
) -> Sequence[tuple[float, ...]]:
    """Return the cost terms (TERMS, in seconds) of a request on each candidate; `Cost` explains the parameters.

    This is one piece of code without calls, since it runs for every replica at every request. `_totals` and `costs.lua`
    state the same formula for arrays and for Redis, and a test compares them with this. `pauses`: how many times as
    much as usual the term `stall` counts.
    """
    tokens, output, residual, now = demand.tokens, demand.output, demand.residual, demand.now
    weight, group, found = after * output, None, []
    later = weight * residual / max(1, output + residual)
    for candidate in candidates:
        costs, load = candidate.costs, candidate.load
        if costs.group is not group:
            group = costs.group
            base, token, pair, queued, busy, crowd = group.ttft.coefficients
            step_base, per_stream, per_token = group.step.coefficients
            own_steps, joining = _GOING_ON * output * step_base, (2 * later + crowd) * future
            added = per_stream + per_token * (tokens + 0.5 * output)
        speed, pace, cached, fetched = costs.ttft.value, costs.step.value, candidate.overlap, 0.0
        if cached < held:
            cached = held
        elif candidate.lower:
            cached, fetched = candidate.cached, candidate.fetch_seconds
        uncached = tokens - cached
        own = speed * (token * uncached + pair * (uncached * (cached + 0.5 * uncached)))
        prefilling, decoding, recent, context = load.prefilling, load.decoding, load.recent, load.context_tokens
        step = crowded = room = queue = interference = others = 0.0
        if decoding:
            for_streams, for_context = per_stream * decoding, per_token * context
            step, others = pace * (step_base + for_streams + for_context), for_streams + for_context
            crowded = crowd * (step * (uncached / STEP_TOKENS)) if uncached > STEP_TOKENS else crowd * step
            short = (context + load.prefill_tokens + tokens) / load.capacity_tokens - _USABLE
            if short > 0.0:
                room = short * _REPLY * step
        if prefilling:
            begun, began, waiting = load.begun, load.begun_tokens, load.prefill_tokens
            others = per_stream * (decoding + prefilling) + per_token * (context + waiting)
            attention = pair * (0.5 * began * began / (begun if begun > 1 else 1))
            left = 1.0 - (now - load.since) / (speed * (base + token * began + attention) + crowd * step)
            if left < 0.0:
                left = -left
            if left > 1.0:
                left = 1.0
            queue = speed * (queued * (waiting - began + left * began) + busy * left)
            interference = own * (_BATCHED * prefilling + (1 - _BATCHED) * (prefilling - begun))
        if now > load.due:
            queue += now - load.due
        decode, crowding = own_steps, joining * recent
        if pace > _SLOWER or pace < _FASTER:
            decode *= max(pace, _SLOWER) + min(pace, _FASTER) - 1.0
        if streams := decoding + prefilling:
            coming = load.output_tokens
            tokens_to_come = streams * output + coming
            shared = weight * coming / (tokens_to_come if tokens_to_come > 1.0 else 1.0)
            decode += shared * (pace * others)
            crowding = shared * streams + crowd * decoding + crowding
        found.append(
            (
                speed * base + own,
                queue,
                crowded,
                fetched,
                room,
                interference,
                pauses * (_STALL * own * (decoding + future * recent)),
                decode,
                pace * added * crowding,
                _EVICTION * load.kv_usage * own,
            )
        )
    return found


def _standing(candidate: Candidate) -> tuple[float, ...]:
    """Return the figures of a candidate's load and speeds that `_totals` uses, in the order in which it reads them."""
    load, speed, pace = candidate.load, candidate.costs.ttft.value, candidate.costs.step.value
    prefilling, decoding, begun, began = load.prefilling, load.decoding, load.begun, load.begun_tokens
    busy = 1 + _BATCHED * prefilling + (1 - _BATCHED) * (prefilling - begun)
    return (
        speed,
        speed * (busy + _STALL * decoding + _EVICTION * load.kv_usage),
        speed * load.recent,
        pace * load.recent,
        pace * min(1, decoding),
        pace * decoding,
        pace * load.context_tokens,
        speed * (load.prefill_tokens - began),
        speed * began,
        speed * 0.5 * began * began / max(1, begun),
        speed * min(1, prefilling),
        load.since,
        load.due,
        (load.context_tokens + load.prefill_tokens) / load.capacity_tokens - _USABLE,
        1 / load.capacity_tokens,
        max(pace, _SLOWER) + min(pace, _FASTER) - 1,
        load.output_tokens,
        decoding + prefilling,
        pace * (decoding + prefilling),
        pace * (load.context_tokens + load.prefill_tokens),
        decoding,
        load.recent,
    )


def _totals(demand: Demand, roster: Roster, future: float, after: float) -> np.ndarray:
    """Return the cost in seconds (the sum of the TERMS) of each candidate of a roster, as an array.

    No candidate may hold tokens in slower tiers. `future`, `after`: as in `Cost`.
    """
    base, token, pair, queued, busy, crowd = roster.group.ttft.coefficients
    step_base, per_stream, per_token = roster.group.step.coefficients
    tokens, output, residual, now = demand.tokens, demand.output, demand.residual, demand.now
    columns = roster.columns(_standing)
    speed, own_weight, speed_recent, pace_recent, stepping, pace_streams, pace_context, unbegun = columns[:8]
    began, attention, prefilling, since, due, full, per_capacity, steady = columns[8:16]
    coming, streams, pace_all, pace_held = columns[16:20]
    weight, overlap = after * output, roster.overlaps
    later = weight * residual / max(1, output + residual)
    added = per_stream + per_token * (tokens + 0.5 * output)
    step = step_base * stepping + per_stream * pace_streams + per_token * pace_context
    left = np.minimum(
        1.0, np.abs(1.0 - (now - since) / (base * speed + token * began + pair * attention + crowd * step))
    )
    own = (token * tokens + 0.5 * pair * tokens * tokens) - overlap * (token + 0.5 * pair * overlap)
    shared = weight * coming / np.maximum(1.0, streams * output + coming)
    total: np.ndarray = base * speed + own * (own_weight + _STALL * future * speed_recent)
    total += queued * unbegun + left * (queued * began + busy * prefilling) + np.maximum(0.0, now - due)
    total += step * (
        crowd * np.maximum(1.0, (tokens - overlap) / STEP_TOKENS)
        + _REPLY * np.maximum(0.0, full + tokens * per_capacity)
    )
    total += _GOING_ON * output * step_base * steady + shared * (
        (per_stream + added) * pace_all + per_token * pace_held
    )
    total += added * crowd * pace_streams + added * (2 * later + crowd) * future * pace_recent
    return total


COST = Cost("least_time", TERMS, _of_all, slack=(1.0002, 1e-4))
LEG_COST = COST.with_pauses(_GOING_ON / _STALL)  # the cost by which two legs are compared with one replica


class Lesson(NamedTuple):
    """The observation from which `LeastTime` learns once a request is placed."""

    continues: bool  # whether the request continues a conversation that one replica alone holds
    prefix: int | None = None  # hash of the last block that the cheapest candidate holds; None: it holds none
    regret: float = 0.0  # seconds that requests for this prefix have lost without a copy, this one included
    copy: int | None = None  # index of the candidate that is to compute a copy of the prefix; None: no copy is due


@dataclass(slots=True)
class Habits:
    """The learned habits of the requests to one served model (one space of tokens and blocks).

    They are kept for each model, because conversations with another model may go on differently even after the same
    prompts.
    """

    p_continuation: float = 0.5  # running share of the requests that continue a conversation
    shortest: dict[int, int] = field(default_factory=dict)  # tokens of the shortest prompt, by its first block
    regrets: dict[int, float] = field(default_factory=dict)  # seconds, by prefix; the least recently requested first

    def learn(self, demand: Demand, choice: Choice) -> None:
        lesson = choice.lesson
        self.p_continuation += (lesson.continues - self.p_continuation) / _LATELY
        shortest = self.shortest.get(demand.root)
        if shortest is None or demand.tokens < shortest:
            self.shortest[demand.root] = demand.tokens
            if len(self.shortest) > _ROOTS:
                del self.shortest[next(iter(self.shortest))]
        if lesson.prefix is not None:
            self.regrets.pop(lesson.prefix, None)  # moves it to the end: the least recently requested is dropped first
            self.regrets[lesson.prefix] = 0.0 if choice.index == lesson.copy else lesson.regret
            if len(self.regrets) > _ROOTS:
                del self.regrets[next(iter(self.regrets))]

    def continues(self, demand: Demand, held: float) -> bool:
        """Return whether a request seems to continue a conversation.

        `held`: how many prompt tokens one replica holds and no other does. A whole earlier prompt there shows a
        continuation.
        """
        shortest = self.shortest.get(demand.root)
        # A template may end the shortest prompt otherwise than it continues it, so two blocks are left out.
        return held > 0 and (shortest is None or held >= shortest - 2 * demand.block_size)

    def future(self, streams: float, recent: float) -> float:
        """Return a factor for how many streams the later requests of a new conversation will meet on a replica.

        The caller multiplies it by the replica's `Load.recent`, which counts recent choices of the replica. `streams`,
        `recent`: the sums of `Load.decoding` and `Load.recent` over all replicas. By Little's law a replica's share of
        all streams is its share of the recent choices, which is steadier than the number of its present streams.
        """
        p = self.p_continuation
        p -= p / _LATELY  # with this request counted, which begins a conversation
        return p / (1.0 - p + _LEAVE) * streams / recent if recent else 0.0

    def after(self, continues: bool, streams: float, replicas: int) -> float:
        """Return `after`: how much a second after the first token counts relative to a second before it.

        The module's docstring derives it. `continues`: the request continues a conversation. `streams`: the decoding
        requests of all replicas together. `replicas`: how many replicas there are.
        """
        lasts = 1.0 / ((1.0 - self.p_continuation) * (1.0 + streams / replicas) + _MOVES)
        return (_GOING_ON if continues else _BEGINNING) * lasts

    def regret(self, demand: Demand, held: float) -> tuple[int | None, float | None]:
        """Return the prompt's prefix of `held` tokens, as a hash, and its regret so far in seconds.

        The regret is what requests have lost because a replica lacks a copy of the prefix. It is None unless the prefix
        was requested recently: the history of one conversation is requested once, which is no reason for a copy.
        """
        if held < demand.block_size or not demand.hashes:
            return None, None
        # `hashes` cover only the longest of several prompts, and `held` may come from another space: bound the index.
        prefix = demand.hashes[min(int(held) // demand.block_size, len(demand.hashes)) - 1]
        return prefix, self.regrets.get(prefix)


_NOTHING_YET = Habits()  # read only


class LeastTime:
    """The routing policy `least_time`, which sends a request where it costs the fewest seconds.

    `choose` reads the learned habits and changes nothing; `placed` learns from the `Lesson` of a choice.
    """

    name = "least_time"
    cost, leg_cost = COST, LEG_COST
    in_seconds = True

    def __init__(self) -> None:
        self._habits: dict[int, Habits] = {}  # by the space of a request's tokens

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        # `isinstance` would call the abstract base class of sequences, in Python
        roster = candidates if type(candidates) is Roster and not explain and not candidates.tiered else None
        habits, size, terms = self._habits.get(demand.space, _NOTHING_YET), demand.block_size, None
        exclusive, streams, recent = _survey(candidates, size) if roster is None else _survey_of_many(roster, size)
        continues = habits.continues(demand, exclusive)
        future = 0.0 if continues else habits.future(streams, recent)
        after = habits.after(continues, streams, len(candidates))
        if roster is None:
            terms = _of_all(demand, candidates, future, after)
            totals: Any = [*map(sum, terms)]
            best = least(totals, COST.slack, demand.draw)
        else:
            totals = _totals(demand, roster, future, after)
            best = least_of(totals, COST.slack, demand.draw)
        held = candidates[best].overlap
        prefix, regret = habits.regret(demand, held)
        copy = None
        if regret is not None and (other := _cheapest_with_less(candidates, totals, held)) is not None:
            costs = totals[best], totals[other]
            regret, due = _with_regret(demand, regret, costs, candidates[other], held, future, after)
            copy = other if due else None
        index = best if copy is None else copy
        lesson = Lesson(continues, prefix, regret or 0.0, copy)
        among = range(len(totals)) if index == best else None
        if terms is None:
            return Choice(index, "", None, lesson, among, future, after)
        ttft = sum(terms[index][:WAITS])
        if not explain:
            return Choice(index, "", None, lesson, among, future, after, ttft)
        reason = f"{totals[index] * 1e3:.1f} ms, {candidates[index].overlap} of {demand.tokens} tokens held"
        if index != best:
            reason += f"; a copy for those that follow, of what {candidates[best].replica} holds"
        return Choice(index, reason, [dict(zip(TERMS, one)) for one in terms], lesson, among, future, after, ttft)

    def placed(self, demand: Demand, candidates: Sequence[Candidate], choice: Choice) -> None:
        """Learn from a placement how often conversations continue, and what the lack of a copy has cost."""
        habits = self._habits.get(demand.space)
        if habits is None:
            habits = self._habits[demand.space] = Habits()
            if len(self._habits) > _SPACES:
                del self._habits[next(iter(self._habits))]
        habits.learn(demand, choice)


def _with_regret(
    demand: Demand, regret: float, costs: tuple[float, float], other: Candidate, held: int, future: float, after: float
) -> tuple[float, bool]:
    """Return the regret of a prefix, this request included, and whether a copy of the prefix is due.

    The regret is the seconds that requests have lost because the candidate `other` lacks the prefix. A copy is due once
    it equals the cost of computing the prefix there. `regret`: the regret before this request. `costs`: the costs of
    the cheapest candidate, which holds `held` tokens of the prompt, and of `other`, the cheapest one that holds fewer.
    `future`, `after`: as in `Cost`.
    """
    here, there = costs
    [copied] = map(sum, _of_all(demand, (other,), future, after, held))
    regret = _KEEP * regret + max(0.0, here - copied)
    return regret, regret >= there - copied


def _survey(candidates: Sequence[Candidate], block_size: int) -> tuple[float, int, float]:
    """Return three figures over all candidates: the exclusive overlap, the decoding requests, the recent choices.

    The exclusive overlap is the most prompt tokens that a candidate holds, if every other candidate holds less by more
    than a block, else 0. The other two are the sums of `Load.decoding` and `Load.recent`.
    """
    longest = second = -inf
    streams, recent = 0, 0.0
    for candidate in candidates:
        overlap, load = candidate.overlap, candidate.load
        streams += load.decoding
        recent += load.recent
        if overlap > longest:
            longest, second = overlap, longest
        elif overlap > second:
            second = overlap
    return longest if second < longest - block_size else 0.0, streams, recent


def _survey_of_many(roster: Roster, block_size: int) -> tuple[float, float, float]:
    """Return the three figures of `_survey` (exclusive overlap, decoding requests, recent choices) for a roster."""
    overlaps = roster.overlaps
    longest = overlaps.item(overlaps.argmax())  # 0.2 us; `max` takes 1 us
    alone = len((overlaps >= longest - block_size).nonzero()[0]) == 1
    streams, recent = roster.columns(_standing)[-2:].dot(roster.ones).tolist()  # half the time of `sum`
    return longest if alone else 0.0, streams, recent


def _cheapest_with_less(candidates: Sequence[Candidate], totals: Any, held: int) -> int | None:
    """Return the index of the cheapest candidate that holds fewer than `held` prompt tokens in its first tier, or None.

    `totals`: the cost of each candidate.
    """
    if isinstance(totals, np.ndarray):
        less = (candidates.overlaps < held).nonzero()[0]  # type: ignore[attr-defined]  # they are a Roster
        return less.item(totals.take(less).argmin()) if len(less) else None
    other = None
    for at, candidate in enumerate(candidates):
        if candidate.overlap < held and (other is None or totals[at] < totals[other]):
            other = at
    return other
