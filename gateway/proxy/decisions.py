"""Decisions for somebody else's proxy: a request gets a replica and is counted there, and its bytes pass elsewhere.

What a `Life` learns from its own sockets, the caller tells: the first byte, the end. Load is counted from the choice on,
so whoever asks next sees it. Each report renews a lease; a request not heard of within it is taken off the ledger, so a
caller that dies leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from replicas.names import bracketed

from .answers import error_status
from .life import Failure
from .states import State
from .usage import read_usage

if TYPE_CHECKING:
    from policies import Placement

    from ..prompt import Prompt
    from .backend import Backend
    from .dispatcher import Dispatcher

LEASE = 60.0  # seconds without a word, unless the caller asks for another time
LEASES = (1.0, 3600.0)
MOST, MOST_BYTES = 16_384, 256 * 2**20  # under way at once: 16,384 of 30,000 tokens each. Bodies that wait to be read count as well
MOST_CANDIDATES = 8  # named; nobody tries more, and each costs a choice


class Decided:
    """As much of a `Life` as the dispatcher needs, for a request that is answered elsewhere."""

    __slots__ = ("id", "prompt", "tried", "lease", "state", "streams", "backend", "placement", "begun", "sent_at", "first_at", "made", "timer", "size")

    response = model = None  # no answer passes here, so nobody knows who made one
    status, fault, pieces, suspicions = 200, 0, 0, ()  # what goes wrong is the caller's to see; the engine's own count tells how many there were

    def __init__(self, id: str, prompt: Prompt, tried: tuple[Backend, ...], lease: float):
        self.id, self.prompt, self.tried, self.lease = id, prompt, tried, lease
        self.state, self.streams = State.CHOOSING, prompt.stream
        self.backend: Backend | None = None
        self.placement: Placement | None = None
        self.begun = self.sent_at = monotonic()
        self.first_at = 0.0
        self.made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.size = 2000 + 8 * len(prompt.hashes) + 4 * len(prompt.model)  # bytes, roughly

    def take_step(self, step: Callable[..., None], *given: object) -> None:
        """A bug of ours in it ends this request alone."""
        try:
            step(*given)
        except Exception as error:
            self.unchosen(error)

    def chosen(self) -> None:
        if not self.made.done():  # else the caller has left
            self.made.set_result(None)

    def unchosen(self, failure: Exception) -> None:
        if not self.made.done():
            self.made.set_exception(failure)


class Decisions:
    """Those whose end has not been told. `name` begins their ids."""

    def __init__(self, dispatcher: Dispatcher, name: str = ""):
        self._dispatcher = dispatcher
        self._ids = map(f"{name}{os.urandom(6).hex()}-%x".__mod__, itertools.count(1))
        self._open: dict[str, Decided] = {}
        self._bytes = 0  # of what is under way, and of bodies that are being prepared

    async def decide(self, path: str, body: bytes, headers: Mapping[str, str], exclude: Sequence[str] = (), lease: float = LEASE) -> dict[str, Any]:
        """Choose and reserve. Raises PromptError for the client's faults, Failure where nobody can take the request."""
        dispatcher = self._dispatcher
        if dispatcher.draining:
            raise Failure(503, "the gateway is shutting down; ask another one", code="shutting_down")
        if len(self._open) >= MOST or self._bytes >= MOST_BYTES:
            what = f"{len(self._open)} requests" + (f" and bodies of others, in all {self._bytes >> 20} MiB" if self._bytes >= MOST_BYTES else "")
            raise Failure(429, f"{what} are under way of which no end was told; tell it with POST /decide/ID/done")
        tried = tuple(dispatcher.backends[id] for id in exclude if id in dispatcher.backends)
        self._bytes += len(body)
        try:
            prompt = await self._prepared(path, body, headers)
        finally:
            self._bytes -= len(body)
        prompt.token_ids = b""  # nothing is sent from here
        decided = Decided(next(self._ids), prompt, tried, lease)
        dispatcher.choose(decided)
        try:
            await decided.made
        except asyncio.CancelledError:
            if decided.placement is not None:  # the shared ledger may have answered in the same turn
                dispatcher.router.abandon(decided.placement)
            raise
        finally:
            decided.state = State.ENDED  # an answer of the shared ledger that comes for a caller who left is taken back
        self._open[decided.id] = decided
        self._bytes += decided.size
        self._renew(decided)
        seconds = decided.placement.ttft
        if not decided.streams:  # no first byte to tell of: as `assume_prefilled`
            asyncio.get_running_loop().call_later(seconds, dispatcher.router.first_token, decided.placement, None)
        return self._told(decided, seconds)

    async def _prepared(self, path: str, body: bytes, headers: Mapping[str, str]) -> Prompt:
        dispatcher = self._dispatcher
        prompt = await dispatcher.preparation.prompt(path, body, headers)
        if dispatcher.unheard_of(prompt.model):
            await dispatcher.newcomers.asked()
            prompt = await dispatcher.preparation.prompt(path, body, headers)
        return prompt

    def _told(self, decided: Decided, seconds: float) -> dict[str, Any]:
        backend, prompt = decided.backend, decided.prompt
        held = f"{decided.placement.overlap} of {prompt.tokens} prompt tokens held" if prompt.hashes else f"by load alone ({prompt.note or 'no full block'})"
        return {
            "id": decided.id,
            "replica": backend.id,
            "url": backend.replica.url,
            "address": f"{bracketed(backend.pool.host)}:{backend.pool.port}",
            "headers": backend.replica.headers,
            "reason": f"{self._dispatcher.router.policy.name}: {held}, {decided.placement.reservation.before.requests} requests there, first token in {1e3 * seconds:.1f} ms as predicted",
            "tokens": prompt.tokens,
            "cached_tokens": decided.placement.overlap,
            "ttft_seconds": seconds,
            "candidates": self._in_order(decided),
            "lease_seconds": decided.lease,
        }

    def _in_order(self, decided: Decided) -> list[str]:
        """Whom the gateway itself would try, one after the other."""
        order = [decided.backend.id]
        try:
            targets = self._dispatcher.targets(decided.prompt, (*decided.tried, decided.backend))
        except Failure:
            return order
        now = monotonic()
        return order + self._dispatcher.router.ranking(self._dispatcher.demand(decided.prompt, now), targets, now, MOST_CANDIDATES - 1)

    async def first_byte(self, id: str) -> dict[str, Any]:
        """The answer has begun. Told again it only renews the lease."""
        decided = self._find(id)
        if not decided.first_at:
            decided.first_at = monotonic()
            self._dispatcher.outcomes.first_byte(decided)
        self._renew(decided)
        return {"id": id, "lease_seconds": decided.lease}

    async def done(self, id: str, answer: bytes) -> dict[str, Any]:
        """It has ended, however. `answer`: its last bytes, with the engine's usage, if that is to be learned from."""
        decided = self._find(id)
        self._close(decided, "done")
        usage, dispatcher = read_usage(answer), self._dispatcher
        decided.streams &= decided.first_at > 0  # else nobody knows how long it decoded
        if usage.prompt is not None and not decided.backend.gone and not _is_error(answer):
            dispatcher.outcomes.finish(decided, usage)
        else:
            dispatcher.router.abandon(decided.placement, computed=not _is_error(answer))
        return {"id": id, "done": True}

    def on(self) -> Counter[str]:
        """How many there are on each replica."""
        return Counter(decided.backend.id for decided in self._open.values())

    def _find(self, id: str) -> Decided:
        decided = self._open.get(id)
        if decided is None:
            raise unknown(id)
        return decided

    def _renew(self, decided: Decided) -> None:
        if decided.timer is not None:
            decided.timer.cancel()
        decided.timer = asyncio.get_running_loop().call_later(decided.lease, self._expired, decided)

    def _expired(self, decided: Decided) -> None:
        self._close(decided, "expired")
        self._dispatcher.router.abandon(decided.placement)

    def _close(self, decided: Decided, outcome: str) -> None:
        del self._open[decided.id]
        self._bytes -= decided.size
        decided.timer.cancel()
        self._dispatcher.metrics.decisions.inc(outcome)


def _is_error(answer: bytes) -> bool:
    return bool(error_status(answer, True) or error_status(answer, False))


def unknown(id: str) -> Failure:
    return Failure(404, f"no decision {id[:100]!r} is under way: its end was told, or nothing within its lease", code="unknown_decision")
