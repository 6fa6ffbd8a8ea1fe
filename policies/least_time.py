"""`least_time`: the replica where this request, and those it holds up, lose the fewest seconds.

Per candidate, in seconds (coefficients: `costs`); the first four are the predicted TTFT, the fifth is waiting too:

    prefill       base + uncached x (token + pair x (cached + uncached / 2))
    queue         tokens ahead x queued + the rest of the step under way, less what of both is done by now
    crowd         the decode steps its prefill shares with the streams there: the more, the longer it is
    fetch         tokens in slower tiers x a share of the time to compute them
    room          if its blocks do not fit: the shortfall x the time the streams there still take
    interference  own prefill x (0.03 x streams decoding, which stand still meanwhile, + prompts that wait for the next step, as ours will,
                  + 0.25 x those that may have begun: first tokens come so much later where a batch is shared)
    crowding      one stream more makes each step longer: for the streams there now, at the weight of a standstill, and, by
                  Little's law, for as many requests that will come while it decodes: streams x (0.03 x 25 + crowd) x marginal step;
                  and where a conversation begins, for the streams that the requests after this one will meet: 4 x how many go on
                  from one that begins (learned) x the streams there as a rule (all streams x its share of the choices of late)
    eviction      own prefill x 0.2 x KV use: some of what it pushes out will be asked for again

The least sum wins; within 0.1 % or 0.1 ms, any of them at random. A hot prefix spreads by itself: once the
holder's queue costs more than computing it elsewhere, elsewhere wins. It spreads before that, too, as one who hires skis
buys a pair when the hire has come to its price: what requests lost (TTFT and interference) for want of a copy of their prefix where it
would have served them best is summed up, and once it comes to what a copy costs, the next one makes it. For copies that stay
that costs at worst twice what knowing the future would have (Karlin et al., Algorithmica 3, 1988, on snoopy caching); since caches
turn over, the sum fades.

Whether a conversation begins is told by the overlaps: one that goes on finds a whole earlier prompt on one replica alone, one that
begins less than the shortest prompt that began with the same block, as instructions are shared and tasks are not. One that goes on hardly
has a choice, and is not made to pay for the future: moving it costs its history at once.

Inputs: overlaps and tiers (none: it balances predicted time), the ledger, learned costs (a new replica
starts from its group's), the last scrape (missing: `room` and `eviction` are 0), the time (missing: nothing is done yet of what is queued).

Measured in simulation, 8 replicas, mean TTFT. `room`: Mooncake's conversation trace at twice its speed on
16,384 blocks a replica, where blocks run short, 402 ms without and 323 with (`overlap_cost` 398). `crowding`: 0 to 3 %
less on most loads, and up to 20 % less p99 ITL. Ties of 5 % instead of 0.1 %: within 3 %, fewer hits.
`interference` with waiting prompts: p99 2 to 7 % less where little is shared (rag, Azure's and
Mooncake's traces of `bench.field`), the mean up to 1 %. Streams' share of `crowding`: 7 % less mean on a fleet of two speeds, 2 % where
gateways do not know each other's load, nothing elsewhere; twice as much helps agents and harms where caches are tight (tau-bench, p99).
In `bench.field`: the time in `queue`, 17 cells, two seeds, p99 4 % less (rag near saturation, 9 to 15 %), the mean 0.6 %. Both, one seed:
mean TTFT of agents 9 % less at 30 % of saturation, 10 % on 64 replicas, 1 to 4 % elsewhere. Streams met later at a fixed 12 requests that
go on: on a trace of few turns p99 12 % longer; paid by all turns alike: p99 of agents and tau-bench 4 to 18 % longer, as histories
moved; paid only among those that hold the prefix: nothing gained, since instructions must be computed in more places.
To take whoever finds most on one replica alone for one that goes on: agents' mean 2 % longer at 30 and 50 %, p99 3 % at 70.
By the mean over cells, three seeds each, against `vllm_kv_aware` there: streams met later at 4 instead of 1.5, 16 cells, mean 0.8 % less, p99 the
same (0: 3.3 % longer; 6 and 10: p99 1 and 2 % longer); copies, 15 cells, mean 1.5 % less and p99 3 %, most of it where a prefix is suddenly
hot (p99 a quarter less), agents' p99 0.8 % longer; copies at twice or four times that regret: 0.2 and 0.7 % longer; the sum fading, agents at 30 and 50 %, twelve other
seeds: p99 2 and 1 % less, the mean 0.3 % longer, against its not fading. Standstill at 0.05 instead of
0.03: mean 0.1 % less, p99 0.1 % longer, of rag at 90 % 4 %; at 0.015: 0.3 and 0.8 % longer.
Tried and left out: what a prefill costs those who will queue behind it (policy iteration on M/G/1): 3 to 20 % worse
where prefixes are shared, since an engine serves prompts in batches and not singly. The rest of the step under way as that step's own
prediction, and the chance by its age that who came first waits still: predicts queues better (correlation with what came 0.58 to 0.77 for
agents, where something is ahead), chooses no better: mean and p99 within 0.3 %. Known weak spot: equal
prompts that share nothing, replies of 24 tokens, past 90 % of saturation: 2 to 5 % behind `least_load`.
"""
from __future__ import annotations

import random
from typing import Sequence

from . import many
from .costs import STEP_TOKENS, steps
from .roster import Roster
from .vocabulary import Bid, Candidate, Choice, Demand

_INTERFERENCE = 0.03    # seconds of TTFT that a second of one stream's standstill is worth: who comes while it lasts longer meets it
_BATCHED = 0.25         # chance that a prompt there shares a step with ours, if it may have begun: those that have not begun will
_LONGER = _INTERFERENCE * 25    # the same weight for 25 decode steps that two streams have in common
_EVICTION = 0.2         # chance that what is pushed out of a full cache is asked for again
_FOLLOW = 4.0           # weight of a stream met later, to one met now: it makes ours wait, too
_LEAVE = 0.05           # share of those that go on which leave for elsewhere: what is learned is bounded by its inverse
_LATELY = 128           # requests, to tell how many go on from one that begins
_KEEP = 1 - 1 / 16      # of a prefix's regret, with each request for it: a copy must pay within some 16, for it does not stay for ever
_ROOTS = 4096           # first blocks whose shortest prompt is kept, and prefixes whose regret is
_REPLY = 200            # decode steps a stream typically has left when blocks run out
_SPARE = 0.02           # share of the blocks an engine cannot use to the full: half filled ones
# Fetching a token's KV instead of computing it, as a share of the time: what the tier credits 0.8, 0.6
# and 0.3 of vllm-router's `kv_aware` leave over.
_FETCH = {"cpu": 0.2, "disk": 0.4, "remote": 0.7}
TERMS = ("prefill", "queue", "crowd", "fetch", "room", "interference", "crowding", "eviction")
WAITS = 5    # of the TERMS are this request's own wait, the others what it costs other requests
HELD_UP = 6  # are the wait of this request and of those it holds up


def lost_seconds(tokens: int, candidate: Candidate, now: float | None = None, later: float = 0.0, held: int = 0) -> tuple[float, ...]:
    """The TERMS of one candidate for a prompt of `tokens`, as if it held `held` of them at least; `later`: see `streams_later`."""
    load, costs, cached = candidate.load, candidate.costs, max(candidate.overlap, held)
    base, token, pair, _, _, crowd = costs.group.ttft.coefficients
    speed, streams, usage = costs.ttft.value, load.decoding, load.kv_usage or 0.0
    fetch = 0.0
    for tier, count in candidate.lower:
        fetch += speed * token * count * _FETCH.get(tier, 1.0)
        cached += count
    uncached = tokens - cached
    own = speed * uncached * (token + pair * (cached + 0.5 * uncached))
    step_base, step_stream, step_context = costs.group.step.coefficients
    pace, context = costs.step.value, load.context_tokens
    step = pace * (step_base + step_stream * streams + step_context * context) if streams else 0.0
    crowded = crowd * step
    if uncached > STEP_TOKENS:    # as `steps` has it, whose call each candidate would pay for
        crowded *= uncached / STEP_TOKENS
    queue = held_up = room = 0.0
    if load.prefilling:
        queue, held_up = costs.queue_seconds(load, now, step), _BATCHED * load.prefilling
        if now is not None and load.since is not None:
            held_up += (1.0 - _BATCHED) * (load.prefilling - load.begun)
    if streams and load.capacity_tokens:
        short = (context + load.prefill_tokens + tokens) / load.capacity_tokens - 1.0 + _SPARE
        if short > 0.0:
            room = short * _REPLY * step
    crowding = (_LONGER + crowd) * (streams + later) * (pace * (step_stream + step_context * tokens))
    return (speed * base + own, queue, crowded, fetch, room, own * (_INTERFERENCE * streams + held_up),
            crowding, _EVICTION * usage * own)


def held_alone(candidates: Sequence[Candidate], block_size: int) -> int:
    """The longest overlap, in tokens, if one replica alone has it; else 0."""
    overlaps = [candidate.overlap for candidate in candidates]
    longest = max(overlaps)
    return longest if len([overlap for overlap in overlaps if overlap >= longest - block_size]) == 1 else 0


def streams_later(candidates: Sequence[Candidate], follow: float) -> list[float]:
    """How many streams on each candidate the `follow` requests will meet, all together, that go on from one there.

    By Little's law a replica has that share of all streams which it has of the choices: steadier than what streams there just now.
    """
    if not follow:
        return [0.0] * len(candidates)
    recent = sum([candidate.load.recent for candidate in candidates])
    scale = follow * sum([candidate.load.decoding for candidate in candidates]) / recent if recent else 0.0
    return [scale * candidate.load.recent for candidate in candidates]


def bid(tokens: int, candidate: Candidate, later: float = 0.0) -> Bid:
    """The sum of `lost_seconds` as a linear form in the load; `room` and `eviction`, which need a scrape, as they are now.

    Of a load that others change meanwhile it is not known since when its prompts are computed.
    """
    load, costs = candidate.load, candidate.costs
    base, token, pair, queued, busy, crowd = costs.group.ttft.coefficients
    step_base, step_stream, step_context = costs.group.step.coefficients
    speed, pace, usage = costs.ttft.value, costs.step.value, load.kv_usage or 0.0
    cached = candidate.overlap + sum(count for _, count in candidate.lower)
    _, _, _, fetch, room, _, _, _ = lost_seconds(tokens, candidate)
    marginal = pace * (step_stream + step_context * tokens)
    scale = speed * (1.0 + _EVICTION * usage)
    uncached = tokens - cached
    crowded = crowd * steps(uncached) * pace
    return Bid(
        own=scale * uncached * (token + pair * (cached + 0.5 * uncached)),
        pace=scale,
        fixed=speed * base + fetch + room + (_LONGER + crowd) * later * marginal,
        if_prefilling=speed * busy,
        per_prefill_token=speed * queued,
        if_decoding=crowded * step_base,
        per_stream=crowded * step_stream + (_LONGER + crowd) * marginal,
        per_context_token=crowded * step_context,
        own_per_stream=_INTERFERENCE * speed / scale,
        own_per_waiting=_BATCHED * speed / scale,
    )


class LeastTime:
    name = "least_time"
    slack = (1.001, 1e-4)

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed).random
        self._bound = 0.5    # running share of the requests that go on where they are bound
        self._shortest: dict[int, int] = {}    # prompt by its first block, in tokens
        self._regrets: dict[int, float] = {}    # seconds by prefix, the last asked for last

    def _follow(self, demand: Demand, held: float) -> float:
        """How many requests go on from this one, at their weight: none that begins if it is bound itself, else by the shares of both.

        `held`: what one replica alone has of it; of a first block never seen, anything.
        """
        shortest = self._shortest.get(demand.root)
        bound = held > 0 and (shortest is None or held >= shortest - 2 * demand.block_size)    # templates may end it otherwise later
        if shortest is None or demand.tokens < shortest:
            self._shortest[demand.root] = demand.tokens
            if len(self._shortest) > _ROOTS:
                del self._shortest[next(iter(self._shortest))]
        self._bound += (bound - self._bound) / _LATELY
        return 0.0 if bound else _FOLLOW * self._bound / (1.0 - self._bound + _LEAVE)

    def _later(self, demand: Demand, candidates: Sequence[Candidate]) -> list[float]:
        return streams_later(candidates, self._follow(demand, held_alone(candidates, demand.block_size)))

    def _copy_due(self, demand: Demand, held: int, here: Sequence[float], other: Candidate, there: Sequence[float], later: float = 0.0) -> bool:
        """Whether the other is to compute the `held` tokens of this prompt that the one chosen holds: what its not being there has cost
        until now, this time included, has come to what that costs. `here`, `there`: the TERMS of both."""
        copied = lost_seconds(demand.tokens, other, demand.now, later, held)
        prefix = demand.hashes[held // demand.block_size - 1]
        regret = _KEEP * self._regrets[prefix] + max(0.0, sum(here[:HELD_UP]) - sum(copied[:HELD_UP]))
        due = regret >= sum(there) - sum(copied)
        self._regrets[prefix] = 0.0 if due else regret
        return due

    def _asked_before(self, demand: Demand, held: float) -> bool:
        """Whether the part of this prompt that is held was so for another, of late: not the history of one conversation."""
        if held < demand.block_size or not demand.hashes:
            return False
        prefix = demand.hashes[int(held) // demand.block_size - 1]
        regret = self._regrets.pop(prefix, None)
        self._regrets[prefix] = regret or 0.0
        if len(self._regrets) > _ROOTS:
            del self._regrets[next(iter(self._regrets))]
        return regret is not None

    def _weighed(self, demand: Demand, candidates: Sequence[Candidate]) -> tuple[int, int, list[tuple[float, ...]], list[float]]:
        """The choice, which one has the least total, and the TERMS and later streams of all. They differ where a copy of what the
        latter holds is due: on the one with the least total of those that hold less."""
        later = self._later(demand, candidates)
        lost = [lost_seconds(demand.tokens, candidate, demand.now, more) for candidate, more in zip(candidates, later)]
        totals = [sum(terms) for terms in lost]
        index = least = self._least(totals)
        held = candidates[least].overlap
        if self._asked_before(demand, held):
            other = min([at for at, candidate in enumerate(candidates) if candidate.overlap < held], key=totals.__getitem__, default=None)
            if other is not None and self._copy_due(demand, held, lost[least], candidates[other], lost[other], later[other]):
                index = other
        return index, least, lost, later

    def _least(self, totals: list[float]) -> int:
        limit = min(totals) * self.slack[0] + self.slack[1]
        ties = [index for index, total in enumerate(totals) if total <= limit]
        return ties[int(self._random() * len(ties))]

    def choose(self, demand: Demand, candidates: Sequence[Candidate], explain: bool = False) -> Choice:
        if isinstance(candidates, Roster) and demand.now is not None and not explain and not candidates.tiered:
            return self._choose_of_many(demand, candidates)
        index, least, lost, _ = self._weighed(demand, candidates)
        if not explain:
            return Choice(index)
        reason = f"{sum(lost[index]) * 1e3:.1f} ms, {candidates[index].overlap} of {demand.tokens} tokens held"
        if index != least:
            reason += f"; a copy for those that follow, of what {candidates[least].replica} holds"
        return Choice(index, reason, [dict(zip(TERMS, terms)) for terms in lost])

    def _choose_of_many(self, demand: Demand, roster: Roster) -> Choice:
        lost = many.totals(demand, roster, self._follow(demand, many.held_alone(roster, demand.block_size)))
        least = lost.item(lost.argmin())    # 0.2 us, `min` takes 1
        ties = (lost <= least * self.slack[0] + self.slack[1]).nonzero()[0].tolist()
        index = ties[int(self._random() * len(ties))]
        held = roster.overlaps.item(index)
        if self._asked_before(demand, held):
            less = (roster.overlaps < held).nonzero()[0]
            if len(less):
                other = less.item(lost.take(less).argmin())
                here, there = [lost_seconds(demand.tokens, roster[at], demand.now) for at in (index, other)]
                if self._copy_due(demand, roster[index].overlap, here, roster[other], there):
                    index = other
        return Choice(index)

    def bids(self, demand: Demand, candidates: Sequence[Candidate]) -> list[Bid | None]:
        """Where a copy is due, that one alone: whether it is, is told from the load as known here."""
        index, least, _, later = self._weighed(demand, candidates)
        return [bid(demand.tokens, candidate, more) if at == index or index == least else None
                for at, (candidate, more) in enumerate(zip(candidates, later))]

    def own_after(self, demand: Demand, overlap: int, candidates: Sequence[Candidate]) -> float:
        _, token, pair, _, _, _ = candidates[0].costs.group.ttft.coefficients
        uncached = demand.tokens - overlap
        return uncached * (token + pair * (overlap + 0.5 * uncached))
