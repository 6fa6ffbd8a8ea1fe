"""The queue in front of a fleet: one line per class and set of replicas, with deficit round robin over its tenants.

Deficit round robin is by Shreedhar and Varghese ("Efficient fair queuing using deficit round robin", IEEE/ACM
Transactions on Networking 4(3), 1996): each tenant in turn may send QUANTUM uncached tokens, and saves up for a longer
prompt. A shorter prompt counts as QUANTUM, since it takes a place in an engine's step as well. No I/O and no clock: the
caller passes `now` in seconds.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush, heapreplace
from math import exp
from typing import Any, Literal

from .classes import QosClass, Slo
from .costs import Costs

QUANTUM = 512  # uncached tokens a turn
ABSENT = ""  # if among a line's targets, its requests wait until a replica is ready for them
Resource = Literal["count", "size"]  # what the queue bounds: requests ("count") and their bytes ("size")
_WINDOW = 5.0  # seconds of waiting over which a line's pace is averaged
_PRIOR = 1.0  # seconds of waiting that the first guess of a pace counts as


class Ticket:
    """A request that wants to be sent.

    `since`: when its client began to wait; `held`: seconds since then in which the stalled gateway could send nobody;
        `size`: bytes that it holds in memory; `payload`: the caller's own object. `Admission` sets the rest.
    """

    __slots__ = (
        "qos", "tenant", "slo", "since", "held", "size", "payload",
        # uncached tokens and seconds of its prefill, as last quoted; its deadline; whether it waits, and in which line
        "tokens", "own", "deadline", "waits", "line",
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
        self.line: Line | None = None


class Pace:
    """The pace of a line: prefill seconds that leave it per second in which some request waits in it."""

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
        """Count `work` prefill seconds that left the line."""
        self._work += work


class _Tenant:
    """The requests of one tenant in a line.

    `deficit`: tokens that it may send before its turn is over.
    `work`: seconds of its requests' prefills; `count`: number of the requests; `size`: their bytes.
    `queue`: their tickets, and some that have left.
    """

    __slots__ = ("queue", "deficit", "work", "count", "size")

    def __init__(self) -> None:
        self.queue: deque[Ticket] = deque()
        self.deficit = self.work = 0.0
        self.count = self.size = 0


class Line:
    """The waiting requests of one class that may go to the same replicas, the `targets`; empty: to any.

    `work`: seconds of their prefills; `count`: number of the requests; `size`: their bytes.
    """

    def __init__(self, qos: QosClass, guess: float, targets: frozenset[str] = frozenset()) -> None:
        self.qos, self.pace, self.targets = qos, Pace(guess), targets
        self.work, self.count, self.size = 0.0, 0, 0
        self._tenants: dict[str, _Tenant] = {}
        self._present = 0  # tenants with a waiting request
        # By resource a heap of (minus what a tenant had, tenant); entries may be outdated
        self._ranked: dict[Resource, list[tuple[int, str]]] = {"count": [], "size": []}
        self._turns: deque[str] = deque()  # tenants' names in the order of their turns
        self._gone = 0  # tickets in the queues that have left

    @property
    def is_absent(self) -> bool:
        """Whether no replica was ready for its requests when that was last checked."""
        return ABSENT in self.targets

    def add(self, ticket: Ticket, now: float) -> None:
        self.pace.passed(now, self.count > 0)
        tenant = self._tenants.get(ticket.tenant)
        if tenant is None:
            tenant = self._tenants[ticket.tenant] = _Tenant()
            self._turns.append(ticket.tenant)
        tenant.queue.append(ticket)
        tenant.work += ticket.own
        self._present += not tenant.count
        tenant.count += 1
        tenant.size += ticket.size
        self._rank(ticket.tenant, tenant)
        self.work += ticket.own
        self.count += 1
        self.size += ticket.size
        ticket.waits, ticket.line = True, self

    def head(self) -> Ticket | None:
        """Return the next request to send, or None."""
        turns = self._turns
        while turns:
            tenant = self._tenants[turns[0]]
            queue = tenant.queue
            while queue and not queue[0].waits:
                queue.popleft()
                self._gone -= 1
            if not queue:
                del self._tenants[turns.popleft()]
            elif len(turns) == 1 or tenant.deficit >= max(QUANTUM, queue[0].tokens):
                return queue[0]
            else:
                tenant.deficit += QUANTUM
                turns.rotate(-1)
        return None

    def take(self, ticket: Ticket, now: float) -> None:
        """Remove a request that is sent, and charge it to its tenant."""
        self.pace.passed(now, True)
        self.pace.left(ticket.own)
        tenant = self._tenants[ticket.tenant]
        tenant.deficit = max(0.0, tenant.deficit - max(QUANTUM, ticket.tokens))
        self._leave(ticket)

    def drop(self, ticket: Ticket, now: float) -> None:
        """Remove a request that leaves without being sent."""
        self.pace.passed(now, True)
        self._leave(ticket)

    def remove(self, ticket: Ticket, now: float) -> None:
        """Remove a request that is to wait in another line."""
        self._tenants[ticket.tenant].queue.remove(ticket)
        self._gone -= 1  # `drop` counts it
        self.drop(ticket, now)

    def _leave(self, ticket: Ticket) -> None:
        ticket.waits = False
        tenant = self._tenants[ticket.tenant]
        tenant.count -= 1
        self._present -= not tenant.count
        tenant.size -= ticket.size
        tenant.work = tenant.work - ticket.own if tenant.count else 0.0
        self.count -= 1
        self.size -= ticket.size
        self.work = self.work - ticket.own if self.count else 0.0
        self._gone += 1
        if self._gone > 64 + self.count:
            self._sweep()

    def _sweep(self) -> None:
        """Drop the tickets that have left, wherever they stand."""
        for name, tenant in [*self._tenants.items()]:
            tenant.queue = deque([one for one in tenant.queue if one.waits])
            if not tenant.queue:
                del self._tenants[name]
        self._turns = deque([name for name in self._turns if name in self._tenants])
        self._gone = 0

    def last(self, resource: Resource) -> Ticket | None:
        """Return the request to displace if the queue is full: the latest one of the tenant that has most of it."""
        most = self._most(resource)
        return most.queue[-1] if most is not None else None

    def most(self, resource: Resource) -> int:
        """Return how much of the resource the tenant has that has most of it."""
        most = self._most(resource)
        return int(getattr(most, resource)) if most is not None else 0

    def has(self, name: str, resource: Resource) -> int:
        """Return how much of a resource a tenant has here."""
        tenant = self._tenants.get(name)
        return int(getattr(tenant, resource)) if tenant is not None else 0

    def gives(self, count: int, size: int, share: int) -> list[Ticket] | None:
        """Return the latest requests of the largest tenant that together free `count` requests and `size` bytes.

        Return None if that would leave this tenant less than `share`, which is what the newcomer's tenant would then
        have: so tenants share a full queue equally.
        """
        resource: Resource = "count" if count > 0 else "size"
        most = self._most(resource)
        found: list[Ticket] = []
        freed = 0
        for one in reversed(most.queue) if most is not None else ():
            if one.waits:
                found.append(one)
                freed += one.size
            if len(found) >= count and freed >= size:
                break
        left = self.most(resource) - (len(found) if count > 0 else freed)
        return found if len(found) >= count and freed >= size and share <= left else None

    def _most(self, resource: Resource) -> _Tenant | None:
        """Return the tenant with the most of a resource, with a waiting request at the end of its queue.

        Entries of the heap may be outdated: a tenant may have less by now.
        """
        heap = self._ranked[resource]
        while heap:
            said, name = heap[0]
            tenant = self._tenants.get(name)
            if tenant is None or not tenant.count:
                heappop(heap)
            elif (has := getattr(tenant, resource)) != -said:
                heapreplace(heap, (-has, name))
            else:
                self._trim(tenant.queue)
                return tenant
        return None

    def _trim(self, queue: deque[Ticket]) -> None:
        """Drop the tickets that have left from a queue's end.

        Otherwise each displaced request would pass all those displaced before it.
        """
        while not queue[-1].waits:
            queue.pop()
            self._gone -= 1

    def _rank(self, name: str, tenant: _Tenant) -> None:
        for resource, heap in self._ranked.items():
            heappush(heap, (-getattr(tenant, resource), name))
            if len(heap) > 64 + 4 * len(self._tenants):
                heap[:] = [(-getattr(one, resource), name) for name, one in self._tenants.items() if one.count]
                heapify(heap)

    def ahead(self, name: str) -> float:
        """Return the prefill seconds that precede a newcomer of this tenant.

        Before it, each other tenant sends as much as this tenant has in line, and one request more; at most all that
        waits.
        """
        tenant = self._tenants.get(name)
        own = tenant.work if tenant is not None else 0.0
        others = self._present - (tenant is not None and tenant.count > 0)
        mean = self.work / self.count if self.count else 0.0
        return min(self.work, own * (others + 1) + others * mean)
