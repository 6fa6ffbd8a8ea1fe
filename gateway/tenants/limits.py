"""The limits of a tenant per window of time, and the counts against them. Pure: the time is an argument.

A limit is the most that may be counted in each window: a minute, a day or a month of UTC. A request's *claim* on a
limit is what it adds to the present window's count. One rule holds for all limits, here and in `shared.lua`: a request
is refused if the count plus its claim, which counts as 1 at least, exceeds the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from ..errors import ApiError

RUNNING, REQUESTS, INPUT, OUTPUT, DAY, MONTH = "running", "requests", "input", "output", "day", "month"
# Each kind of limit in words, and (TOLD) the names in `x-ratelimit-*` headers of those that clients are told of.
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
OF_PROMPTS = frozenset((INPUT, DAY, MONTH))  # kinds that count a prompt's tokens
MINUTE_SECONDS, DAY_SECONDS = 60, 86_400


class Limits(NamedTuple):
    """The limits of one tenant, named as in the key file; None: no limit."""

    concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None

    @property
    def of_prompts(self) -> bool:
        """Whether a limit on input tokens or on tokens per day or month is set.

        With such a limit, the tokens of a prompt must be counted before its request can be admitted.
        """
        return (self.input_tokens_per_minute, self.tokens_per_day, self.tokens_per_month) != (None, None, None)


KINDS = dict(zip(Limits._fields, WORDS))  # field of `Limits` -> kind of limit


class Cost(NamedTuple):
    """The cost of a request in tokens.

    `input`: the prompt's tokens; `cached`: those of them that the engine found in its KV cache; `output`: the answer's
    tokens.
    """

    input: int
    cached: int
    output: int


class Claim(NamedTuple):
    """What a request adds to the count of one limit in one window."""

    kind: str  # of the limit, a key of WORDS
    window: int  # the window's number
    limit: int
    cost: int  # what the request adds to the window's count


def window(kind: str, now: float) -> int:
    """Return the number of the time window that contains `now` (seconds since 1970), for this kind of limit.

    A kind's windows are minutes, days or months, numbered in the order of time.
    """
    return _windows(int(now // MINUTE_SECONDS))[kind]


@lru_cache(4)
def _windows(minute: int) -> dict[str, int]:
    """Return, by kind of limit, the number of the time window that contains this minute (minutes since 1970)."""
    at = datetime.fromtimestamp(minute * MINUTE_SECONDS, UTC)
    day, month = minute * MINUTE_SECONDS // DAY_SECONDS, 12 * at.year + at.month - 1
    return {RUNNING: 0, REQUESTS: minute, INPUT: minute, OUTPUT: minute, DAY: day, MONTH: month}


def seconds_left(kind: str, now: float) -> float:
    """Return how many seconds after `now` the present window of this kind of limit ends.

    Concurrent requests have no window, so for them 1 is returned.
    """
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
    """Return a request's claims: for each limit that is set, what the request adds to the limit's count.

    `tokens`: the number of the prompt's tokens; `now`: seconds since 1970; `kinds`: the kinds of limit to include.
    """
    windows = _windows(int(now // MINUTE_SECONDS))
    return [
        Claim(kind, windows[kind], limit, tokens if kind in OF_PROMPTS else 0 if kind == OUTPUT else 1)
        for kind, limit in _there_are(limits)
        if kind in kinds
    ]


def refused(wanted: Sequence[Claim], count: Callable[[Claim], int], share: int = 1) -> Claim | None:
    """Return the first claim (addition to a limit's count) that would exceed its limit, or None.

    `count`: returns the present count of a claim's limit in its window. `share`: each limit is split into this many
    equal parts, of which this gateway may use one.
    """
    return next((claim for claim in wanted if count(claim) + max(claim.cost, 1) > part(claim, share)), None)


def part(claim: Claim, share: int) -> int:
    """Return the part of the claim's limit that this gateway may use: the limit divided by `share`, but at least 1."""
    return max(1, claim.limit // share)


class Counts:
    """One count for each kind of limit, in the newest window (minute, day or month) in which something was counted."""

    __slots__ = ("_by_kind",)

    def __init__(self) -> None:
        self._by_kind: dict[str, tuple[int, int]] = {}

    def get(self, kind: str, window: int) -> int:
        at, count = self._by_kind.get(kind, (window, 0))
        return count if at >= window else 0

    def add(self, kind: str, window: int, by: int) -> None:
        """Add `by` to the count of a window, unless a newer window has been counted, since the older one is over."""
        at, count = self._by_kind.get(kind, (window, 0))
        if at <= window:
            self._by_kind[kind] = window, max(0, by + (count if at == window else 0))

    def put(self, kind: str, window: int, count: int) -> None:
        if self._by_kind.get(kind, (window, 0))[0] <= window:
            self._by_kind[kind] = window, count

    def items(self) -> list[tuple[str, int, int]]:
        return [(kind, window, count) for kind, (window, count) in self._by_kind.items()]


class Account:
    """The counts of one tenant's requests, as one gateway knows them."""

    __slots__ = ("name", "own", "seen", "running", "others_running")

    def __init__(self, name: str):
        self.name = name
        self.own = Counts()  # of requests that this gateway admitted
        self.seen = Counts()  # of all gateways' requests, as last reported, and of those admitted here since
        self.running = 0  # requests that run in this gateway
        self.others_running = 0  # requests that run in other gateways, as last reported

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
        """Add a request with these claims to the counts, after this gateway has admitted it without asking Redis."""
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
    """Return the `x-ratelimit-*` header lines for a client, as bytes.

    They show the limits per minute, how much of each is left, and the seconds until the minute ends.
    """
    reset = MINUTE_SECONDS - int(now % MINUTE_SECONDS)
    values: list[int] = []
    for claim in claims(limits, 0, now, TOLD):
        values += (max(0, claim.limit - account.count_seen(claim)), reset)
    return _template(limits) % tuple(values)


def headers(limits: Limits, account: Account, now: float) -> list[tuple[bytes, bytes]]:
    """Return the `x-ratelimit-*` headers, as names and values, for an answer that the gateway itself writes."""
    lines = header_lines(limits, account, now).splitlines()
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]


def error(claim: Claim, limits: Limits, account: Account, now: float, share: int = 1) -> ApiError:
    """Return the 429 error for a request that would exceed the limit of this claim.

    `share`: the number of equal parts into which limits are split among gateways now, 1 if they are not split. The
    error asks the client not to retry if the prompt alone exceeds the limit, or if the limit is per day or month.
    """
    told, kind, here = headers(limits, account, now), WORDS[claim.kind], part(claim, share)
    if claim.cost > here:
        own = "" if claim.cost > claim.limit else f", of which this gateway has {here} while it counts alone"
        message = f"the prompt has {claim.cost} tokens, and the limit is {claim.limit} {kind} of this API key{own}: shorten it"
        return ApiError(429, message, code="request_too_large", headers=told, again=False, limit=kind)
    seconds, budget = math.ceil(max(1, seconds_left(claim.kind, now))), claim.kind in BUDGETS
    message = f"the limit of {claim.limit} {kind} of this API key is reached; try again in {seconds} s"
    type, code = ("insufficient_quota",) * 2 if budget else (None, "rate_limit_exceeded")
    told = [(b"retry-after", b"%d" % seconds), *told]
    return ApiError(429, message, type=type, code=code, headers=told, again=not budget, limit=kind)
