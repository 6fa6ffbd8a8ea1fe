"""The queues for a model's replicas: one for each class and set of replicas, with deficit round robin over its tenants.

Deficit round robin is by Shreedhar and Varghese ("Efficient fair queuing using deficit round robin", IEEE/ACM
Transactions on Networking 4(3), 1996): each tenant in turn may send QUANTUM uncached tokens, and saves up for a longer
prompt. A shorter prompt counts as QUANTUM, since it also takes a place in an engine's step. No I/O and no clock: the
caller passes `now` in seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace
from math import exp
from typing import Any, Literal

from .classes import QosClass, Slo
from .costs import Costs

QUANTUM = 512  # uncached tokens that a tenant may send in each turn
ABSENT = ""  # if this is among a queue's targets, its requests wait until a replica is ready for them
Resource = Literal["count", "size"]  # what the queue bounds: requests ("count") and their bytes ("size")
_WINDOW = 5.0  # seconds of waiting over which a queue's pace is averaged
_PRIOR = 1.0  # how many seconds of waiting the first guess of a pace counts as


class QueuedRequest:
    """A request that waits to be sent, or is being decided on.

    `since`: when its client began to wait; `held`: seconds since then in which the gateway was stalled and could send
        no request; `size`: bytes that it takes in memory; `payload`: the caller's own object. `Admission` sets the
        other attributes.
    """

    __slots__ = (
        "qos", "tenant", "slo", "since", "held", "size", "payload",
        # Uncached tokens and seconds of its prefill, as last estimated; its deadline; whether it waits, and in which
        # queue.
        "tokens", "own", "deadline", "waits", "queue",
        # Set when it is sent: the predicted seconds from `since` to its first token, whether the costs behind that
        # prediction had learned, the costs of its replica, and the streams and context tokens beside which it will
        # decode.
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
    """The measured pace of a queue: how many predicted seconds of prefill leave it per second.

    Only the time in which some request waits in the queue counts. `guess`: the pace assumed before any is measured.
    """

    __slots__ = ("_work", "_seconds", "_at")

    def __init__(self, guess: float) -> None:
        self._work, self._seconds, self._at = guess * _PRIOR, _PRIOR, 0.0

    @property
    def value(self) -> float:
        return self._work / self._seconds

    def passed(self, now: float, waiting: bool) -> None:
        """Advance the measurement to the time `now`.

        `waiting`: whether some request waited in the queue since the last call; if none did, that time is not counted.
        """
        if waiting and now > self._at:
            kept = exp((self._at - now) / _WINDOW)
            self._work *= kept
            self._seconds = self._seconds * kept + _WINDOW * (1.0 - kept)
        self._at = now

    def held_up(self, seconds: float) -> None:
        """Leave a stall of the gateway out of the measured time.

        `seconds`: for how long, since the last call of `passed`, the gateway was stalled and could send no request.
        """
        self._at += seconds

    def left(self, work: float) -> None:
        """Count a request that left the queue, with `work` seconds of prefill."""
        self._work += work


class _Sums:
    """The sums over some waiting requests.

    `work`: the seconds of their prefills; `count`: their number; `size`: their bytes.
    """

    def __init__(self) -> None:
        self.work, self.count, self.size = 0.0, 0, 0

    def sum(self, request: QueuedRequest, sign: int) -> None:
        """Add a request to the sums (`sign` 1), or subtract it (`sign` -1)."""
        self.count += sign
        self.size += sign * request.size
        self.work = self.work + sign * request.own if self.count else 0.0


class _Tenant(_Sums):
    """The requests of one tenant in a queue, in order.

    `deficit`: how many tokens the tenant may send before its turn is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: OrderedDict[QueuedRequest, None] = OrderedDict()
        self.deficit = 0.0


class ClassQueue(_Sums):
    """The waiting requests of one class that may go to the same replicas.

    `targets`: the names of these replicas; empty: any replica. `guess`: the assumed pace of the queue, see `Pace`.
    """

    def __init__(self, qos: QosClass, guess: float, targets: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.qos, self.pace, self.targets = qos, Pace(guess), targets
        # The tenants in the order of their turns. One whose requests have all left stays until its turn comes.
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._present = 0  # tenants with a waiting request
        # For each resource a heap of (minus how much of it a tenant had, the tenant's name); it may have less by now.
        self._ranked: dict[Resource, list[tuple[int, str]]] = {"count": [], "size": []}

    @property
    def is_absent(self) -> bool:
        """Whether, at the last check, no replica was ready for the requests of this queue."""
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
        """Return the next request to send, or None if no request waits; tenants take turns (deficit round robin)."""
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
        """Remove a request that is sent, and subtract its uncached tokens from what its tenant may send."""
        self.drop(request, now)
        self.pace.left(request.own)
        tenant = self._tenants[request.tenant]
        tenant.deficit = max(0.0, tenant.deficit - max(QUANTUM, request.tokens))

    def drop(self, request: QueuedRequest, now: float) -> None:
        """Remove a request that leaves without being sent, or that will wait in another queue."""
        self.pace.passed(now, True)
        request.waits, tenant = False, self._tenants[request.tenant]
        del tenant.requests[request]
        tenant.sum(request, -1)
        self.sum(request, -1)
        self._present -= not tenant.count

    def last(self, resource: Resource) -> QueuedRequest | None:
        """Return the request to displace if the queue is full, or None if no request waits.

        It is the latest request of the tenant that has most of the resource (requests or bytes) in this queue.
        """
        most = self._most(resource)
        return next(reversed(most.requests)) if most is not None else None

    def most(self, resource: Resource) -> int:
        """Return the largest amount of the resource (requests or bytes) that a single tenant has in this queue."""
        most = self._most(resource)
        return int(getattr(most, resource)) if most is not None else 0

    def has(self, name: str, resource: Resource) -> int:
        """Return how much of the resource (requests or bytes) the tenant called `name` has in this queue."""
        tenant = self._tenants.get(name)
        return int(getattr(tenant, resource)) if tenant is not None else 0

    def gives(self, count: int, size: int, share: int) -> list[QueuedRequest] | None:
        """Return the latest requests of the largest tenant that together free `count` requests and `size` bytes.

        The space is for a new request, whose tenant would then have `share` (requests or bytes) in the queue. Returns
        None if the largest tenant would be left with less than that. In this way tenants share a full queue equally.
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
        """Return the tenant that has most of a resource (requests or bytes); None if no request waits.

        Of several equal ones it is the first by name.
        """
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
        """Return how many seconds of prefill would be sent before a new request of the tenant called `name`.

        As tenants take turns, this is the work of the tenant's own waiting requests, the same amount of work of each
        other waiting tenant, and one more average request of each of these. It is never more than all work in the
        queue.
        """
        tenant = self._tenants.get(name)
        own = tenant.work if tenant is not None else 0.0
        others = self._present - (tenant is not None and tenant.count > 0)
        mean = self.work / self.count if self.count else 0.0
        return min(self.work, own * (others + 1) + others * mean)
