"""One ledger for all gateways of a deployment, in Redis: choose and reserve in one step there.

    shared = SharedLedger(Ways(parse(url)), "default", ledger, policy.cost)
    shared.start()
    shared.decide(choice, demand, candidates, hashes, answer)     # answer(Decision) or answer(None)

What a gateway counts (`Ledger.moved`) goes there in batches; what others have comes back with decisions and
heartbeats and is added to the loads that policies see. All changes are sums under the gateway's token. Whenever
it is not certain what arrived (an error, a lease that ran out), the token is given up, which takes everything
under it out of the sums, and all that is outstanding is counted anew under another one. What Redis itself loses or
somebody damages is mended by heartbeats: each restates all that the gateway has outstanding and compares sums with
their parts.

Nothing waits for Redis: a decision that takes longer than its deadline is made by the local view and what Redis
reserved for it is taken back; while Redis is away all decisions are local at once.

The rule there is the rule here: the script computes the policy's own statement of its cost, from the load of all gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from cachemap.background import Background, Failures
from cachemap.cluster.connect import FAILURES, Line, Script, describe
from cachemap.cluster.keys import SCHEMA, scope
from policies import Asked, Candidate, Choice, Cost, Decision, Demand, Ledger, hittable
from policies.ledger import NOTHING
from policies.load import FAR

if TYPE_CHECKING:
    from cachemap.cluster.connect import Ways

log = logging.getLogger("hitherto.dispatch")

_SCRIPT = Path(__file__).with_name("shared.lua").read_text()
DEADLINE = 0.002  # seconds a request may wait for the shared decision; it takes 0.3 ms on one machine
TURNS = 3  # of this process's event loop, after that: it may have been busy with something else while the reply came
LEASE = 3.0  # seconds after which a gateway that is silent is taken out of the sums
GATHER = 0.005  # seconds that changes wait for a decision to go along with; a message of their own costs as much as one
BEAT = 0.25  # seconds between heartbeats: how old the view of other gateways' load may be
PATIENCE = 1.0  # seconds to wait for Redis before it counts as away
MOST = 64  # candidates that are handed over: those cheapest by the local view
_HEADER = struct.Struct("<15d")
_LOAD = struct.Struct("<5d")
_CANDIDATE = struct.Struct("<9d")
_NO_COST = "local function cost() return 0 end"
# Numbers of blocks at which a prompt's prefix is made known to other gateways: all up to 8, then four an octave.
_COUNTS = (1, 2, 3, *(part << octave for octave in range(20) for part in (4, 5, 6, 7)))


Answer = Callable[[Decision | None], None]

HEARTBEAT, DECISIONS = "shared ledger: heartbeat", "shared ledger: decisions"  # kinds of background work
LOG_SECONDS = 10.0  # between two lines that say the same


class _Heartbeat:
    """One on its way. `stated` is what this gateway has outstanding, by the name that all gateways have for a replica."""

    __slots__ = ("done", "stated")

    def __init__(self) -> None:
        self.stated: dict[str, tuple[int, ...]] = {}
        self.done = asyncio.Event()


class _Pending:
    """A decision on its way. `answer` is None once the request has gone on without it."""

    __slots__ = ("answer", "arguments", "begun", "chosen", "overlaps", "replicas", "tokens")

    def __init__(self, answer: Answer, tokens: int, chosen: list[int], replicas: list[str], overlaps: list[int], arguments: list[Any]):
        self.answer: Answer | None = answer
        self.tokens, self.chosen, self.replicas, self.overlaps, self.arguments = tokens, chosen, replicas, overlaps, arguments
        self.begun = perf_counter()


class SharedLedger:
    """This gateway's part in it, from `start` to `stop`. `observe(outcome, seconds)` hears of each decision:
    shared, late or away. All keys of a deployment lie in one slot, so that one script can see them."""

    def __init__(
        self,
        ways: Ways,
        deployment: str,
        ledger: Ledger,
        cost: Cost | None = None,
        *,
        observe: Callable[[str, float], None] = lambda outcome, seconds: None,
        deadline: float = DEADLINE,
        background: Background | None = None,
    ):
        self._deadline, self._cost = deadline, cost
        self.script = Script(f"local FAR = {FAR}\n{cost.lua() if cost is not None else _NO_COST}\n{_SCRIPT}")
        self._background = background or Background()
        self._background.failures.setdefault(DECISIONS, Failures())
        self._ways, self._ledger, self._observe = ways, ledger, observe
        self._key = f"hitherto:{SCHEMA}:{deployment}:{{pool}}:"
        self._line = Line(ways, self._key)
        self._token = self._former = ""
        self._scopes: dict[str, str] = {}
        self._queue: list[_Pending] = []
        self._changes: dict[str, list[int]] = {}
        self._due: asyncio.TimerHandle | None = None  # when changes go by themselves
        self._pump: asyncio.Task[None] | None = None
        self._beats: asyncio.Task[None] | None = None
        self._heartbeat: _Heartbeat | None = None  # to go with the next batch
        self._stopped = False
        self._logged_at = self._away_logged_at = float("-inf")
        self._log_when_joined = True
        self.joined = False
        self.repairs = {"part": 0, "sum": 0}  # loads in Redis that were not what this gateway has there, or what their parts add up to
        self.reason = "not connected yet"
        ledger.moved = self._moved

    # --- decisions

    def decide(self, asked: Asked, answer: Answer) -> None:
        """Choose one of the candidates and count the request there. `answer` is called once: with None, the choice that was made
        by the loads known here stands."""
        if not self.joined:
            self._observe("away", 0.0)
            answer(None)
            return
        demand, candidates, choice, *_ = asked
        hashes = demand.hashes if demand.reads_cache else ()
        chosen = self._among(choice, demand, candidates)
        cost, tokens, replicas = self._cost, demand.tokens, [candidates[i].replica for i in chosen]
        slack = cost.slack if cost is not None else (1.0, 0.0)
        arguments = [
            _HEADER.pack(demand.draw, *slack, *Cost.request(demand, candidates[0].costs.group, choice.future)),
            b"".join([self._packed_candidate(candidates[i]) for i in chosen]),
            *self._depths(demand, candidates, hashes),
            self._names(replicas),
        ]
        overlaps = [candidates[i].overlap for i in chosen]
        pending = _Pending(answer, tokens, chosen, replicas, overlaps, arguments)
        asyncio.get_running_loop().call_later(self._deadline, self._too_late, pending)
        self._queue.append(pending)
        self._start_pump()

    def _among(self, choice: Choice, demand: Demand, candidates: Sequence[Candidate]) -> Sequence[int]:
        """Who is to be decided among, as indices. A choice that is not the least of a cost is made here, and counted there."""
        if self._cost is None or choice.among is None:
            return [choice.index]
        if len(choice.among) <= MOST:
            return choice.among
        totals = [sum(terms) for terms in self._cost.of_all(demand, candidates, choice.future)]
        return sorted(choice.among, key=totals.__getitem__)[:MOST]

    def _packed_candidate(self, candidate: Candidate) -> bytes:
        load, costs = candidate.load, candidate.costs
        held = self._cost.held(candidate) if self._cost is not None else (candidate.overlap, 0, 0.0)
        return _CANDIDATE.pack(*held, costs.ttft.value, costs.step.value, load.waiting, load.kv_usage, load.capacity_tokens, load.recent)

    def _depths(self, demand: Demand, candidates: Sequence[Candidate], hashes: Sequence[int]) -> tuple[bytes, bytes]:
        """Prefixes of the prompt by which gateways tell each other where it went: their tokens and hashes, packed. What every
        candidate holds anyway is left out."""
        blocks = len(hashes)
        if not blocks:
            return b"", b""
        size = demand.block_size
        least = min(candidate.overlap for candidate in candidates) // size
        counts = [*_COUNTS[bisect_right(_COUNTS, least) : bisect_right(_COUNTS, blocks)]]
        if blocks not in counts[-1:] and blocks > least:
            counts.append(blocks)
        most = hittable(demand.tokens, size)
        held = [min(count, most) * size for count in counts]
        return struct.pack(f"<{len(held)}d", *held), struct.pack(f"<{len(counts)}Q", *[hashes[count - 1] for count in counts])

    def _name(self, replica: str) -> str:
        """As all gateways call it."""
        name = self._scopes.get(replica)
        if name is None:
            name = self._scopes[replica] = scope(replica)
        return name

    def _names(self, replicas: Sequence[str]) -> str:
        """On a line each."""
        return "\n".join([self._name(replica) for replica in replicas])

    def _too_late(self, pending: _Pending, turns: int = TURNS) -> None:
        if pending.answer is not None and turns:
            asyncio.get_running_loop().call_soon(self._too_late, pending, turns - 1)
        elif pending.answer is not None:
            answer, pending.answer = pending.answer, None
            self._observe("late", perf_counter() - pending.begun)
            answer(None)

    def _decided(self, pending: _Pending, token: str, reply: Any) -> None:
        """Redis has answered, or (no list) the token is dead or the script failed. Whatever is amiss with the reply or with
        what is done about it is this request's alone, and it is answered."""
        try:
            decision = _decision(pending, reply, token == self._token)
            if pending.answer is None:
                if decision is not None:
                    self.undo(decision)
                return
            self._observe("away" if decision is None else "shared", perf_counter() - pending.begun)
            answer, pending.answer = pending.answer, None
            answer(decision)
        except Exception as error:
            self._background.failed(DECISIONS, error)
            answer, pending.answer = pending.answer, None
            if answer is not None:
                answer(None)

    def undo(self, decision: Decision) -> None:
        """Take back what was reserved: the request went elsewhere, or away."""
        if decision.counted:
            self._moved(decision.replica, (-1, -1, -decision.uncached, 0, 0))

    # --- what goes there

    def _moved(self, replica: str, change: Sequence[int]) -> None:
        """`Ledger.moved`: sums of changes wait here until they are sent."""
        sums = self._changes.get(replica)
        if sums is None:
            self._changes[replica] = list(change)
        else:
            for i, count in enumerate(change):
                sums[i] += count
        if self.joined and self._due is None:
            self._due = asyncio.get_running_loop().call_later(GATHER, self._start_pump)

    def _start_pump(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        """Whatever waits goes out together; decisions that come meanwhile, and the changes by then, go next."""
        while self.joined and (self._queue or self._heartbeat or (self._changes and self._due is None)):
            batch, self._queue = self._queue, []
            heartbeat, self._heartbeat = self._heartbeat, None
            token, decisions = self._token, []
            try:
                moved, beaten, *decisions = await self._send(token, heartbeat, batch)
                if token == self._token and 0 in (moved, beaten):
                    self._lost("its lease ran out")
                elif token == self._token and heartbeat is not None:
                    self._compared(heartbeat.stated, beaten)
            except FAILURES as error:
                if token == self._token:
                    self._lost(describe(error))
            except Exception as error:
                self._background.failed(DECISIONS, error)
                if token == self._token:
                    self._lost(f"{type(error).__name__}: {error}")
            finally:
                for pending, reply in zip_longest(batch, decisions):
                    self._decided(pending, token, reply)
                if heartbeat is not None:
                    heartbeat.done.set()

    async def _send(self, token: str, heartbeat: _Heartbeat | None, batch: list[_Pending]) -> list[Any]:
        """Replies to the changes, to the heartbeat (None without one), and to each decision; raises what the script or the
        connection raised. Nothing else is under way under this token, so what is outstanding now is what Redis must
        have once the changes are counted."""
        begin = ("EVALSHA", self.script.sha, 1, self._key)
        changes, self._changes = self._changes, {}
        commands: list[tuple] = [(*begin, "move", token, *self._packed(changes))]
        if heartbeat is not None:
            heartbeat.stated = self._stated()
            loads = b"".join([_LOAD.pack(*counts) for counts in heartbeat.stated.values()])
            commands.append((*begin, "beat", token, int(LEASE * 1000), "\n".join(heartbeat.stated), loads))
        commands += [(*begin, "decide", token, *pending.arguments) for pending in batch]
        async with asyncio.timeout(PATIENCE):
            replies = await self._line.ask(commands)
        return replies if heartbeat is not None else [replies[0], None, *replies[1:]]

    def _stated(self) -> dict[str, tuple[int, ...]]:
        """All that this gateway has outstanding, by the names that all gateways have for replicas."""
        found: dict[str, tuple[int, ...]] = {}
        for replica, counts in self._ledger.outstanding().items():
            name = self._name(replica)
            found[name] = tuple(map(sum, zip(found[name], counts))) if name in found else counts
        return found

    def _compared(self, stated: dict[str, tuple[int, ...]], reply: Any) -> None:
        """A heartbeat's answer: the loads of all on each of the replicas, and what had to be mended."""
        loads, parts, sums = reply
        others = {name: _less(load, mine) for (name, mine), load in zip(stated.items(), loads, strict=True)}
        for replica in self._ledger.outstanding():
            if (counts := others.get(self._name(replica))) is not None:
                self._ledger.others(replica, counts)
        self.repairs["part"] += parts
        self.repairs["sum"] += sums
        now = asyncio.get_running_loop().time()
        if (parts or sums) and now - self._logged_at > LOG_SECONDS:
            self._logged_at = now
            log.warning("the ledger in Redis was lost or damaged and is mended: %d loads of this gateway, %d sums", parts, sums)

    def _packed(self, loads: dict[str, Sequence[int]]) -> tuple[str, bytes]:
        found = [(replica, counts) for replica, counts in loads.items() if any(counts)]
        return self._names([replica for replica, _ in found]), b"".join([_LOAD.pack(*counts) for _, counts in found])

    # --- the token

    def start(self) -> None:
        """Join as soon as Redis answers, and renew the lease."""
        self._beats = self._background.spawn(HEARTBEAT, self._keep, on_failure=lambda: self._lost("its heartbeat failed"))

    async def stop(self) -> None:
        """Take this gateway's load out of the sums, and close the connections."""
        self._stopped = True
        if self._beats is not None:
            self._beats.cancel()
        was_joined, self.joined = self.joined, False
        with contextlib.suppress(*FAILURES):
            async with asyncio.timeout(PATIENCE):
                if was_joined:
                    await self._run("leave", self._token)
                await self._ways.aclose()

    async def _keep(self) -> None:
        while not self._stopped:  # redis-py's waits may swallow a cancellation on Python 3.11
            try:
                async with asyncio.timeout(2 * PATIENCE):
                    await (self._beat() if self.joined else self._join())
            except FAILURES as error:
                self._lost(describe(error))
            await asyncio.sleep(BEAT)

    async def _join(self) -> None:
        """A new token, and all that is outstanding under it."""
        token = os.urandom(8).hex()
        # From here on changes wait until the token is known to be alive; those before are in `outstanding`.
        self._changes = {}
        self._former, self._token = self._token or self._former, token
        outstanding = self._packed(self._ledger.outstanding())
        await self._run("join", token, int(LEASE * 1000), self._former, *outstanding)
        if self._token == token:
            self.joined, self.reason = True, "joined"
            if self._log_when_joined:
                self._log_when_joined = False
                log.info("the shared ledger in Redis is joined")
            self._start_pump()

    async def _beat(self) -> None:
        """Goes the way of all changes, and so never beside one."""
        heartbeat = self._heartbeat = _Heartbeat()
        self._start_pump()
        await heartbeat.done.wait()

    async def _run(self, *arguments: Any) -> Any:
        return await self.script(await self._ways.to(self._key), [self._key], list(arguments))

    def _lost(self, why: str) -> None:
        """Nothing is known of what others have; decisions are local until a new token is joined."""
        now = asyncio.get_running_loop().time()
        if now - self._away_logged_at > LOG_SECONDS and (self.joined or why != self.reason):
            self._away_logged_at, self._log_when_joined = now, True
            log.warning("the shared ledger is away, replicas are chosen by this gateway's own view: %s", why)
        self.joined, self.reason = False, why
        queue, self._queue = self._queue, []
        if self._heartbeat is not None:
            heartbeat, self._heartbeat = self._heartbeat, None
            heartbeat.done.set()
        for pending in queue:
            self._decided(pending, "", None)
        for replica in self._ledger.outstanding():
            self._ledger.others(replica, NOTHING)


def _decision(pending: _Pending, reply: Any, counted: bool) -> Decision | None:
    """What Redis decided; None if it did not."""
    if not isinstance(reply, list):
        return None
    at, held, load, mine = reply
    overlap = max(pending.overlaps[at], held)
    return Decision(pending.chosen[at], pending.replicas[at], overlap, pending.tokens - overlap, _less(load, _LOAD.unpack(mine)), counted)


def _less(load: bytes, mine: Sequence[float]) -> tuple[int, ...]:
    """What is left of a load without this gateway's part."""
    return tuple(max(0, int(all_of - own)) for all_of, own in zip(_LOAD.unpack(load), mine))
