"""The queue in front of a fleet: one queue per class and set of replicas, with deficit round robin over its tenants.

Deficit round robin is by Shreedhar and Varghese ("Efficient fair queuing using deficit round robin", IEEE/ACM
Transactions on Networking 4(3), 1996): each tenant in turn may send QUANTUM uncached tokens, and saves up for a longer
prompt. A shorter prompt counts as QUANTUM, since it takes a place in an engine's step as well. No I/O and no clock: the
caller passes `now` in seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace
from math import exp
from typing import Any, Literal

from .classes import QosClass, Slo
from .costs import Costs

QUANTUM = 512  # uncached tokens a turn
ABSENT = ""  # if among a queue's targets, its requests wait until a replica is ready for them
Resource = Literal["count", "size"]  # what the queue bounds: requests ("count") and their bytes ("size")
_WINDOW = 5.0  # seconds of waiting over which a queue's pace is averaged
_PRIOR = 1.0  # seconds of waiting that the first guess of a pace counts as


class QueuedRequest:
    """A request that wants to be sent.

    `since`: when its client began to wait; `held`: seconds since then in which the stalled gateway could send nobody;
        `size`: bytes that it holds in memory; `payload`: the caller's own object. `Admission` sets the rest.
    """

    __slots__ = (
        "qos", "tenant", "slo", "since", "held", "size", "payload",
        # uncached tokens and seconds of its prefill, as last estimated; its deadline; whether it waits, and where
        "tokens", "own", "deadline", "waits", "queue",
        # set when it is sent: predicted seconds from `since` to its first token, whether the costs behind them had
        # learned, the costs of its replica, and the streams and context tokens among which it will decode there
        "ttft", "learned", "costs", "streams", "context",
    )  # fmt: skip

    def __init__(self, qos: QosClass, slo: Slo, since: float, tenant: str = "", size: int = 0, payload: Any = None):
        self.qos, self.slo, self.since, self.held = qos, slo, since, 0.0
        self.tenant, self.size, self.payload = tenant, size, payload
        self.tokens, self.own, self.deadline, self.waits = 0, 0.0, 0.0, False
        self.ttft, self.learned, self.streams, self.context = 0.0, True, 1.0, 0.0
        self.costs: Costs | None = None
        self.queue: ClassQueue | None = None


class Pace:
    """The pace of a queue: prefill seconds that leave it per second in which some request waits in it."""

    __slots__ = ("_work", "_seconds", "_at")

    def __init__(self, guess: float) -> None:
        self._work, self._seconds, self._at = guess * _PRIOR, _PRIOR, 0.0

    @property
    def value(self) -> float:
        return self._work / self._seconds

    def passed(self, now: float, waiting: bool) -> None:
        """Advance to `now`; `waiting`: whether some request waited since the last call."""
        if waiting and now > self._at:
            kept = exp((self._at - now) / _WINDOW)
            self._work *= kept
            self._seconds = self._seconds * kept + _WINDOW * (1.0 - kept)
        self._at = now

    def held_up(self, seconds: float) -> None:
        """Leave out `seconds` since the last call in which the stalled gateway could send nobody."""
        self._at += seconds

    def left(self, work: float) -> None:
        """Count `work` prefill seconds that left the queue."""
        self._work += work


class _Sums:
    """Sums over waiting requests. `work`: seconds of their prefills; `count`: their number; `size`: their bytes."""

    def __init__(self) -> None:
        self.work, self.count, self.size = 0.0, 0, 0

    def sum(self, request: QueuedRequest, sign: int) -> None:
        """Add a request (`sign` 1), or subtract it (-1)."""
        self.count += sign
        self.size += sign * request.size
        self.work = self.work + sign * request.own if self.count else 0.0


class _Tenant(_Sums):
    """The requests of one tenant in a queue, in order. `deficit`: tokens that it may send before its turn is over."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: OrderedDict[QueuedRequest, None] = OrderedDict()
        self.deficit = 0.0


class ClassQueue(_Sums):
    """The waiting requests of one class that may go to the same replicas, the `targets`; empty: to any."""

    def __init__(self, qos: QosClass, guess: float, targets: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.qos, self.pace, self.targets = qos, Pace(guess), targets
        # In the order of their turns. A tenant whose requests have all left stays until its turn comes.
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._present = 0  # tenants with a waiting request
        # By resource a heap of (minus what a tenant had, its name); it may have less by now
        self._ranked: dict[Resource, list[tuple[int, str]]] = {"count": [], "size": []}

    @property
    def is_absent(self) -> bool:
        """Whether no replica was ready for its requests when that was last checked."""
        return ABSENT in self.targets

    def add(self, request: QueuedRequest, now: float) -> None:
        self.pace.passed(now, self.count > 0)
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            if len(self._tenants) > 64 + 2 * self._present:
                self._tenants = OrderedDict((name, one) for name, one in self._tenants.items() if one.count)
            tenant = self._tenants[request.tenant] = _Tenant()
        self._present += not tenant.count
        tenant.requests[request] = None
        tenant.sum(request, 1)
        self.sum(request, 1)
        for resource, heap in self._ranked.items():
            heappush(heap, (-getattr(tenant, resource), request.tenant))
            if len(heap) > 64 + 4 * len(self._tenants):
                heap[:] = [(-getattr(one, resource), name) for name, one in self._tenants.items() if one.count]
                heapify(heap)
        request.waits, request.queue = True, self

    def head(self) -> QueuedRequest | None:
        """Return the next request to send, or None."""
        while self._tenants:
            name, tenant = next(iter(self._tenants.items()))
            if not tenant.count:
                del self._tenants[name]
                continue
            first = next(iter(tenant.requests))
            if len(self._tenants) == 1 or tenant.deficit >= max(QUANTUM, first.tokens):
                return first
            tenant.deficit += QUANTUM
            self._tenants.move_to_end(name)
        return None

    def take(self, request: QueuedRequest, now: float) -> None:
        """Remove a request that is sent, and charge it to its tenant."""
        self.drop(request, now)
        self.pace.left(request.own)
        tenant = self._tenants[request.tenant]
        tenant.deficit = max(0.0, tenant.deficit - max(QUANTUM, request.tokens))

    def drop(self, request: QueuedRequest, now: float) -> None:
        """Remove a request that leaves without being sent, or that is to wait in another queue."""
        self.pace.passed(now, True)
        request.waits, tenant = False, self._tenants[request.tenant]
        del tenant.requests[request]
        tenant.sum(request, -1)
        self.sum(request, -1)
        self._present -= not tenant.count

    def last(self, resource: Resource) -> QueuedRequest | None:
        """Return the request to displace if the queue is full: the latest one of the tenant that has most of it."""
        most = self._most(resource)
        return next(reversed(most.requests)) if most is not None else None

    def most(self, resource: Resource) -> int:
        """Return how much of the resource the tenant has that has most of it."""
        most = self._most(resource)
        return int(getattr(most, resource)) if most is not None else 0

    def has(self, name: str, resource: Resource) -> int:
        """Return how much of a resource a tenant has here."""
        tenant = self._tenants.get(name)
        return int(getattr(tenant, resource)) if tenant is not None else 0

    def gives(self, count: int, size: int, share: int) -> list[QueuedRequest] | None:
        """Return the latest requests of the largest tenant that together free `count` requests and `size` bytes.

        Return None if that would leave this tenant less than `share`, which is what the newcomer's tenant would then
        have: so tenants share a full queue equally.
        """
        resource: Resource = "count" if count > 0 else "size"
        most = self._most(resource)
        found: list[QueuedRequest] = []
        freed = 0
        for one in reversed(most.requests) if most is not None else ():
            found.append(one)
            freed += one.size
            if len(found) >= count and freed >= size:
                left = self.most(resource) - (len(found) if count > 0 else freed)
                return found if share <= left else None
        return None

    def _most(self, resource: Resource) -> _Tenant | None:
        """Return the tenant that has most of a resource, of equal ones the first by name; None if nobody waits."""
        heap = self._ranked[resource]
        while heap:
            had, name = heap[0]
            tenant = self._tenants.get(name)
            if tenant is None or not tenant.count:
                heappop(heap)
            elif (has := getattr(tenant, resource)) != -had:
                heapreplace(heap, (-has, name))
            else:
                return tenant
        return None

    def ahead(self, name: str) -> float:
        """Return the prefill seconds that precede a newcomer of this tenant.

        Before it, each other tenant sends as much as this tenant has in queue, and one request more; at most all that
        waits.
        """
        tenant = self._tenants.get(name)
        own = tenant.work if tenant is not None else 0.0
        others = self._present - (tenant is not None and tenant.count > 0)
        mean = self.work / self.count if self.count else 0.0
        return min(self.work, own * (others + 1) + others * mean)
