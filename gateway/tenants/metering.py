"""The admission of requests by their tenants' limits, and the counting of what each request cost when it ends.

A request's *claim* on a limit is what it adds to the limit's count in the present window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ApiError
from . import limits as rules
from .limits import DAY, MONTH, OUTPUT, REQUESTS, Account, Claim, Limits
from .tenant import Tenant

if TYPE_CHECKING:
    from .shared import Pending, SharedCounts

# Kinds of limit whose counts do not shrink within a window, except for requests that the gateway has no place for. Once
# such a count is at its limit, a request can be refused without asking Redis.
ONLY_GROW = frozenset((REQUESTS, OUTPUT))

MOST_GONE = 1000  # accounts that are kept of tenants that were removed

Decided = Callable[[ApiError | None], None]


class Charge:
    """What one request adds to the counts of its tenant's limits; kept until the request has ended.

    `wanted`: the claims, one for each limit.
    `granted`: whether the limits allow the claims; None: not decided yet.
    `unread`: the estimated prompt tokens of a body that is not parsed, used if no engine reports them.
    `ended`: whether the request has ended.
    `unserved`: whether the gateway refused the request because of its own load or for lack of replicas. Such a request
        does not count against the limit of requests.
    """

    __slots__ = ("account", "limits", "wanted", "unread", "granted", "ended", "unserved", "_clock")

    def __init__(self, account: Account, limits: Limits, wanted: Sequence[Claim], clock: Callable[[], float]):
        self.account, self.limits, self.wanted, self._clock = account, limits, wanted, clock
        self.granted: bool | None = None
        self.unread = 0
        self.ended = self.unserved = False

    def header_lines(self) -> bytes:
        """Return the `x-ratelimit-*` header lines for the client."""
        return rules.header_lines(self.limits, self.account, self._clock())

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the `x-ratelimit-*` headers for an answer that the gateway itself writes."""
        return rules.headers(self.limits, self.account, self._clock())


def forward_clock(wall: Callable[[], float], running: Callable[[], float]) -> Callable[[], float]:
    """Return a clock, in seconds since 1970, that runs on steadily when the machine's clock is set back.

    If the clock went back by an hour, requests would be counted in windows that are already full. `wall`: the machine's
    clock, in seconds since 1970. `running`: a monotonic clock, in seconds.
    """
    ahead = float("-inf")

    def now() -> float:
        nonlocal ahead
        ran = running()
        ahead = max(ahead, wall() - ran)
        return ran + ahead

    return now


class Metering:
    """The accounts of all tenants in this gateway."""

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        refused: Callable[[str, str], None] = lambda tenant, limit: None,
        wall: Callable[[], float] = time.time,
        running: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the meter without accounts.

        `clock`: returns seconds since 1970; None: a `forward_clock` of `wall` and `running`. `refused`: called for each
        refused request with its tenant's name and the kind of limit that was reached.
        """
        self._clock, self._refused = clock or forward_clock(wall, running), refused
        self.shared: SharedCounts | None = None  # with Redis
        self._accounts: dict[str, Account] = {}
        self._gone: dict[str, Account] = {}  # accounts of removed tenants, the latest at the end

    def status(self) -> dict[str, Any]:
        if self.shared is None:
            return {"joined": None, "reason": "counted by this gateway alone", "gateways": 1}
        return {"joined": self.shared.joined, "reason": self.shared.reason, "gateways": self.shared.gateways}

    def running(self) -> dict[str, int]:
        """Return, by tenant's name, the number of its requests that run in this gateway."""
        return {name: account.running for name, account in self._accounts.items()}

    def forget(self, name: str) -> None:
        """Remove the account of a tenant that the key file no longer has.

        The counts of the last 1,000 removed tenants are kept in case a tenant comes back.
        """
        account = self._accounts.pop(name, None)
        if account is not None:
            self._gone[name] = account
            if len(self._gone) > MOST_GONE:
                del self._gone[next(iter(self._gone))]

    def accounts(self) -> Collection[Account]:
        return self._accounts.values()

    def account(self, name: str) -> Account:
        if name not in self._accounts:
            self._accounts[name] = self._gone.pop(name, None) or Account(name)
        return self._accounts[name]

    def refusal(self, tenant: Tenant) -> ApiError | None:
        """Return the error for a tenant's request that can be refused before its body is read, or None.

        A request is refused so early if its tenant has reached a limit on requests or output tokens per minute. These
        limits stay reached until the minute ends, whatever the body holds.
        """
        limits, now = tenant.limits, self._clock()
        if limits is None:
            return None
        account = self.account(tenant.name)
        over = rules.refused(rules.claims(limits, 0, now, ONLY_GROW), account.count_seen)
        if over is None:
            return None
        self._refused(account.name, over.kind)
        return rules.error(over, limits, account, now)

    def charge(self, tenant: Tenant, tokens: int) -> Charge | None:
        """Return what a request with this many prompt tokens adds to its tenant's counts; None if there are no limits.

        Nothing is counted yet; `claim` does that.
        """
        limits = tenant.limits
        if limits is None:
            return None
        return Charge(self.account(tenant.name), limits, rules.claims(limits, tokens, self._clock()), self._clock)

    def claim(self, charge: Charge, then: Decided) -> None:
        """Decide whether the tenant's limits allow a request, in Redis if gateways count together.

        `then`: called with the error that refuses the request, or None, perhaps before this function returns. It is not
        called if the request ends before the decision.
        """

        def decided(over: Claim | None, share: int = 1) -> None:
            charge.granted = over is None
            if over is not None:
                self._refused(charge.account.name, over.kind)
            if charge.ended:
                self.settle(charge, 0, 0, charge.unserved)
            else:
                then(None if over is None else rules.error(over, charge.limits, charge.account, self._clock(), share))

        def decide(pending: Pending, by_redis: bool) -> None:
            if by_redis:
                decided(pending.over)
            else:
                over, share = self._decide(charge)
                pending.granted = over is None
                decided(over, share)

        if self.shared is None:
            decided(*self._decide(charge))
        else:
            self.shared.claim(charge.account, charge.wanted, decide)

    def _decide(self, charge: Charge) -> tuple[Claim | None, int]:
        """Decide by the counts known in this gateway whether the limits allow a request, and count it if so.

        Returns the claim that would exceed its limit, or None. The second result is the number of equal parts into
        which each limit is split, one for each gateway. It is 1 unless Redis cannot be reached.
        """
        account, shared = charge.account, self.shared
        share = 1 if shared is None or shared.joined else shared.gateways
        count = account.count_seen if shared is not None and shared.joined else account.count_here
        over = rules.refused(charge.wanted, count, share)
        if over is None:
            account.take(charge.wanted)
        return over, share

    def settle(self, charge: Charge, input: int, output: int, unserved: bool = False) -> None:
        """Replace, in the tenant's counts, what a request claimed in advance by the tokens that it cost.

        Called when the request has ended. `input`, `output`: its cost in tokens. `unserved`: the gateway refused it
        because of its own load or for lack of replicas, so it does not count against the limit of requests.
        """
        charge.ended, charge.unserved = True, unserved
        if not charge.granted:
            return  # refused, or not decided yet: then the decision calls this again
        account, now = charge.account, self._clock()
        account.running -= 1
        for claim in charge.wanted:
            if claim.kind in rules.OF_PROMPTS:
                self._add(account, claim.kind, claim.window, input - claim.cost)
            elif claim.kind == REQUESTS and unserved:
                self._add(account, REQUESTS, claim.window, -claim.cost)
            if claim.kind in (OUTPUT, DAY, MONTH):
                self._add(account, claim.kind, rules.window(claim.kind, now), output)
        if self.shared is not None and charge.limits.concurrent_requests is not None:
            self.shared.ran(account)

    def _add(self, account: Account, kind: str, window: int, by: int) -> None:
        if by:
            account.add(kind, window, by)
            if self.shared is not None:
                self.shared.charge(account.name, kind, window, by)
