"""Decisions for another proxy (`/decide`): the replica is chosen and its load reserved here, the caller forwards.

The caller reports two events that an `Exchange` sees on its own sockets: the first byte and the end of the answer. The
request's load is reserved from the choice on, so later choices see it. Each report renews a lease. If no report comes
within the lease, the load is released, so that a caller that dies leaves none behind.
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

from ...errors import ApiError
from ...http.messages import Request
from ...prompt.prompt import RESPONSES
from ..exchange import Attempt
from ..proxy import Proxy
from ..responses.answers import error_status
from ..responses.usage import believed, read_usage
from ..settling import most_tokens
from .askers import ExternalRequest

if TYPE_CHECKING:
    from ..backend import Backend

LEASE = 60.0  # seconds without a report after which a lease ends, unless the caller requests another time
LEASES = (1.0, 3600.0)  # the shortest and the longest lease that a caller may request
# Seconds after a lease's end in which reports are still accepted that may have arrived before: this process may have
# stalled for a time too short for `Pulse` to notice.
GRACE = 0.25
LEAST_LEFT = 0.1  # seconds below which a rest of time counts as over: timers and the clock agree no better
# Limits on decisions under way, their number and bytes: enough for 16,384 prompts of 30,000 tokens. Bodies that are
# being prepared count as well.
MOST, MOST_BYTES = 16_384, 256 * 2**20
# A request makes its replica count as late for this many seconds after its first byte was due. Then its caller may have
# died, so it is disregarded.
SILENT = 5.0
MOST_CANDIDATES = 8  # the most replicas listed in an answer: each costs a run of the policy


class Decisions:
    """The decisions for other proxies that are under way: their requests have not ended.

    `name`: a prefix of the decisions' ids.
    """

    def __init__(self, proxy: Proxy, name: str = ""):
        self._proxy = proxy
        self._placing, self._settling, self._router = proxy.placing, proxy.settling, proxy.router
        self._ids = map(f"{name}{os.urandom(6).hex()}-%x".__mod__, itertools.count(1))
        self._open: dict[str, ExternalRequest] = {}
        self._bytes = 0  # memory of the decisions under way, and of bodies that are being prepared

    async def decide(
        self, path: str, body: bytes, headers: Mapping[str, str], exclude: Sequence[str] = (), lease: float = LEASE
    ) -> dict[str, Any]:
        """Choose a replica for a request and reserve its load there, until `done` is called or the lease ends.

        `path`, `body`, `headers`: those of the client's request.
        `exclude`: ids of replicas that have failed the request.
        `lease`: seconds within which the next report has to come, here and after each report.

        Returns the decision as JSON data. Raises ApiError if the request is not valid, or no replica can take it.
        """
        if (refused := self._proxy.door.refusal(path, "POST")) is not None:
            raise refused
        if len(self._open) >= MOST or self._bytes >= MOST_BYTES:
            what = f"{len(self._open)} requests and {self._bytes >> 20} MiB"
            raise ApiError(429, f"{what} are under way of which no end was told; tell it with POST /decide/ID/done")
        tried = tuple(self._proxy.backends[id] for id in exclude if id in self._proxy.backends)
        self._bytes += len(body)
        try:
            prompt = await self._proxy.preparation.prompt(path, body, headers)
        finally:
            self._bytes -= len(body)
        prompt.forget_ids()  # the gateway does not forward this request
        # Encode the headers' values in the way in which the admin server has decoded them.
        named = [(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in headers.items()]
        request = Request("POST", path.encode(), named, b"", http10=False, keep_alive=True)
        leased = ExternalRequest(next(self._ids), request, prompt, tried, lease)
        try:
            self._placing.place(leased)
            attempt = await leased.found
        except BaseException:  # if a decision of the shared ledger comes after a cancellation, `Placing` undoes it
            if leased.attempt is not None:  # it was placed in the event-loop iteration in which it was cancelled
                self._router.abandon(leased.attempt.placement)
            self._leave_queue(leased)
            del leased  # it refers to the exception, and that to this frame: a reference cycle
            raise
        self._leave_queue(leased)
        for stage, seconds in leased.stages:
            self._proxy.metrics.stage_seconds.observe(stage, seconds)
        self._open[leased.id] = leased
        self._bytes += leased.size
        self._renew(leased)
        self._router.tells_end_alone(attempt.placement)
        self._after(max(0.0, attempt.placement.reservation.due - monotonic() + SILENT), self._disregard, leased)
        if not attempt.streams:  # its first byte comes at its end, so the prefill is assumed to end as predicted
            asyncio.get_running_loop().call_later(
                attempt.placement.ttft, self._router.first_token, attempt.placement, None
            )
        return self._told(leased, attempt)

    def _leave_queue(self, leased: ExternalRequest) -> None:
        """Drop a request's ticket in the queue, since it needs no replica any more.

        The ticket is kept until then, because the shared ledger may have the request placed again.
        """
        if self._placing.queue is not None:
            self._placing.queue.forget(leased)

    def _told(self, leased: ExternalRequest, attempt: Attempt) -> dict[str, Any]:
        """Return the decision as JSON data for the caller, with the reason in words."""
        backend, prompt, placement = attempt.backend, leased.prompt, attempt.placement
        held = (
            f"{placement.predicted} of {prompt.tokens} prompt tokens held"
            + (f" ({placement.fetched} of them in slower tiers)" if placement.lower else "")
            if prompt.hashes
            else f"by load alone ({prompt.note or 'no full block'})"
        )
        return {
            "id": leased.id,
            "replica": backend.id,
            "url": backend.replica.url,
            "address": f"{bracketed(backend.pool.host)}:{backend.pool.port}",
            "headers": backend.replica.headers,
            "reason": f"{self._router.policy.name}: {held}, {placement.reservation.before.requests} requests there, "
            f"first token in {1e3 * placement.ttft:.1f} ms and last one in {1e3 * placement.seconds:.0f} ms as predicted",
            "tokens": prompt.tokens,
            "cached_tokens": placement.predicted,
            "ttft_seconds": placement.ttft,
            "answer_seconds": placement.seconds,
            "candidates": self._in_order(leased, backend),
            "lease_seconds": leased.seconds,
        }

    def _in_order(self, leased: ExternalRequest, chosen: Backend) -> list[str]:
        """Return the ids of the replicas that the gateway would try for this request one after the other.

        The chosen one is the first. At most `MOST_CANDIDATES` (8) are returned.
        """
        order = [chosen.id]
        try:
            targets = self._proxy.eligible.targets(leased.prompt, (*leased.tried, chosen))
        except ApiError:
            return order
        now = monotonic()
        return order + self._router.ranking(self._placing.demand(leased.prompt, now), targets, now, MOST_CANDIDATES - 1)

    async def first_byte(self, id: str) -> dict[str, Any]:
        """Record that the answer has begun, and renew the lease; a second call for a request only renews it.

        Returns JSON data for the caller. Raises ApiError if no decision with this id is under way.
        """
        leased = self._find(id)
        attempt = leased.attempt
        if not attempt.first_at:
            attempt.show_first(monotonic())
            attempt.backend.answers += 1
            self._settling.first_token(attempt, attempt.begun_at)
        self._renew(leased)
        return {"id": id, "lease_seconds": leased.seconds}

    async def done(self, id: str, answer: bytes) -> dict[str, Any]:
        """Record the end of a request: release its load, and learn costs from its answer.

        `answer`: the last bytes of the answer, which contain the engine's token usage; b"" if they are not known, in
            which case nothing is learned.

        Returns JSON data for the caller. Raises ApiError if no decision with this id is under way.
        """
        leased = self._find(id)
        self._close(leased, "done")
        attempt, prompt = leased.attempt, leased.prompt
        failed = bool(error_status(answer, True) or error_status(answer, False))
        is_event = prompt.stream and prompt.path == RESPONSES and not answer.startswith(b"{")
        usage = believed(read_usage(answer, 2 if is_event else 1), *most_tokens(attempt.backend, prompt))
        if not attempt.first_at:
            attempt.untimed()
        if answer and not failed:  # without an answer it is not known whether it succeeded
            self._router.answered(attempt.placement, monotonic())
        if usage.prompt is not None and not attempt.backend.gone and not failed:
            self._settling.finish(attempt, leased.prompt, usage)
        else:
            self._settling.release(attempt, computed=not failed)
        return {"id": id, "done": True}

    def on(self) -> Counter[str]:
        """Return the number of decisions under way for each replica, by its id."""
        return Counter(leased.attempt.backend.id for leased in self._open.values())

    def _find(self, id: str) -> ExternalRequest:
        if (leased := self._open.get(id)) is None:
            raise unknown(id)
        return leased

    def _renew(self, leased: ExternalRequest) -> None:
        """Begin a request's lease again, after a report."""
        for call in (self._ran_out, self._expired):
            if (timer := leased.timers.pop(call, None)) is not None:
                timer.cancel()
        self._after(leased.seconds, self._ran_out, leased)

    def _after(self, seconds: float, call: Callable[[ExternalRequest], None], leased: ExternalRequest) -> None:
        """Call `call(leased)` once this process has run for `seconds`.

        Time in which the process is stalled does not count, since it reads no reports then.
        """
        timer = asyncio.get_running_loop().call_later(seconds, self._due, seconds, monotonic(), call, leased)
        leased.timers[call] = timer

    def _due(
        self, seconds: float, since: float, call: Callable[[ExternalRequest], None], leased: ExternalRequest
    ) -> None:
        """Call `call(leased)` if its time has come; otherwise start its timer again for the seconds that are left.

        Some are left if the process was stalled since the timer began, at `since` in monotonic seconds.
        """
        now, pulse = monotonic(), self._proxy.pulse
        pulse.look(now)
        if (left := seconds - pulse.ran(since, now)) > LEAST_LEFT:
            self._after(left, call, leased)
        else:
            call(leased)

    def _disregard(self, leased: ExternalRequest) -> None:
        self._router.disregard(leased.attempt.placement)

    def _ran_out(self, leased: ExternalRequest) -> None:
        self._after(GRACE, self._expired, leased)

    def _expired(self, leased: ExternalRequest) -> None:
        self._close(leased, "expired")
        self._router.abandon(leased.attempt.placement)

    def _close(self, leased: ExternalRequest, outcome: str) -> None:
        """End a decision: forget the request and its timers, and count the outcome in metrics."""
        del self._open[leased.id]
        self._bytes -= leased.size
        for timer in leased.timers.values():
            timer.cancel()
        self._proxy.metrics.decisions.inc(outcome)


def unknown(id: str) -> ApiError:
    """Return the error for a report on a decision that is not under way."""
    return ApiError(
        404,
        f"no decision {id[:100]!r} is under way: its end was told, or nothing within its lease",
        code="unknown_decision",
    )
