"""A load ledger in Redis that all gateways of a deployment share: one step there chooses a replica and reserves load.

    shared = SharedLedger(RedisClients(parse(url)), "default", ledger, policy.cost)
    shared.start()
    shared.decide(evaluation, answer)     # answer(Decision) or answer(None)

The requests of one event-loop iteration are sent to Redis in one message. The message also has this gateway's present
load on each replica on which its load has changed since the last message. In Redis, one call of a script (`shared.lua`)
stores these changes and decides the requests one after the other. It returns the other gateways' load on the chosen
replicas, which is added to the loads that policies see. A heartbeat, sent every BEAT (0.25) seconds, returns the other
gateways' load on all replicas.

Redis stores each gateway's load under a token, a random name with a lease, and for each replica the sum over all
gateways. After an error or an expired lease it is not certain what arrived. A gateway then gives its token up, which
removes its load from the sums, and states all its outstanding load again under a new token. Load that Redis loses, or
that somebody damages, is repaired by heartbeats: each states all outstanding load of the gateway again, and compares
the sums with their parts.

No request waits for Redis beyond a deadline. A late request is placed by this gateway's own view of the load, and what
Redis reserved for it is undone. While Redis cannot be reached ("away"), all decisions are made here at once.

The script chooses by the same rule as this process: it computes the policy's own cost formula, but from all gateways'
load.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, count, repeat
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from cachemap.background import Background, Failures
from cachemap.cluster.connect import FAILURES, NONSENSE, RedisConnection, Script, describe, strange
from cachemap.cluster.keys import SCHEMA, scope
from policies import Candidate, Choice, Cost, Decision, Demand, Evaluation, Ledger, Lower, Roster, behind, hittable
from policies.ledger import FAR, NOTHING

if TYPE_CHECKING:
    from cachemap.cluster.connect import RedisClients

log = logging.getLogger("hitherto.proxy")

_SCRIPT = Path(__file__).with_name("shared.lua").read_text()
DEADLINE = 0.002  # seconds that a request may wait for the shared decision; it takes 0.3 ms on one machine
TICK = 0.0005  # seconds by which a timer may be early
TURNS = 3  # event-loop iterations that a reply gets after the deadline: the loop may have been busy when it came
LEASE = 3.0  # seconds after which the load of a gateway that sends nothing is removed from the sums
GATHER = 0.005  # seconds that changes of load wait to be sent with a decision: a message of their own costs as much
BEAT = 0.25  # seconds between heartbeats: how old the other gateways' load may be that policies see
PATIENCE = 1.0  # seconds to wait for Redis before it counts as away
MOST = 64  # candidates sent per request: the cheapest by this gateway's own view
MOST_TOGETHER = 32  # requests in one call of the script: that takes 2 ms at most, during which other gateways wait
MOST_UNSENT = 16_000  # bytes, per call and replica, of prefixes of prompts that the replica did not get after all
_HEADER = struct.Struct("<20d")
_LOAD = struct.Struct("<6d")
_STANDING = struct.Struct("<7d")
_ANSWER = struct.Struct("<8d")
_NO_STANDING = bytes(_STANDING.size)
_NO_COST = "local function cost() return 0 end"
# The lengths, in blocks, of the prompt prefixes that other gateways are told of: all up to 8, then four per octave.
_COUNTS = (1, 2, 3, *(part << octave for octave in range(20) for part in (4, 5, 6, 7)))
_COUNT = struct.Struct("<I")
_PACKED_COUNTS = b"".join(map(_COUNT.pack, _COUNTS))


# Callbacks for decisions. They return what sends the request, which is called once all requests whose decisions came in
# one message have theirs; None if there is nothing to send.
Send = Callable[[], object]
Answer = Callable[[Decision | None], Send | None]
AnswerBoth = Callable[[tuple[Decision, Decision] | None], Send | None]

HEARTBEAT, DECISIONS = "shared ledger: heartbeat", "shared ledger: decisions"  # kinds of background work
LOG_SECONDS = 10.0  # between two equal log lines


@dataclass(slots=True, eq=False)
class _Heartbeat:
    """A heartbeat that is to be sent or on its way.

    `done`: set once Redis has answered or the heartbeat is given up.
    `stated`: this gateway's outstanding load as sent, by the replicas' shared names.
    """

    done: asyncio.Event = field(default_factory=asyncio.Event)
    stated: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Pending:
    """A request for a decision that is to be sent or on its way.

    `answer`: the callback for the decision; None once it was called.
    `chosen`: the indices of the candidates that are sent, in the evaluation's candidates.
    `candidates`, `names`: these candidates and their shared names.
    `overlaps`, `lowers`: the prompt tokens that each has cached, in its first and in slower tiers.
    `packed`: for the script: the cached tokens, and the lengths and the hashes of the prompt's prefixes.
    """

    answer: Answer | None
    evaluation: Evaluation
    chosen: Sequence[int]
    candidates: Sequence[Candidate]
    names: Sequence[str]
    overlaps: list[int]
    lowers: list[Lower]
    packed: tuple[bytes, bytes, bytes]
    begun: float = field(default_factory=perf_counter)


class SharedLedger:
    """This gateway's part of the load ledger that all gateways share in Redis, from `start` to `stop`."""

    def __init__(
        self,
        ways: RedisClients,
        deployment: str,
        ledger: Ledger,
        cost: Cost | None = None,
        *,
        observe: Callable[[str, float], None] = lambda outcome, seconds: None,
        deadline: float = DEADLINE,
        background: Background | None = None,
    ):
        """Create this gateway's part, which joins the shared ledger after `start`.

        `ways`: the connections to Redis.
        `deployment`: the name of the deployment. All its keys are in one hash slot of Redis, so that one script can
            access them.
        `ledger`: this gateway's own load.
        `cost`: the policy's cost formula, by which the script chooses. None for a policy without one: then the script
            only counts the load of the policy's choice.
        `observe(outcome, seconds)`: called for each decision. The outcome is "shared" if Redis decided in time, "late"
            if it did not, and "away" if it could not be used.
        `deadline`: seconds that a decision may take.
        """
        self._deadline, self._cost = deadline, cost
        self.script = Script(f"local FAR = {FAR}\n{cost.lua() if cost is not None else _NO_COST}\n{_SCRIPT}")
        self._background = background or Background()
        self._background.failures.setdefault(DECISIONS, Failures())
        self._ways, self._ledger, self._observe = ways, ledger, observe
        self._key = f"hitherto:{SCHEMA}:{deployment}:{{pool}}:"
        self._line = RedisConnection(ways, self._key)
        self._token = self._former = ""
        self._scopes: dict[str, str] = {}
        self._queue: list[_Pending] = []
        self._open: deque[_Pending] = deque()  # the latest decisions, some of which may still wait
        self._watch: asyncio.TimerHandle | None = None  # runs when the first of `_open` is late
        self._changed: set[str] = set()  # replicas on which the load differs from what this gateway last stated
        self._replicas: dict[str, list[str]] = {}  # shared name -> ids of replicas
        self._unsent: dict[str, bytes] = {}  # shared name -> prefixes of prompts that were not sent there after all
        self._targets: tuple[Sequence[Candidate], list[str]] = (), []  # the latest candidates, and their shared names
        self._due: asyncio.TimerHandle | None = None  # will send changes of load for which no decision comes
        self._pump: asyncio.Task[None] | None = None
        self._beats: asyncio.Task[None] | None = None
        self._heartbeat: _Heartbeat | None = None  # sent with the next batch
        self._stopped = False
        self._logged_at = self._away_logged_at = float("-inf")
        self._log_when_joined = True
        self.joined = False
        # How many loads were repaired in Redis: parts that differed from this gateway's load, sums from their parts.
        self.repairs = {"part": 0, "sum": 0}
        self.reason = "not connected yet"
        ledger.moved = self._moved

    # --- decisions

    def decide(self, evaluation: Evaluation, answer: Answer) -> None:
        """Have Redis choose one of the candidates, by all gateways' load, and reserve the request's load on it.

        `answer`: called once, with the decision, or with None if Redis is away or late. The choice in the evaluation,
            made by this gateway's own view, then holds.
        """
        if not self.joined:
            self._answer_away(answer)
            return
        self._ask(evaluation, answer)

    def decide_legs(self, first: Evaluation, second: Evaluation, answer: AnswerBoth) -> None:
        """Have Redis choose the replica for a first leg (prefill) and reserve the load of both legs, in one message.

        `second`: the second leg (decode). Its one candidate will have the prompt's KV cache when this leg begins.
        `answer`: called once, with both decisions, or with None if either is missing. The choices in the evaluations,
            made by this gateway's own view, then hold.
        """
        if not self.joined:
            self._answer_away(answer)
            return
        known: dict[int, tuple[Evaluation, Decision | None]] = {}

        def decided(leg: int, evaluation: Evaluation, decision: Decision | None) -> Send | None:
            known[leg] = evaluation, decision
            if len(known) < 2:
                return None
            both = known[0][1], known[1][1]
            if both[0] is not None and both[1] is not None:
                return answer((both[0], both[1]))
            for evaluation, one in known.values():
                if one is not None:
                    self._take_back(evaluation, one)
            return answer(None)

        self._ask(first, partial(decided, 0, first))
        self._ask(second, partial(decided, 1, second), second.demand.tokens - 1)

    def _answer_away(self, answer: Answer | AnswerBoth) -> None:
        self._observe("away", 0.0)
        if (send := answer(None)) is not None:
            send()

    def _ask(self, evaluation: Evaluation, answer: Answer, held: int | None = None) -> None:
        """Queue a request for a decision, for the next message to Redis.

        `held`: the prompt tokens that each candidate will have cached; None: those that it has cached now.
        """
        demand, candidates, choice, *_ = evaluation
        chosen = self._among(choice, demand, candidates)
        if len(chosen) == len(candidates):
            among, chosen, names = candidates, range(len(candidates)), self._names_of(candidates)
        else:
            among = [candidates[i] for i in chosen]
            names = [self._name(one.replica) for one in among]
        overlaps = [one.overlap for one in among] if held is None else [held] * len(among)
        packed = self._held(among, overlaps, held is None), *self._prefixes(demand, overlaps)
        lowers = [one.lower if held is None else () for one in among]
        pending = _Pending(answer, evaluation, chosen, among, names, overlaps, lowers, packed)
        self._open.append(pending)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(self._deadline, self._look)
        self._queue.append(pending)
        self._start_pump()

    def _names_of(self, candidates: Sequence[Candidate]) -> list[str]:
        """Return the candidates' shared names, which are their names in Redis.

        If the candidates are the same object as in the last call, so is the list of names. Requests with the same list
        share its packed form in a message.
        """
        latest, names = self._targets
        if candidates is not latest:
            names = [self._name(one.replica) for one in candidates]
            self._targets = candidates, names
        return names

    def _among(self, choice: Choice, demand: Demand, candidates: Sequence[Candidate]) -> Sequence[int]:
        """Return the indices of the candidates among which Redis may choose.

        There is only one, the policy's choice, if the policy does not minimise a cost. Otherwise they are those that
        the policy allows, at most the `MOST` (64) cheapest. They belong to one cost group (replicas that share learned
        costs), because the script gets the coefficients of one group alone.
        """
        among = choice.among
        if self._cost is None or among is None:
            return (choice.index,)
        if type(candidates) is not Roster:
            group = candidates[choice.index].costs.group
            among = [index for index in among if candidates[index].costs.group is group]
        if len(among) <= MOST:
            return among
        totals = [sum(terms) for terms in self._cost.of_all(demand, candidates, choice.future, choice.after)]
        return sorted(among, key=totals.__getitem__)[:MOST]

    def _held(self, candidates: Sequence[Candidate], overlaps: Sequence[int], tiers: bool) -> bytes:
        """Return how many prompt tokens each candidate has cached, packed as doubles for the script.

        These are the tokens in its first tier, GPU memory (`overlaps`). If any candidate has more in slower tiers, two
        more numbers of each candidate follow: the tokens in its slower tiers, and what these count in the cost
        (`Cost.held`).

        `tiers`: False to leave out slower tiers.
        """
        if self._cost is None or not tiers or not any(one.lower for one in candidates):
            return struct.pack(f"<{len(overlaps)}d", *overlaps)
        return struct.pack(f"<{3 * len(overlaps)}d", *chain(*zip(*map(self._cost.held, candidates), strict=True)))

    def _prefixes(self, demand: Demand, overlaps: Sequence[int]) -> tuple[bytes, bytes]:
        """Return some prefixes of the prompt, as packed lengths (in blocks) and packed hashes of their last blocks.

        From these other gateways learn which replica gets the prompt and will have it cached. Prefixes that every
        candidate has cached already are left out.
        """
        hashes = demand.hashes if demand.reads_cache else ()
        blocks = len(hashes)
        if not blocks:
            return b"", b""
        least = min(overlaps) // demand.block_size
        first, end = bisect_right(_COUNTS, least), bisect_right(_COUNTS, blocks)
        lengths, (last, _, *chosen) = _PACKED_COUNTS[4 * first : 4 * end], _ends_of_prefixes(first, end)(hashes)
        if blocks > least and blocks != _COUNTS[end - 1]:
            lengths += _COUNT.pack(blocks)
            chosen.append(last)
        return lengths, struct.pack(f"<{len(chosen)}Q", *chosen)

    def _name(self, replica: str) -> str:
        """Return a replica's shared name: the one that it has in Redis, the same for all gateways."""
        name = self._scopes.get(replica)
        if name is None:
            name = self._scopes[replica] = scope(replica)
            self._replicas.setdefault(name, []).append(replica)
        return name

    def _look(self) -> None:
        """Find the decisions that Redis has not returned within the deadline.

        They are given up if they do not come within 3 (`TURNS`) more event-loop iterations.
        """
        self._watch, overdue, decisions = None, [], self._open
        loop, since = asyncio.get_running_loop(), perf_counter() - self._deadline
        while decisions and (decisions[0].answer is None or decisions[0].begun <= since + TICK):
            if (pending := decisions.popleft()).answer is not None:
                overdue.append(pending)
        if decisions:
            self._watch = loop.call_later(decisions[0].begun - since, self._look)
        if overdue:
            loop.call_soon(self._too_late, overdue)

    def _too_late(self, overdue: list[_Pending], turns: int = TURNS - 1) -> None:
        """Give up the overdue decisions that do not come within `turns` more event-loop iterations.

        Their requests are placed by the choice that was made here.
        """
        overdue = [pending for pending in overdue if pending.answer is not None]
        if overdue and turns:
            asyncio.get_running_loop().call_soon(self._too_late, overdue, turns - 1)
            return
        self._answer([(pending, "late", None) for pending in overdue])

    def _decided(self, batch: Sequence[_Pending], decisions: Sequence[Decision]) -> None:
        """Pass the decisions of Redis to the callbacks of a batch, in order.

        If the token had expired or the script failed, there are fewer decisions than requests, and the other requests
        get None. A decision is undone if its request went on without it.
        """
        found: list[tuple[_Pending, str, Decision | None]] = []
        for pending, decision in zip(batch, chain(decisions, repeat(None))):
            if pending.answer is not None:
                found.append((pending, "away" if decision is None else "shared", decision))
            elif decision is not None:
                self._take_back(pending.evaluation, decision)
        self._answer(found)

    def _answer(self, found: Iterable[tuple[_Pending, str, Decision | None]]) -> None:
        """Call the callbacks of requests whose decisions came in one message, then send all of the requests.

        No callback is called twice, and an exception in one does not affect other requests.

        `found`: the requests, with the outcome for metrics ("shared", "late" or "away") and what their callbacks get.
        """
        sends: list[Send | None] = []
        for pending, outcome, decision in found:
            answer, pending.answer = pending.answer, None
            if answer is None:
                continue
            self._observe(outcome, perf_counter() - pending.begun)
            try:
                sends.append(answer(decision))
            except Exception as error:
                self._background.failed(DECISIONS, error)
        for send in sends:
            if send is not None:
                send()

    def _take_back(self, evaluation: Evaluation, decision: Decision) -> None:
        """Undo a decision of Redis that is not used, since its request went by the choice that was made here.

        Redis has a note for other gateways that the replica will have the prompt cached. If both choices are the same
        replica, this note is kept.
        """
        went_there = decision.index == evaluation.choice.index
        self.undo(decision._replace(note=b"") if went_there else decision)

    def undo(self, decision: Decision) -> None:
        """Have the next message undo a reservation of load in Redis, since the request went elsewhere or has ended.

        The message also removes the note that tells other gateways that the replica will have the prompt cached.
        """
        name = self._name(decision.replica)
        if decision.note and len(self._unsent.get(name, b"")) < MOST_UNSENT:
            self._unsent[name] = self._unsent.get(name, b"") + decision.note
        if decision.counted:
            self._moved(decision.replica)

    # --- messages to Redis

    def _moved(self, replica: str) -> None:
        """Note that this gateway's load on a replica has changed, for the next message; the ledger calls this."""
        self._changed.add(replica)
        if self._due is None and self.joined:
            self._due = asyncio.get_running_loop().call_later(GATHER, self._start_pump)

    def _start_pump(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        """Send all waiting requests and changes of load in one message, then those that have come meanwhile."""
        while self.joined and (self._queue or self._heartbeat or (self._changed and self._due is None)):
            batch, self._queue = self._queue, []
            heartbeat, self._heartbeat = self._heartbeat, None
            token = self._token
            decisions: list[Decision] = []
            try:
                alive, beaten, decisions = await self._send(token, heartbeat, batch)
                if token == self._token and not alive:
                    self._lost("its lease ran out")
                elif token == self._token and heartbeat is not None:
                    self._compared(*beaten)
            except FAILURES as error:
                if token == self._token:
                    self._lost(describe(error))
            except Exception as error:
                self._background.failed(DECISIONS, error)
                if token == self._token:
                    self._lost(f"{type(error).__name__}: {error}")
            finally:
                if batch:
                    self._decided(batch, decisions)
                if heartbeat is not None:
                    heartbeat.done.set()

    async def _send(
        self, token: str, heartbeat: _Heartbeat | None, batch: list[_Pending]
    ) -> tuple[bool, tuple[dict[str, tuple[int, ...]], int, int], list[Decision]]:
        """Send one message; return whether the token's lease is alive, the heartbeat's reply, and the decisions.

        Raises what the script or the connection raised. No other message with this token is under way, so once this one
        is processed, Redis has this gateway's load as it is now.
        """
        begin = ("EVALSHA", self.script.sha, 1, self._key)
        changed, self._changed = self._changed, set()
        unsent, self._unsent = self._unsent, {}
        commands: list[tuple[Any, ...]] = [(*begin, "unsent", token, *one) for one in unsent.items()]
        if heartbeat is not None or not batch:
            commands.append((*begin, "turn", token, *self._turn(changed, ())))
            changed = set()
        if heartbeat is not None:
            heartbeat.stated = self._stated()
            loads = b"".join([_LOAD.pack(*counts) for counts in heartbeat.stated.values()])
            commands.append((*begin, "beat", token, int(LEASE * 1000), "\n".join(heartbeat.stated), loads))
        for at in range(0, len(batch), MOST_TOGETHER):
            commands.append(
                (*begin, "turn", token, *self._turn(changed if at == 0 else (), batch[at : at + MOST_TOGETHER]))
            )
        async with asyncio.timeout(PATIENCE):
            replies = (await self._line.ask(commands))[len(unsent) :]
        try:
            alive, beaten = 0 not in replies, _NOTHING_BEATEN
            if heartbeat is not None:
                beat = replies.pop(1)
                beaten = _beaten(heartbeat.stated, beat) if alive else beaten
            answers = b"".join([reply for reply in replies if reply != 0])
            counted = token == self._token
            decisions = [_decision(*pair, counted) for pair in zip(batch, _ANSWER.iter_unpack(answers))]
        except NONSENSE as error:
            raise strange("shared.lua", error) from error
        return alive, beaten, decisions

    def _turn(self, changed: Collection[str], batch: Sequence[_Pending]) -> list[Any]:
        """Return the arguments of the script's operation `turn`, which stores changes of load and decides requests.

        They follow the gateway's token. `changed`: ids of replicas on which this gateway's load has changed. `batch`:
        the requests to decide.
        """
        replicas: dict[str, Candidate | None] = dict.fromkeys(map(self._name, changed))
        stated = b"".join([_LOAD.pack(*self._own(name)) for name in replicas])
        alike = {id(pending.names): pending for pending in batch}  # one for each list of candidates
        for pending in alike.values():
            replicas.update(zip(pending.names, pending.candidates))
        standing = b"".join([_standing(one) if one is not None else _NO_STANDING for one in replicas.values()])
        positions = dict(zip(replicas, count()))
        packed = {
            key: struct.pack(f"<{len(one.names)}H", *map(positions.__getitem__, one.names))
            for key, one in alike.items()
        }
        requests: list[bytes] = []
        for pending in batch:
            held, lengths, hashes = pending.packed
            requests += self._header(pending.evaluation), packed[id(pending.names)], held, lengths, hashes
        return ["\n".join(replicas), stated, standing, *requests]

    def _header(self, evaluation: Evaluation) -> bytes:
        demand, candidates, choice, *_ = evaluation
        slack = self._cost.slack if self._cost is not None else (1.0, 0.0)
        size = demand.block_size
        return _HEADER.pack(
            demand.draw,
            *slack,
            size,
            hittable(demand.tokens, size),
            *Cost.request(demand, candidates[choice.index].costs.group, choice.future, choice.after),
        )

    def _own(self, name: str) -> tuple[int, ...]:
        """Return this gateway's load on the replicas with one shared name, the name that a replica has in Redis."""
        replicas = self._replicas[name]
        if len(replicas) == 1:
            return self._ledger.outstanding_on(replicas[0])
        return tuple(map(sum, zip(*map(self._ledger.outstanding_on, replicas))))

    def _stated(self) -> dict[str, tuple[int, ...]]:
        """Return all outstanding load of this gateway, by the names that the replicas have in Redis."""
        found: dict[str, tuple[int, ...]] = {}
        for replica, counts in self._ledger.outstanding().items():
            name = self._name(replica)
            found[name] = tuple(map(sum, zip(found[name], counts))) if name in found else counts
        return found

    def _compared(self, others: dict[str, tuple[int, ...]], parts: int, sums: int) -> None:
        """Process a heartbeat's reply: store the other gateways' load in the ledger, and count and log repairs.

        `others`: their load by the replicas' shared names.
        `parts`, `sums`: how many loads of this gateway, and how many sums, were repaired in Redis.
        """
        for replica in self._ledger.outstanding():
            if (counts := others.get(self._name(replica))) is not None:
                self._ledger.others(replica, counts)
        self.repairs["part"] += parts
        self.repairs["sum"] += sums
        now = asyncio.get_running_loop().time()
        if (parts or sums) and now - self._logged_at > LOG_SECONDS:
            self._logged_at = now
            log.warning(
                "the ledger in Redis was lost or damaged and is mended: %d loads of this gateway, %d sums", parts, sums
            )

    # --- the token

    def start(self) -> None:
        """Join the shared ledger as soon as Redis answers, then renew the lease by heartbeats until `stop`."""
        self._beats = self._background.spawn(
            HEARTBEAT, self._keep, on_failure=lambda: self._lost("its heartbeat failed")
        )

    async def stop(self) -> None:
        """Remove this gateway's load from the sums and close the connections, even if Redis does not answer."""
        self._stopped = True
        if self._beats is not None:
            self._beats.cancel()
        was_joined, self.joined = self.joined, False
        if was_joined:
            with contextlib.suppress(*FAILURES):
                async with asyncio.timeout(PATIENCE):
                    await self._run("leave", self._token)
        for task in (self._beats, self._pump):  # they might open a connection to Redis again
            while task is not None and not task.done():
                task.cancel()
                await asyncio.wait((task,), timeout=PATIENCE)
        await self._ways.aclose()

    async def _keep(self) -> None:
        """Join the shared ledger, then send a heartbeat every `BEAT` (0.25) seconds; join again after a failure."""
        while not self._stopped:  # asked here, because waits in redis-py may swallow a cancellation on Python 3.11
            try:
                async with asyncio.timeout(2 * PATIENCE):
                    await (self._beat() if self.joined else self._join())
            except FAILURES as error:
                self._ways.failed()
                self._lost(describe(error))
            await asyncio.sleep(BEAT)

    async def _join(self) -> None:
        """Join the shared ledger under a new token (a random name with a lease), and state all outstanding load."""
        token = os.urandom(8).hex()
        # Changes from here on wait until Redis has accepted the token; earlier ones are contained in `_stated`.
        self._changed = set()
        self._former, self._token = self._token or self._former, token
        stated = {name: counts for name, counts in self._stated().items() if any(counts)}
        loads = b"".join([_LOAD.pack(*counts) for counts in stated.values()])
        if await self._run("join", token, int(LEASE * 1000), self._former, "\n".join(stated), loads) != 1:
            raise strange("shared.lua")
        if self._token == token:
            self.joined, self.reason = True, "joined"
            self._ledger.share(True)
            if self._log_when_joined:
                self._log_when_joined = False
                log.info("the shared ledger in Redis is joined")
            self._start_pump()

    async def _beat(self) -> None:
        """Send a heartbeat with the next message to Redis, and wait until it is answered or given up.

        One task sends all messages, so that no message overlaps another.
        """
        heartbeat = self._heartbeat = _Heartbeat()
        self._start_pump()
        await heartbeat.done.wait()

    async def _run(self, *arguments: Any) -> Any:
        return await self.script(await self._ways.to(self._key), [self._key], list(arguments))

    def _lost(self, why: str) -> None:
        """Give up the token under which Redis has this gateway's load, and answer the waiting requests with None.

        Until the gateway has joined under a new token, the others' load is unknown, and all decisions are made here.

        `why`: the reason, for the log.
        """
        now = asyncio.get_running_loop().time()
        if now - self._away_logged_at > LOG_SECONDS and (self.joined or why != self.reason):
            self._away_logged_at, self._log_when_joined = now, True
            log.warning("the shared ledger is away, replicas are chosen by this gateway's own view: %s", why)
        self.joined, self.reason = False, why
        self._ledger.share(False)
        queue, self._queue = self._queue, []
        if self._heartbeat is not None:
            heartbeat, self._heartbeat = self._heartbeat, None
            heartbeat.done.set()
        self._decided(queue, ())
        for replica in self._ledger.outstanding():
            self._ledger.others(replica, NOTHING)


@lru_cache(1024)
def _ends_of_prefixes(first: int, end: int) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return a function that picks the hashes of some prefixes from a prompt's block hashes.

    It returns the last hash twice, then the hash at the end of each prefix. Their lengths in blocks are
    `_COUNTS[first:end]`. (Because of the last hash the result is a tuple even for no prefix.)
    """
    return itemgetter(-1, -1, *[count - 1 for count in _COUNTS[first:end]])


def _standing(candidate: Candidate) -> bytes:
    """Pack a candidate's load and learned speeds for the Redis script, which computes the cost from them."""
    load, costs = candidate.load, candidate.costs
    return _STANDING.pack(
        costs.ttft.value, costs.step.value, load.waiting, load.kv_usage, load.capacity_tokens, load.recent, load.due
    )


def _decision(pending: _Pending, reply: Sequence[float], counted: bool) -> Decision:
    """Return the decision in a reply of Redis.

    `reply`: the position of the chosen candidate among those sent, its cached tokens, and the other gateways' load.
    `counted`: whether the load reserved in Redis is still part of its sums.
    """
    at, held, *others = map(int, reply)
    known = pending.overlaps[at]
    overlap = max(known, held)
    return Decision(
        pending.chosen[at],
        pending.candidates[at].replica,
        overlap,
        tuple(others),
        counted,
        behind(pending.lowers[at], overlap - known),
        pending.packed[2],
    )


_NOTHING_BEATEN: tuple[dict[str, tuple[int, ...]], int, int] = {}, 0, 0


def _beaten(stated: dict[str, tuple[int, ...]], reply: Any) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Return what the reply to a heartbeat says: other gateways' load by shared name, and the repaired parts and sums.

    `stated`: this gateway's load as sent, which is subtracted from the sums in the reply.
    """
    loads, parts, sums = reply
    others = {
        name: tuple(max(0, int(all_of - own)) for all_of, own in zip(_LOAD.unpack(load), mine))
        for (name, mine), load in zip(stated.items(), loads, strict=True)
    }
    return others, int(parts), int(sums)
