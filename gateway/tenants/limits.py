"""What a tenant may have in a window of time, and what it has had. Pure: the time comes in as an argument.

A limit is a number for each window of the clock: a minute, a day or a month of UTC. One rule holds for all of them,
here and in `shared.lua`: a request is refused where the count and its cost, but at least 1, are more than the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from ..errors import ApiError

RUNNING, REQUESTS, INPUT, OUTPUT, DAY, MONTH = "running", "requests", "input", "output", "day", "month"
# What each kind of count is of, in words; and its name in `x-ratelimit-*`, for those that are told.
WORDS = {
    RUNNING: "concurrent requests",
    REQUESTS: "requests per minute",
    INPUT: "input tokens per minute",
    OUTPUT: "output tokens per minute",
    DAY: "tokens per day",
    MONTH: "tokens per month",
}
TOLD = {REQUESTS: b"requests", INPUT: b"input-tokens", OUTPUT: b"output-tokens"}
BUDGETS = frozenset((DAY, MONTH))
OF_PROMPTS = frozenset((INPUT, DAY, MONTH))  # what a prompt's tokens are counted in
MINUTE_SECONDS, DAY_SECONDS = 60, 86_400


class Limits(NamedTuple):
    """Of one tenant; None: no limit. Named as in the key file."""

    concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None

    @property
    def of_prompts(self) -> bool:
        """Whether the tokens of a prompt have to be known before its request is admitted."""
        return (self.input_tokens_per_minute, self.tokens_per_day, self.tokens_per_month) != (None, None, None)


KINDS = dict(zip(Limits._fields, WORDS))  # field -> kind


class Cost(NamedTuple):
    """What a request has cost, in tokens; `cached` of `input`."""

    input: int
    cached: int
    output: int


class Claim(NamedTuple):
    """What a request wants of one limit."""

    kind: str
    window: int
    limit: int
    cost: int


def window(kind: str, now: float) -> int:
    """The number of the window that `now` lies in; `now` in seconds since 1970."""
    return _windows(int(now // MINUTE_SECONDS))[kind]


@lru_cache(4)
def _windows(minute: int) -> dict[str, int]:
    """All windows of a minute: each of them begins with one."""
    at = datetime.fromtimestamp(minute * MINUTE_SECONDS, UTC)
    day, month = minute * MINUTE_SECONDS // DAY_SECONDS, 12 * at.year + at.month - 1
    return {RUNNING: 0, REQUESTS: minute, INPUT: minute, OUTPUT: minute, DAY: day, MONTH: month}


def seconds_left(kind: str, now: float) -> float:
    """Until its window ends; of what runs, a second."""
    if kind == RUNNING:
        return 1.0
    number = window(kind, now) + 1
    if kind == MONTH:
        return datetime(number // 12, number % 12 + 1, 1, tzinfo=UTC).timestamp() - now
    return number * (DAY_SECONDS if kind == DAY else MINUTE_SECONDS) - now


@lru_cache(4096)
def _there_are(limits: Limits) -> tuple[tuple[str, int], ...]:
    return tuple((kind, limit) for kind, limit in zip(WORDS, limits) if limit is not None)


def claims(limits: Limits, tokens: int, now: float, kinds: Collection[str] = tuple(WORDS)) -> list[Claim]:
    """What a request with so many prompt tokens wants, of these kinds."""
    windows = _windows(int(now // MINUTE_SECONDS))
    return [
        Claim(
            kind,
            windows[kind],
            limit,
            tokens if kind in OF_PROMPTS else 0 if kind == OUTPUT else 1,
        )
        for kind, limit in _there_are(limits)
        if kind in kinds
    ]


def refused(wanted: Sequence[Claim], count: Callable[[Claim], int], share: int = 1) -> Claim | None:
    """The first claim that cannot be granted. `count`: of a claim's window so far. `share`: the part of each limit that
    is to be had here is one of so many."""
    for claim in wanted:
        if count(claim) + max(claim.cost, 1) > part(claim, share):
            return claim
    return None


def part(claim: Claim, share: int) -> int:
    """Of its limit, where one of so many shares is to be had."""
    return max(1, claim.limit // share)


class Counts:
    """By kind, of the newest window that was counted in."""

    __slots__ = ("_by_kind",)

    def __init__(self) -> None:
        self._by_kind: dict[str, tuple[int, int]] = {}

    def get(self, kind: str, window: int) -> int:
        at, count = self._by_kind.get(kind, (window, 0))
        return count if at >= window else 0

    def add(self, kind: str, window: int, by: int) -> None:
        """What belongs to an older window is over."""
        at, count = self._by_kind.get(kind, (window, 0))
        if at <= window:
            self._by_kind[kind] = window, max(0, by + (count if at == window else 0))

    def put(self, kind: str, window: int, count: int) -> None:
        if self._by_kind.get(kind, (window, 0))[0] <= window:
            self._by_kind[kind] = window, count

    def set_back(self, now: float) -> None:
        """What was counted later than `now`, at a wrong time, counts as of now: to forget it would leave a month's
        limit without what it had had."""
        for kind, (at, count) in self._by_kind.items():
            self._by_kind[kind] = min(at, window(kind, now)), count

    def items(self) -> list[tuple[str, int, int]]:
        return [(kind, window, count) for kind, (window, count) in self._by_kind.items()]


class Account:
    """What one gateway knows of one tenant."""

    __slots__ = ("name", "own", "seen", "running", "others_running")

    def __init__(self, name: str):
        self.name = name
        self.own = Counts()  # admitted here
        self.seen = Counts()  # by all gateways, as last told, and here since
        self.running = 0  # here
        self.others_running = 0  # elsewhere, as last told

    def count_here(self, claim: Claim) -> int:
        return self.running if claim.kind == RUNNING else self.own.get(claim.kind, claim.window)

    def count_seen(self, claim: Claim) -> int:
        if claim.kind == RUNNING:
            return self.running + self.others_running
        return self.seen.get(claim.kind, claim.window)

    def add(self, kind: str, window: int, by: int) -> None:
        self.own.add(kind, window, by)
        self.seen.add(kind, window, by)

    def take(self, wanted: Sequence[Claim]) -> None:
        """A request is admitted by what is known here."""
        self.running += 1
        for claim in wanted:
            if claim.kind != RUNNING:
                self.add(claim.kind, claim.window, claim.cost)


@lru_cache(4096)
def _template(limits: Limits) -> bytes:
    return b"".join(
        b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%ds\r\n"
        % (name, limit, name, name)
        for kind, limit in _there_are(limits)
        if (name := TOLD.get(kind)) is not None
    )


def header_lines(limits: Limits, account: Account, now: float) -> bytes:
    """What clients are told of their limits, all of which are of a minute."""
    reset = MINUTE_SECONDS - int(now % MINUTE_SECONDS)
    values: list[int] = []
    for claim in claims(limits, 0, now, TOLD):
        values += (max(0, claim.limit - account.count_seen(claim)), reset)
    return _template(limits) % tuple(values)


def headers(limits: Limits, account: Account, now: float) -> list[tuple[bytes, bytes]]:
    """The same for an answer of the gateway's own."""
    lines = header_lines(limits, account, now).splitlines()
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]


def error(claim: Claim, limits: Limits, account: Account, now: float, share: int = 1) -> ApiError:
    """What is answered to a request that a limit refuses. `share`: as in `refused`."""
    told = headers(limits, account, now)
    what = f"{WORDS[claim.kind]} of this API key"
    if claim.cost > claim.limit:
        message = f"the prompt has {claim.cost} tokens, and the limit is {claim.limit} {what}: shorten it"
        return ApiError(429, message, code="request_too_large", headers=told, again=False, limit=WORDS[claim.kind])
    if claim.cost > (here := part(claim, share)):
        message = (
            f"the prompt has {claim.cost} tokens, and of the limit of {claim.limit} {what} this gateway has {here} while it "
            "cannot count together with the others: shorten it, or try again once it can"
        )
        return ApiError(429, message, code="request_too_large", headers=told, again=False, limit=WORDS[claim.kind])
    seconds = max(1, int(-(-seconds_left(claim.kind, now) // 1)))
    message = f"the limit of {claim.limit} {what} is reached; try again in {seconds} s"
    budget = claim.kind in BUDGETS
    return ApiError(
        429,
        message,
        type="insufficient_quota" if budget else None,
        code="insufficient_quota" if budget else "rate_limit_exceeded",
        headers=[(b"retry-after", b"%d" % seconds), *told],
        again=not budget,
        limit=WORDS[claim.kind],
    )
