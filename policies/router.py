"""Router: places requests on replicas, and learns from how they end.

A placement is one step: the cache map says how much of the prompt each replica's KV cache holds, the policy chooses a
replica, the load is counted there, and the map notes which blocks the replica will hold. The request's progress is
reported in up to three further calls, each of which may be repeated or omitted: `first_token` when its prefill is done,
then `finish` if the answer is complete and `abandon` if not.

The proxy, decisions for another proxy, several gateways on one Redis and the simulation all place requests here, so a
policy behaves the same in each. No I/O and no clock: the caller passes `now` in seconds. Not thread safe.

To *weigh* candidates is to set on each how much of the request's prompt its caches hold (`Candidate.overlap`, `lower`).
A *space*, given by a number, is one combination of tokenizer, chat template and block size: a request's tokens and
block hashes are the same for all replicas of one space.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from . import legs, pulls
from .costs import PEER, CostGroup, Costs, Lower
from .estimates import Estimate, estimate
from .ledger import FAR, UNTIMED, Ledger, Reservation
from .max_num_seqs import MaxNumSeqs
from .outputs import Outputs, answer_seconds, due
from .placement import (
    NO_PULLS,
    Decision,
    Evaluation,
    Held,
    PrefixMap,
    behind,
    leading,
)
from .roster import Roster
from .transfers import Transfers
from .vocabulary import Candidate, Demand, Policy, Pull

MANY = 16  # the least number of candidates that are handled as arrays; fewer are faster one by one
SHARED_TIER = "cpu"  # the memory tier from which other replicas may fetch
PASSED_OVER_SECONDS = 2.0  # a replica without a request for so long, while others get some, counts as passed over


def hittable(tokens: int, block_size: int) -> int:
    """Return how many blocks of a prompt can be cache hits, in any memory tier; its last token is always computed."""
    return (tokens - 1) // block_size


class Targets:
    """The candidates (replicas) for a request, in a stable order.

    It caches arrays, so use the same object while the candidates stay the same. `space`: the number of the space
    (tokenizer, template and block size) of all candidates, None if they are of several. `roster`: the candidates as
    arrays, None if they are few.
    """

    __slots__ = ("candidates", "roster", "slots", "nothing", "space")

    def __init__(self, candidates: Sequence[Candidate], roster: Roster | None = None) -> None:
        self.candidates, self.roster = candidates, roster
        spaces = {one.space for one in candidates}
        self.space = spaces.pop() if len(spaces) == 1 else None
        if roster is not None:
            self.slots = np.array([one.slot for one in candidates])
            self.nothing = np.zeros(len(candidates))

    def __len__(self) -> int:
        return len(self.candidates)

    def only(self, replica: str) -> Targets:
        """Return new targets with this replica as the only candidate."""
        return Targets([one for one in self.candidates if one.replica == replica])


@dataclass(slots=True, eq=False)
class Placement:
    """A request on a replica, from the choice of the replica to the request's end.

    The engine is expected to find `overlap` and `lower` in its KV cache, `cached` tokens together.
    """

    candidate: Candidate
    demand: Demand
    overlap: int  # prompt tokens that the replica is assumed to hold in its first tier
    reservation: Reservation  # its share of the replica's load
    at: float  # when it was made, in seconds
    lower: Lower = ()  # prompt tokens that it is assumed to hold in slower tiers, after the overlap
    beyond: int = 0  # tokens of the prompt's last block that are computed although the engine counts them as cached
    pull: Pull | None = None  # where the last entry of `lower` comes from, if that is another replica
    chosen_by: float | None = None  # the predicted TTFT by which the policy chose, if it computed one
    expected: int | None = None  # the number that `PrefixMap.expect` returned; None: that was not called
    pull_took: float | None = None  # seconds that the pull took, if measured

    @property
    def cached(self) -> int:
        """The prompt tokens that need not be computed, as the replica holds them in any memory tier."""
        return self.overlap + self.fetched if self.lower else self.overlap

    @property
    def predicted(self) -> int:
        """The number of cached prompt tokens (`cached_tokens`) that the engine is predicted to report."""
        return self.overlap + self.beyond + (self.fetched if self.lower else 0)

    @property
    def fetched(self) -> int:
        """The prompt tokens that come from slower memory tiers or another replica."""
        return sum([tokens for _, tokens in self.lower])

    @property
    def overlap_blocks(self) -> int:
        """The number of the prompt's blocks that the replica is assumed to hold in its first tier."""
        return self.overlap // self.demand.block_size

    @property
    def computing(self) -> bool:
        """Whether the prompt is still being computed, as far as the gateway knows."""
        return self.reservation.stage == "prefill"

    @property
    def seconds(self) -> float:
        """The predicted seconds from sending the request to its last token.

        They follow from the replica's load when the request was placed, and from the expected length of its answer.
        """
        taken, costs = self.reservation, self.candidate.costs
        seconds = costs.answer_seconds(taken.before, taken.uncached, self.cached, self.demand.output, taken.at)
        return seconds + self.fetch_seconds

    @property
    def ttft(self) -> float:
        """The predicted seconds from sending the request to its first token, by the replica's load at that time."""
        if self.chosen_by is not None:
            return self.chosen_by
        taken = self.reservation
        seconds = self.candidate.costs.ttft_seconds(taken.before, taken.uncached, self.cached, taken.at)
        return seconds + self.fetch_seconds

    @property
    def punctual_ttft(self) -> float:
        """The predicted TTFT without the time by which the replica is late; measured times are compared with it.

        That an answer is overdue when one request is placed says nothing about the next request, so it is not learned
        from.
        """
        taken = self.reservation
        seconds = self.candidate.costs.punctual_seconds(taken.before, taken.uncached, self.cached, taken.at)
        return seconds + self.fetch_seconds

    @property
    def fetch_seconds(self) -> float:
        """The predicted seconds to fetch KV cache from slower tiers and from another replica; part of the TTFT."""
        seconds = self.candidate.costs.group.fetch.seconds(self.lower)
        return seconds + self.pull.seconds if self.pull is not None else seconds


class Router:
    """The placement of requests on the replicas of one ledger (loads) and one cache map, by one policy.

    `transfers`, `pulls`: the learned seconds of moving KV cache between two replicas. `transfers` is for requests whose
    prompt one replica computes and whose answer another writes, `pulls` for prompts fetched from another's memory.
    """

    def __init__(
        self,
        policy: Policy,
        prefixes: PrefixMap,
        ledger: Ledger,
        costs: CostGroup,
        leg_rule: legs.LegRule = legs.choose,
    ) -> None:
        self.leg_rule = leg_rule
        self.policy, self.map, self.ledger, self.costs = policy, prefixes, ledger, costs
        self.outputs = Outputs()
        self.transfers, self.pulls = Transfers(), Transfers()
        self.candidates: dict[str, Candidate] = {}
        self._max_num_seqs: dict[str, MaxNumSeqs] = {}
        # Optional methods of a policy, see `Policy`.
        self.placed, self._first, self._ended, self._gone = [
            getattr(policy, name, None) for name in ("placed", "first", "ended", "gone")
        ]
        self._tiered: list[Candidate] = []  # the candidates on which `lower` was set for the last request
        # By replica: the last seen `Load.recent` (how often it was chosen lately), and when that changed.
        self._used: dict[str, tuple[float, float]] = {}
        self._decayed_at = 0.0

    def on_room(self, tell: Callable[[], None]) -> None:
        """Call `tell` from now on when the room on replicas may have changed.

        That is when a request was placed, when its prompt was computed, and when it ended.
        """

        def also(told: Callable[..., None] | None) -> Callable[..., None]:
            def both(*given: object) -> None:
                if told is not None:
                    told(*given)
                tell()

            return both

        self.placed, self._first, self._ended = also(self.placed), also(self._first), also(self._ended)

    # --- replicas

    def add(self, replica: str, slot: int, rank_paths: Collection[str] | None = None) -> Candidate:
        """Add a replica on which requests may be placed; return its candidate, the same object until `remove`.

        `slot`: its index in the cache map. `rank_paths`: set if it is one data-parallel rank of an engine; only
        requests posted to these API paths are sure to be computed by the rank that they are sent to.
        """
        candidate = Candidate(
            replica, 0, self.ledger.add(replica), self.costs.add(replica), slot=slot, rank_paths=rank_paths
        )
        self.candidates[replica], self._max_num_seqs[replica] = candidate, MaxNumSeqs()
        return candidate

    def learn_max_num_seqs(self, replica: str, running: int | None) -> None:
        """Learn how many requests a replica runs at once, from a scrape of its metrics.

        `running`: how many requests run there now; None if the engine does not report it.
        """
        if running is not None and (candidate := self.candidates.get(replica)) is not None:
            candidate.max_num_seqs = self._max_num_seqs[replica].scraped(candidate.load, running)

    def regroup(self, replica: str, group: CostGroup) -> None:
        """Move a replica to another group of replicas that share learned costs.

        The speeds that its former group learned for it are discarded.
        """
        candidate = self.candidates[replica]
        if candidate.costs.group is not group:
            candidate.costs.group.remove(replica)
            candidate.costs = group.add(replica)
            self._max_num_seqs[replica], candidate.max_num_seqs = MaxNumSeqs(), inf

    def remove(self, replica: str) -> None:
        """Remove a replica; requests that are still placed there can end, without effect on the cache map."""
        if (candidate := self.candidates.pop(replica, None)) is not None:
            candidate.slot = -1
            candidate.costs.group.remove(replica)
        self._used.pop(replica, None)
        self._max_num_seqs.pop(replica, None)
        self.transfers.forget(replica)
        self.pulls.forget(replica)
        self.ledger.remove(replica)
        self.lost(replica)

    def lost(self, replica: str) -> None:
        """Note that a replica's process has ended or restarted, so that its KV cache is lost."""
        self.transfers.restarted(replica)
        self.pulls.restarted(replica)
        if self._gone is not None:
            self._gone(replica)

    def targets(self, candidates: Sequence[Candidate]) -> Targets:
        """Return the targets for these candidates.

        They include arrays (`roster`) if there are at least MANY (16) candidates, all of one space (tokenizer, template
        and block size) and of one group of replicas that share learned costs.
        """
        alike = len(candidates) >= MANY and len({(one.space, one.costs.group) for one in candidates}) == 1
        return Targets(candidates, Roster(candidates, self.ledger, candidates[0].costs.group) if alike else None)

    def decay_idle_costs(self, now: float) -> None:
        """Move the learned speeds of replicas that are passed over towards the others', so that they are tried again.

        A replica is passed over if it got no request for 2 s (PASSED_OVER_SECONDS) while others of its cost group did.
        Call this a few times a second.
        """
        elapsed, self._decayed_at = max(0.0, min(now - self._decayed_at, 1.0)), now
        idle: dict[CostGroup, list[Costs]] = {}
        used: dict[CostGroup, list[Costs]] = {}
        for name, candidate in self.candidates.items():
            load = candidate.load
            chosen, since = self._used.get(name, (0.0, 0.0))
            if chosen != load.recent or load.requests:
                self._used[name], since = (load.recent, now), now
            (idle if now - since >= PASSED_OVER_SECONDS else used).setdefault(candidate.costs.group, []).append(
                candidate.costs
            )
        for group in idle.keys() & used.keys():
            group.decay_idle(idle[group], used[group], elapsed)

    # --- a request is placed

    def place(self, demand: Demand, targets: Targets, now: float) -> Placement:
        """Choose a replica for a request by the policy and place the request there; return the placement."""
        return self.commit(self.evaluate(demand, targets, now), now)

    def evaluate(
        self, demand: Demand, targets: Targets, now: float, explain: bool = False, peers: Collection[Candidate] = ()
    ) -> Evaluation:
        """Return the policy's choice of a replica for a request, without placing it there.

        Nothing is counted, so a repeated call returns the same choice.
        `explain`: the choice needs a reason and cost terms; `peers`: the replicas that may fetch the prompt from one
            another's memory.
        """
        demand.output, demand.residual = self.outputs.expected(demand)
        if demand.also is not None:
            demand.also.output, demand.also.residual = demand.output, demand.residual
        spaces = None if targets.space == demand.space else self.weigh_spaces(demand, targets, now)
        candidates = self.weighed(demand, targets, now) if spaces is None else targets.candidates
        offered = self._offer_pulls(demand, targets, peers, now) if peers and spaces is None else NO_PULLS
        choice = self.policy.choose(demand, candidates, explain)
        chosen = candidates[choice.index]
        return Evaluation(demand, candidates, choice, chosen.overlap, spaces, chosen.lower, offered, peers=peers)

    def _offer_pulls(
        self, demand: Demand, targets: Targets, peers: Collection[Candidate], now: float
    ) -> Mapping[str, Pull]:
        """Let candidates fetch parts of the prompt from one another's memory where that costs less than computing.

        Returns these pulls by the replica that fetches. Call this right after the candidates were weighed, that is,
        after what they hold of the prompt was set on them.
        """
        cost = legs.of_policy(self.policy)
        if cost is None or not demand.reads_cache or not len(demand.hashes):
            return NO_PULLS
        size, most = demand.block_size, hittable(demand.tokens, demand.block_size)
        held = self.map.leading(SHARED_TIER, demand.hashes)
        reach = {one.replica: min(held[one.slot], most) * size for one in peers if one.space == demand.space}
        given = pulls.offer(cost, demand, targets.roster or targets.candidates, reach, self.pulls, now)
        self._tiered += given
        if targets.roster is not None and given:
            targets.roster.tiered = True
        return {one.replica: one.pull for one in given if one.pull is not None}

    def offer_again(self, whole: Evaluation) -> None:
        """Restore the pull of the candidate that `whole` chose, after candidates were weighed again.

        A pull fetches a part of the prompt from another replica's memory. Weighing candidates removes their pulls.
        """
        best = whole.candidates[whole.choice.index]
        if best.replica in whole.pulls:
            best.lower, best.pull = whole.lower, whole.pulls[best.replica]
            self._tiered.append(best)

    def estimates(self, evaluation: Evaluation) -> list[Estimate]:
        """Return each candidate's predicted latency for the request; call this right after `evaluate`."""
        return [estimate(candidate, evaluation.demand) for candidate in evaluation.candidates]

    def commit(self, evaluation: Evaluation, now: float, decision: Decision | None = None) -> Placement:
        """Place a request on the replica that `evaluate` chose, and return the placement.

        Its load is counted, the cache map expects its blocks on that replica, and the policy is notified.
        `decision`: the choice of a ledger shared by all gateways, among the same candidates; it replaces the
            evaluation's choice.
        """
        demand, candidates, choice, overlap, spaces, lower, offered, *_ = evaluation
        placed, counted = demand, False
        if decision is not None:
            choice, overlap, lower = choice._replace(index=decision.index), decision.overlap, decision.lower
            self.ledger.others(decision.replica, decision.others)
            counted = decision.counted
        candidate = candidates[choice.index]
        if spaces is not None:
            placed, overlap, lower = in_space(candidate, spaces, demand, overlap if decision is not None else 0)
            counted = counted and placed is demand  # otherwise it was counted in the tokens of another space
        pull = self._what_is_pulled(offered.get(candidate.replica), candidate, lower, now) if offered else None
        uncached = placed.tokens - overlap
        if lower:
            uncached -= sum([tokens for _, tokens in lower])
        ttft = choice.ttft if decision is None and spaces is None else None
        reservation = self.ledger.reserve(
            candidate.replica,
            uncached,
            placed.tokens,
            counted,
            demand.now if demand.now != UNTIMED else None,
            demand.residual,
            due(candidate, placed, uncached, lower, pull, ttft),
        )
        beyond = 0 if placed.tokens % placed.block_size else self.beyond(candidate, placed, overlap, lower)
        placement = Placement(candidate, placed, overlap, reservation, now, lower, beyond, pull, ttft)
        try:
            self.expect(placement)
            if self.placed is not None:
                self.placed(demand, candidates, choice)
        except BaseException:  # the caller never gets the placement, so it could not release it
            self.ledger.release(reservation)
            raise
        return placement

    def beyond(self, candidate: Candidate, demand: Demand, overlap: int, lower: Lower) -> int:
        """Return how many tokens the engine reports as cached although it computes them; 0 for most prompts.

        The result is above 0 only for a prompt that ends exactly with a full block. A hit in the first tier never
        reaches a prompt's last token, so the last block is computed. But vLLM asks its connector for all blocks after
        the hit, even if the last block is in the first tier, and reports the last block as cached if a slower tier has
        it.
        `overlap`, `lower`: tokens that the engine is expected to find in its first tier and in slower ones.
        """
        size, hashes = demand.block_size, demand.hashes
        if not hashes or not demand.reads_cache or len(hashes) * size != demand.tokens or candidate.slot < 0:
            return 0
        if overlap + sum([tokens for tier, tokens in lower if tier != PEER]) != demand.tokens - size:
            return 0
        left_out = self.map.last_below(candidate.slot, hashes, overlap // size)
        return 0 if left_out is None else size - left_out

    def _what_is_pulled(self, pull: Pull | None, by: Candidate, lower: Lower, now: float) -> Pull | None:
        """Return the part of a pull that is still needed, and note that it begins; None if no part is needed.

        A pull fetches a part of the prompt from another replica's memory. The replica that fetches, `by`, may hold more
        of the prompt than was known when the pull was offered. `lower`: the prompt tokens that `by` takes from slower
        tiers and from the other replica.
        """
        tokens = sum([tokens for tier, tokens in lower if tier == PEER])
        if pull is None or not tokens:
            return None
        if tokens != pull.tokens:
            pull = Pull(pull.source, tokens, self.pulls.seconds(pull.source, by.replica, tokens, now))
        self.pulls.begin(pull.source, by.replica, now)
        return pull

    def expect(self, placement: Placement) -> None:
        """Note in the cache map that the placement's replica will hold the prompt's blocks."""
        candidate, demand = placement.candidate, placement.demand
        if demand.hashes and (candidate.rank_paths is None or demand.path in candidate.rank_paths):
            placement.expected = self.map.expect(candidate.slot, demand.hashes, placement.at)

    def ranking(self, demand: Demand, targets: Targets, now: float, most: int) -> list[str]:
        """Return up to `most` replicas for a request, in the order in which the policy would try them."""
        demand.output, demand.residual = self.outputs.expected(demand)
        spaces = None if targets.space == demand.space else self.weigh_spaces(demand, targets, now)
        left = [*(self.weighed(demand, targets, now) if spaces is None else targets.candidates)]
        order: list[str] = []
        while left and len(order) < most:
            order.append(left.pop(self.policy.choose(demand, left).index).replica)
        return order

    def weighed(self, demand: Demand, targets: Targets, now: float) -> Sequence[Candidate]:
        """Set on each candidate how much of the prompt its caches hold, and return the candidates.

        `overlap` is what the first tier holds, `lower` what slower tiers hold. Both are valid until the next `weighed`.
        """
        candidates, roster, size, hashes = targets.candidates, targets.roster, demand.block_size, demand.hashes
        most = (demand.tokens - 1) // size  # as `hittable` says
        match = self.map.match(hashes, now, most) if hashes and demand.reads_cache else None
        if roster is not None:
            roster.overlaps = (
                np.minimum(np.array(array("d", match.held))[targets.slots], most) * size if match else targets.nothing
            )
            roster.tiered = bool(match and match.lower)
        elif match:
            held = match.held
            for one in candidates:
                blocks = held[one.slot]
                one.overlap = (blocks if blocks < most else most) * size  # `min` takes four times as long
        else:
            for one in candidates:
                one.overlap = 0
        if self._tiered:
            self._forget_lower()
        if match and match.lower:
            for one in candidates:
                if runs := match.lower.get(one.slot):
                    one.lower = leading(runs, most - match.held[one.slot], size)
                    self._tiered.append(one)
        return candidates if roster is None else roster

    def _forget_lower(self) -> None:
        """Clear the `lower` and `pull` that were set on candidates for the last request."""
        for one in self._tiered:
            one.lower, one.pull = (), None
        self._tiered = []

    def weigh_spaces(self, demand: Demand, targets: Targets, now: float) -> Mapping[int, Held]:
        """Set on each candidate how much of the prompt its caches hold, if candidates are of several spaces.

        A space is one tokenizer, chat template and block size. What a candidate holds is looked up in the tokens of its
        own space and converted to those of `demand`, so that all candidates are compared by one measure. A candidate
        counts as holding nothing if the request was not prepared for its space. Returns by the number of each space the
        request as prepared for it, and how much of it each replica holds.
        """
        spaces = {one.space: self.held(one, now) for one in (demand, demand.also) if one is not None}
        self._forget_lower()
        for candidate in targets.candidates:
            own, overlap, lower = in_space(candidate, spaces, demand)
            if own is not demand and own.tokens != demand.tokens:
                ours, theirs = demand.tokens, max(1, own.tokens)
                overlap = max(0, min(overlap * ours // theirs, ours - 1))
                lower = leading([(tier, tokens * ours // theirs) for tier, tokens in lower], ours - 1 - overlap)
            candidate.overlap, candidate.lower = overlap, lower
            if lower:
                self._tiered.append(candidate)
        return spaces

    def held(self, demand: Demand, now: float) -> Held:
        """Return a request together with how many of its blocks each replica holds.

        Replicas go by their slots (indices in the cache map); blocks are those of the request's own tokens.
        """
        most = hittable(demand.tokens, demand.block_size)
        match = self.map.match(demand.hashes, now, most) if demand.hashes and demand.reads_cache else None
        return Held(demand, match)

    # --- its outcome

    def first_token(self, placement: Placement, now: float | None, seconds: float | None = None) -> None:
        """Note that a request's prefill is done; only the first call for a placement counts.

        `now`: when that was seen, None if unknown. `seconds`: measured from sending the request to its first token;
        None if costs should not be learned from it.
        """
        reservation = placement.reservation
        if reservation.stage != "prefill":
            return
        self.ledger.first_byte(reservation, now)
        if self._first is not None:
            self._first(reservation.replica, placement.demand)
        if seconds is not None and (pull := placement.pull) is not None:  # `pulled` learns from it
            placement.pull_took = seconds - (placement.punctual_ttft - pull.seconds)
        elif seconds is not None:
            placement.candidate.costs.observe_ttft(
                seconds, reservation.uncached, placement.cached, reservation.before, reservation.at, placement.lower
            )

    def came(self, placement: Placement, tokens: int) -> None:
        """Add further tokens of the request's answer to its replica's load."""
        self.ledger.came(placement.reservation, tokens)

    def answered(self, placement: Placement, now: float) -> None:
        """Note that the request's answer came in one piece, which says nothing about the time of its prefill."""
        self.ledger.answered(placement.reservation, now)

    def tells_end_alone(self, placement: Placement) -> None:
        """Expect a streamed answer only at its end, because the gateway will not see its first token.

        The time when the answer is due is moved by the seconds that the answer may take; an answer that is not streamed
        is due at its end anyway. Call this right after the request was placed.
        """
        taken, demand = placement.reservation, placement.demand
        if demand.streams:
            self.ledger.expect(taken, taken.due + answer_seconds(placement.candidate, demand))

    def disregard(self, placement: Placement) -> None:
        """Stop expecting the request's first byte, so that its replica does not count as late because of it.

        Called when the replica is known to work, so that the wait says nothing about other requests.
        """
        self.ledger.expect(placement.reservation, FAR)

    def drop_pull(self, placement: Placement) -> None:
        """Change a request that was just placed: its replica computes the tokens that it was to fetch from another."""
        kept, fetching = tuple([run for run in placement.lower if run[0] != PEER]), placement.fetch_seconds
        tokens = placement.fetched - sum([count for _, count in kept])
        placement.pull, placement.lower, placement.chosen_by = None, kept, None
        taken, costs = placement.reservation, placement.candidate.costs
        self.ledger.compute_more(taken, tokens)
        later = costs.prefill_seconds(tokens, placement.cached) + placement.fetch_seconds - fetching
        self.ledger.expect(taken, taken.due + later)

    def pulled(self, placement: Placement, cached: int, now: float) -> bool:
        """Learn from a pull (a fetch from another replica's memory), and return whether all of its tokens came.

        `cached`: how many prompt tokens the engine found cached, those of the pull included.
        """
        pull, replica = placement.pull, placement.candidate.replica
        assert pull is not None
        if cached >= placement.cached:
            self.pulls.came(pull.source, replica)
            if placement.pull_took is not None:
                self.pulls.observe(pull.source, replica, pull.tokens, placement.pull_took, now)
        elif cached <= placement.cached - pull.tokens:
            self.pulls.failed(pull.source, replica, now)
        return cached >= placement.cached

    def finish(
        self,
        placement: Placement,
        reported: int | None = None,
        per_token: float | None = None,
        output: int | None = None,
        answered_at: float | None = None,
    ) -> None:
        """End a placement whose answer is complete: take its load off the replica, and learn from it.

        `reported`: prompt tokens that the engine found in its cache; `per_token`: mean seconds from one token to the
            next (None for either: not known, or not to be learned from); `output`: tokens of the answer;
            `answered_at`: when the answer came in one piece, if neither `first_token` nor `answered` was called for it.
        """
        candidate, demand, reservation = placement.candidate, placement.demand, placement.reservation
        if per_token is not None and reservation.stage == "decode":
            load = reservation.load  # the load still includes this request
            candidate.costs.observe_itl(per_token, load.decoding, load.context_tokens)
        self._release(placement, answered_at)
        if output is not None:
            self.outputs.learn(demand, output)
        if reported is not None and demand.hashes and candidate.slot >= 0:
            size = demand.block_size
            self.map.learn(candidate.slot, demand.hashes, placement.cached // size, reported // size)

    def abandon(self, placement: Placement, computed: bool = True) -> None:
        """End a placement without a complete answer: take its load off the replica.

        `computed`: its prompt may have been computed. Otherwise the cache map no longer expects its blocks there.
        """
        self._release(placement)
        number = placement.expected
        if not computed and number is not None and placement.candidate.slot >= 0:
            placement.expected = None
            self.map.take_back(placement.candidate.slot, placement.demand.hashes, placement.overlap_blocks, number)

    def _release(self, placement: Placement, answered_at: float | None = None) -> None:
        reservation = placement.reservation
        if reservation.stage != "done":
            if answered_at is not None and reservation.stage == "prefill" and self._first is not None:
                self._first(reservation.replica, placement.demand)
            self.ledger.release(reservation, answered_at)
            if self._ended is not None:
                self._ended(reservation.replica, placement.demand)


def in_space(
    candidate: Candidate, spaces: Mapping[int, Held], demand: Demand, told: int = 0
) -> tuple[Demand, int, Lower]:
    """Return the request as prepared for a candidate's space, and how many of its tokens the candidate holds.

    The second result is the tokens in the candidate's first tier, the third those in slower tiers. `spaces`: by the
    number of each space (tokenizer, template and block size), the request and what replicas hold of it. If the request
    was not prepared for the candidate's space, nothing counts as held. `told`: how many tokens of `demand` the
    candidate is known to hold because other gateways sent them there.
    """
    held = spaces.get(candidate.space)
    if held is None:
        return replace(demand, hashes=(), root=0, also=None), 0, ()
    own, match = held
    if match is None:
        return own, 0, ()
    size, most = own.block_size, hittable(own.tokens, own.block_size)
    known = min(match.held[candidate.slot], most)
    blocks = max(known, min(told * own.tokens // max(1, demand.tokens) // size, most))
    runs = behind(match.lower.get(candidate.slot, ()), blocks - known)
    return own, blocks * size, leading(runs, most - blocks, size)
