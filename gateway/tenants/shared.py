"""The counts of tenants' limits over all gateways of a deployment, in Redis.

A request's claims (what it adds to each count) are one call of a Lua script, which decides and counts in one step. The
calls of one event-loop iteration are sent together. A request waits for Redis for 2 ms and three event-loop iterations
at most; then its gateway decides by the last known counts. While Redis cannot be reached, each gateway decides by its
own counts and an equal share of each limit, and afterwards reports what it has admitted. If Redis comes back empty, all
gateways report their counts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError

from cachemap.background import Background
from cachemap.cluster.connect import FAILURES, RedisConnection, Script, describe, strange
from cachemap.cluster.keys import SCHEMA

from .limits import RUNNING, Account, Claim

if TYPE_CHECKING:
    from cachemap.cluster.connect import RedisClients

log = logging.getLogger("hitherto")

_SCRIPT = Path(__file__).with_name("shared.lua").read_text()
DEADLINE = 0.002  # seconds that a request may wait; Redis takes 0.2 ms on one machine
TURNS = 3  # event-loop iterations to wait beyond the deadline: the reply may have come while the loop was busy
BEAT, LEASE = 1.0, 3.0  # seconds between two heartbeats, and until a gateway without heartbeats counts as gone
PATIENCE = 1.0  # seconds to wait for Redis before it counts as unreachable
LOG_SECONDS = 10.0  # between two identical log lines
MOST_TOGETHER = 64  # the most requests in one batch
MOST_TOLD = 256  # the most tenants reported in one batch: after an outage there may be thousands
WORK = "tenants' limits"  # kind of background work

# Called with a request and whether Redis has decided on it. If so, `pending.over` holds the decision. Otherwise the
# callee decides, and sets `pending.granted`.
Decide = Callable[["Pending", bool], None]


class Pending:
    """One request that waits for Redis to decide whether its tenant's limits allow it.

    `wanted`: the claims, which say what the request adds to the count of each limit. `decide`: a function that is
    called with this object and with whether Redis has decided; if not, the function decides itself. `over`: the claim
    that Redis refused, or None. `granted`: whether the request is admitted. `answered`: whether `decide` was called.
    """

    __slots__ = ("account", "wanted", "decide", "over", "granted", "answered")

    def __init__(self, account: Account, wanted: Sequence[Claim], decide: Decide):
        self.account, self.wanted, self.decide = account, wanted, decide
        self.over: Claim | None = None
        self.granted = self.answered = False


def _is_decision(pending: Pending, reply: Any) -> bool:
    """Return whether `reply` has the form of the Lua script's reply to this request.

    A reply is a list: the number of the refused limit (0: none), the number of the tenant's requests that run in other
    gateways, and the count of each limit.
    """
    counts = sum(claim.kind != RUNNING for claim in pending.wanted)
    return (
        type(reply) is list
        and {*map(type, reply)} == {int}
        and len(reply) == 2 + counts
        and 0 <= reply[0] <= 1 + counts
        and (reply[0] != 1 or counts < len(pending.wanted))
    )


class SharedCounts:
    """One gateway's access to the counts of tenants' limits that all gateways share, from `start` to `stop`."""

    def __init__(
        self,
        ways: RedisClients,
        deployment: str,
        accounts: Callable[[], Collection[Account]],
        background: Background,
        deadline: float = DEADLINE,
        observe: Callable[[str], None] = lambda outcome: None,
    ):
        """Create an unconnected instance.

        `ways`: the connections to Redis. `deployment`: the name that all gateways that count together have. `accounts`:
        returns all tenants' accounts in this gateway. `deadline`: seconds that a request may wait for Redis. `observe`:
        called for each request with the way it was decided: "shared" (by Redis), "late" (here, since Redis was too
        slow) or "away" (here, since Redis cannot be reached).
        """
        self._observe = observe
        self._accounts, self._background, self._deadline, self._ways = accounts, background, deadline, ways
        self._key = f"hitherto:{SCHEMA}:{deployment}:{{limits}}:"
        self._line, self._script = RedisConnection(ways, self._key), Script(_SCRIPT)
        self._token, self._epoch = os.urandom(8).hex(), b""
        self._queue: list[Pending] = []
        self._changed: dict[str, Account] = {}  # accounts whose running requests here are to be reported
        self._unsent: dict[str, dict[tuple[str, int], int]] = {}  # by tenant: counts that Redis does not have yet
        self._pump: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._logged_at = self._joined_at = float("-inf")
        self._stopped = False
        self.joined, self.reason = False, "not connected yet"
        self.gateways = 1  # how many gateways count together

    def start(self) -> None:
        self._beating = self._background.spawn(WORK, self._keep)

    async def stop(self) -> None:
        """Report the counts that Redis does not have yet, and disconnect.

        Requests that still run here count in Redis until the lease of this gateway ends, 3 seconds after its last
        heartbeat.
        """
        with contextlib.suppress(*FAILURES):
            async with asyncio.timeout(PATIENCE):
                self._start_pump()
                if self._pump is not None:
                    await self._pump
        self._stopped, self.joined = True, False
        if self._beating is not None:
            self._beating.cancel()
        with contextlib.suppress(*FAILURES):
            await self._ways.aclose()

    # --- claims and reports

    def claim(self, account: Account, wanted: Sequence[Claim], decide: Decide) -> None:
        """Let Redis decide whether a request may add these claims to its tenant's counts.

        `decide`: called once, with the request as a Pending and with whether Redis has decided, perhaps before this
        function returns. If Redis has not, because it is slow or away, `decide` decides by the counts of this gateway.
        """
        pending = Pending(account, wanted, decide)
        if not self.joined:
            self._decide_unsent(pending)
            return
        self._queue.append(pending)
        asyncio.get_running_loop().call_later(self._deadline, self._late, pending, TURNS)
        self._start_pump()

    def ran(self, account: Account) -> None:
        """Report to Redis how many requests of the tenant now run in this gateway, after this number has changed."""
        self._changed[account.name] = account
        self._start_pump()

    def charge(self, name: str, kind: str, window: int, by: int) -> None:
        """Report to Redis that this gateway has added `by` to a tenant's count.

        `name`: the tenant's name; `kind`: the kind of limit; `window`: the number of the minute, day or month.
        """
        unsent = self._unsent.setdefault(name, {})
        unsent[kind, window] = unsent.get((kind, window), 0) + by
        if len(unsent) > 64:  # while Redis was away: drop windows that are over
            newest = dict(sorted(unsent))
            self._unsent[name] = {key: by for key, by in unsent.items() if newest[key[0]] == key[1]}
        self._start_pump()

    # --- decisions

    def _late(self, pending: Pending, turns: int) -> None:
        if pending.answered:
            return
        if turns:
            asyncio.get_running_loop().call_soon(self._late, pending, turns - 1)
        else:
            self._answer(pending, False)

    def _answer(self, pending: Pending, by_redis: bool) -> None:
        pending.answered = True
        self._observe("shared" if by_redis else "late" if self.joined else "away")
        try:
            pending.decide(pending, by_redis)
        except Exception as error:
            self._background.failed(WORK, error)

    def _decide_unsent(self, pending: Pending) -> None:
        """Let this gateway decide on a request that Redis has not counted, and report it to Redis if it is admitted."""
        if not pending.answered:
            self._answer(pending, False)
        if pending.granted:
            self._correct(pending, 1)

    def _correct(self, pending: Pending, sign: int) -> None:
        for claim in pending.wanted:
            if claim.kind == RUNNING:
                self.ran(pending.account)
            elif claim.cost:
                self.charge(pending.account.name, claim.kind, claim.window, sign * claim.cost)

    def _replied(self, pending: Pending, reply: Sequence[int]) -> None:
        """Apply the reply of Redis to a request, and update the known counts.

        If this gateway has already decided, and its decision differs from that of Redis, the counts in Redis are
        corrected.
        """
        account, counts = pending.account, [claim for claim in pending.wanted if claim.kind != RUNNING]
        denied, account.others_running = reply[0], reply[1]
        for claim, count in zip(counts, reply[2:], strict=True):
            # Redis may have counted in another window, if its clock differs from this one
            account.seen.put(claim.kind, claim.window, count)
        if not pending.answered:
            pending.granted = denied == 0
            if pending.granted:
                account.running += 1
                for claim in counts:
                    account.own.add(claim.kind, claim.window, claim.cost)
            else:
                running = [claim for claim in pending.wanted if claim.kind == RUNNING]
                pending.over = running[0] if denied == 1 else counts[denied - 2]
            self._answer(pending, True)
        elif pending.granted != (denied == 0):
            self._correct(pending, 1 if pending.granted else -1)

    # --- sending

    def _start_pump(self) -> None:
        if self.joined and (self._pump is None or self._pump.done()):
            self._pump = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        while self.joined and (self._queue or self._changed or self._unsent):
            batch, self._queue = self._queue[:MOST_TOGETHER], self._queue[MOST_TOGETHER:]
            changed = {name: self._changed.pop(name) for name in list(islice(self._changed, MOST_TOLD))}
            unsent = {name: self._unsent.pop(name) for name in list(islice(self._unsent, MOST_TOLD))}
            epoch = self._epoch
            sent, replies = False, []
            try:
                commands = self._commands(batch, changed, unsent)
                try:
                    async with asyncio.timeout(PATIENCE):
                        told = (await self._line.ask(commands))[len(commands) - len(batch) :]
                    if not all(map(_is_decision, batch, told)):
                        raise strange("shared.lua")
                    replies = told
                finally:
                    sent = self._line.sent
            except FAILURES as error:
                sent = sent and not isinstance(error, NoScriptError)  # the first call failed so, and nothing was done
                self._lost(describe(error))
            except Exception as error:
                self._background.failed(WORK, error)
                self._lost(f"{type(error).__name__}: {error}")
            finally:
                if not sent and epoch == self._epoch:  # in a new epoch all counts are reported anyway
                    self._changed = {**changed, **self._changed}
                    for name, counts in unsent.items():
                        for (kind, window), by in counts.items():
                            self.charge(name, kind, window, by)
                for pending, reply in zip(batch, replies):
                    self._replied(pending, reply)
                for pending in batch[len(replies) :]:
                    # A claim that was sent may have been counted, so it is not reported again.
                    if not sent:
                        self._decide_unsent(pending)
                    elif not pending.answered:
                        self._answer(pending, False)

    def _commands(
        self, batch: Sequence[Pending], changed: dict[str, Account], unsent: dict[str, dict[tuple[str, int], int]]
    ) -> list[tuple[Any, ...]]:
        def call(op: str, *arguments: Any) -> tuple[Any, ...]:
            return "EVALSHA", self._script.sha, 1, self._key, op, self._token, int(1000 * LEASE), *arguments

        commands = []
        for name, counts in unsent.items():
            commands.append(call("charge", name, *[part for key, by in counts.items() for part in (*key, by)]))
        commands += [call("state", name, account.running) for name, account in changed.items()]
        stated = set(changed)
        for pending in batch:
            name = pending.account.name
            most = next((claim.limit for claim in pending.wanted if claim.kind == RUNNING), -1)
            numbers = [part for claim in pending.wanted if claim.kind != RUNNING for part in claim]
            commands.append(call("claim", name, most, -1 if name in stated else pending.account.running, *numbers))
            stated.add(name)
        return commands

    # --- heartbeat

    async def _keep(self) -> None:
        while not self._stopped:
            try:
                async with asyncio.timeout(2 * PATIENCE):
                    await self._beat()
            except FAILURES as error:
                self._ways.failed()
                self._lost(describe(error))
            await asyncio.sleep(BEAT)

    async def _beat(self) -> None:
        arguments = ["beat", self._token, int(1000 * LEASE), os.urandom(8).hex()]
        told = await self._script(await self._ways.to(self._key), [self._key], arguments)
        if not isinstance(told, list) or [*map(type, told)] != [int, bytes]:
            raise strange("shared.lua")
        count, epoch = max(1, told[0]), told[1]  # the epoch of Redis' data, the same for all gateways
        if count > self.gateways or (self.joined and monotonic() - self._joined_at > LEASE):
            self.gateways = count  # after an outage other gateways need a lease's time to join
        if epoch != self._epoch:
            if self._epoch:  # Redis has lost its data: report all counts of this gateway
                self._unsent = {
                    account.name: {(kind, window): count for kind, window, count in account.own.items() if count}
                    for account in self._accounts()
                }
            self._epoch = epoch
        self._changed.update({one.name: one for one in self._accounts() if one.running})  # their leases are renewed
        if not self.joined:
            self.joined, self.reason, self._joined_at = True, "joined", monotonic()
            log.info("tenants' limits are counted in Redis, for %d gateways", self.gateways)
        self._start_pump()

    def _lost(self, why: str) -> None:
        if self.joined or (monotonic() - self._logged_at > LOG_SECONDS and why != self.reason):
            self._logged_at = monotonic()
            log.warning("tenants' limits are counted here alone, each gateway's share of them: %s", why)
        self.joined, self.reason = False, why
        queue, self._queue = self._queue, []
        for pending in queue:
            self._decide_unsent(pending)
