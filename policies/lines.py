"""Who waits in front of a fleet, and who is next: a line for each class, and in it deficit round robin over tenants.

Deficit round robin is Shreedhar's and Varghese's ("Efficient fair queuing using deficit round robin", IEEE/ACM
Transactions on Networking 4(3), 1996): each tenant in turn may send QUANTUM uncached tokens, and saves up for a prompt
of more. A prompt of less counts as that many: it takes its place in a step. No I/O, no clock: `now` is in seconds of
the caller's.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush, heapreplace
from math import exp
from typing import Any, Literal

from .classes import QosClass, Slo
from .costs import Costs

QUANTUM = 512  # uncached tokens a turn
ABSENT = ""  # among a line's targets: those that wait in it wait until a replica is ready for them
Resource = Literal["count", "size"]  # of the queue, by the names of a tenant's sums: requests and bytes
_WINDOW = 5.0  # seconds of waiting over which a line's pace is taken
_PRIOR = 1.0  # and that its first guess counts as


class Ticket:
    """A request that wants to be sent. `since`: when its client began to wait; `held`: seconds since then in which
    nobody could be sent, as the caller did not run; `size`: bytes that it holds; `payload`: the caller's. The rest is
    the `Admission`'s."""

    __slots__ = (
        "qos", "tenant", "slo", "since", "held", "size", "payload",
        # uncached tokens and seconds of its prefill, as last quoted; when it is too late; whether it waits, and where
        "tokens", "own", "deadline", "waits", "line",
        # what was predicted when it was admitted: seconds from `since` to its first token, whether by costs that had
        # learned anything; where its costs are, and among how many streams with how much context it will decode there
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
    """Seconds of prefill that leave a line in a second in which somebody waits in it."""

    __slots__ = ("_work", "_seconds", "_at")

    def __init__(self, guess: float) -> None:
        self._work, self._seconds, self._at = guess * _PRIOR, _PRIOR, 0.0

    @property
    def value(self) -> float:
        return self._work / self._seconds

    def passed(self, now: float, waiting: bool) -> None:
        """It is `now`; since the last call somebody was `waiting`, or nobody."""
        if waiting and now > self._at:
            kept = exp((self._at - now) / _WINDOW)
            self._work *= kept
            self._seconds = self._seconds * kept + _WINDOW * (1.0 - kept)
        self._at = now

    def held_up(self, seconds: float) -> None:
        """Of the time since the last call nobody could leave for so long."""
        self._at += seconds

    def left(self, work: float) -> None:
        self._work += work


class _Tenant:
    """Those of one tenant in a line. `deficit`: tokens that it may send before its turn is over; `work`: seconds of
    their prefill; `count` and `size`: how many they are and their bytes; `queue` has tickets that have left as well."""

    __slots__ = ("queue", "deficit", "work", "count", "size")

    def __init__(self) -> None:
        self.queue: deque[Ticket] = deque()
        self.deficit = self.work = 0.0
        self.count = self.size = 0


class Line:
    """Those of one class that wait for one of the same replicas, the `targets`; empty: for any. `work`: seconds of
    their prefill; `count` and `size`: how many they are and their bytes."""

    def __init__(self, qos: QosClass, guess: float, targets: frozenset[str] = frozenset()) -> None:
        self.qos, self.pace, self.targets = qos, Pace(guess), targets
        self.work, self.count, self.size = 0.0, 0, 0
        self._tenants: dict[str, _Tenant] = {}
        self._present = 0  # tenants of whom somebody waits
        self._ranked: dict[Resource, list[tuple[int, str]]] = {"count": [], "size": []}  # heaps, see `_most`
        self._turns: deque[str] = deque()  # their names, whose turn it is first
        self._gone = 0  # of the tickets in the queues, those that have left

    @property
    def is_absent(self) -> bool:
        """Whether no replica is ready for those that wait here, as far as was seen."""
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
        """Who is next."""
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
        """It is sent: its tenant pays for it."""
        self.pace.passed(now, True)
        self.pace.left(ticket.own)
        tenant = self._tenants[ticket.tenant]
        tenant.deficit = max(0.0, tenant.deficit - max(QUANTUM, ticket.tokens))
        self._leave(ticket)

    def drop(self, ticket: Ticket, now: float) -> None:
        """It leaves without being sent."""
        self.pace.passed(now, True)
        self._leave(ticket)

    def remove(self, ticket: Ticket, now: float) -> None:
        """It is to wait in another line."""
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
        """Forget those that have left, wherever they stood."""
        for name, tenant in [*self._tenants.items()]:
            tenant.queue = deque([one for one in tenant.queue if one.waits])
            if not tenant.queue:
                del self._tenants[name]
        self._turns = deque([name for name in self._turns if name in self._tenants])
        self._gone = 0

    def last(self, resource: Resource) -> Ticket | None:
        """Return who is to go if somebody must: the latest of the tenant that has most of the queue."""
        most = self._most(resource)
        return most.queue[-1] if most is not None else None

    def most(self, resource: Resource) -> int:
        """Return what the tenant has that has most."""
        most = self._most(resource)
        return int(getattr(most, resource)) if most is not None else 0

    def has(self, name: str, resource: Resource) -> int:
        tenant = self._tenants.get(name)
        return int(getattr(tenant, resource)) if tenant is not None else 0

    def gives(self, count: int, size: int, share: int) -> list[Ticket] | None:
        """Return the latest of the tenant that has most, as many as free so many requests and bytes. None if that
        leaves it less than a `share`, what a newcomer's tenant then has: so a full queue is shared out."""
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
        """Return the tenant that has most, of whose queue the last one waits. What a heap says of a tenant is what it
        has, or had before some left."""
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
        """Forget those that have left from a queue's end, so that nobody passes them again: where its latest go one by
        one, each would pass all that went before it."""
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
        """Seconds of prefill that go before a newcomer of this tenant: as much of each other tenant as it has itself
        in line, and one request more, or all that waits if that is less."""
        tenant = self._tenants.get(name)
        own = tenant.work if tenant is not None else 0.0
        others = self._present - (tenant is not None and tenant.count > 0)
        mean = self.work / self.count if self.count else 0.0
        return min(self.work, own * (others + 1) + others * mean)
