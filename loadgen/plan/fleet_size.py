"""How many replicas keep an SLO: a load played in virtual time on more and more of them, for several sizes of their
cache.

For each size the number is doubled until enough requests are within the limits, then the gap between that number and
the last that was too small is halved until they are neighbours. Presumes that more replicas never do worse.

Where the load was drawn for a rate, a fleet is judged by the time in which that rate is held (`rates.steady`), since it
has less to do while conversations begin to come and after the last one has begun. A load without such a time says
nothing of its rate (`TooShort`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from loadgen.drive.records import Record
from loadgen.report.rates import steady
from loadgen.report.summary import PERCENTILES, summarise
from loadgen.simulate import Outcome, Setting
from loadgen.simulate.verb import played
from loadgen.workload.conversations import Workload
from replicas.simulated.profile import Profile

# A rate is held long enough in so many seconds and requests, and in the time that it took to be reached. A fleet holds
# it if it answers in that time nearly as many as are sent then. Where a load that is longer takes so many times as long
# to reach its rate, requests pile up.
LEAST_SECONDS, LEAST_REQUESTS = 30.0, 200
KEEPS_UP = 0.95
PILES_UP = 2.0


class TooShort(Exception):
    """The load is over before its rate has been held long enough; with so many requests it should not be."""

    def __init__(self, requests: int, answered: float) -> None:
        self.requests, self.answered = requests, answered  # the latter in a second


@dataclass(frozen=True, slots=True)
class Point:
    """What one fleet made of the load."""

    replicas: int
    tokens: int  # of KV cache in each
    share: float  # of all requests, failed ones too, that were answered within the limits
    kept: bool
    report: Mapping[str, object]


@dataclass(slots=True)
class Size:
    """The search for one size of the cache. Pure: it says which number to try and is told what became of it."""

    tokens: int
    most: int
    missed: int = 0  # the largest number that was too small
    kept: int | None = None  # the smallest that was enough
    points: dict[int, Point] = field(default_factory=dict)
    records: Sequence[Record] = ()  # of the smallest that was enough, or the largest that was not

    @property
    def found(self) -> Point:
        """The smallest that was enough; where none was, the largest that was tried."""
        return self.points[self.kept or self.missed]

    @property
    def number(self) -> int | None:
        """To try next; None when the search is over."""
        if self.kept is None:
            return min(2 * self.missed or 1, self.most) if self.missed < self.most else None
        return (self.missed + self.kept) // 2 if self.kept > self.missed + 1 else None

    def tell(self, point: Point, records: Sequence[Record]) -> None:
        self.points[point.replicas] = point
        if point.kept:
            self.kept = point.replicas
        else:
            self.missed = point.replicas
        if point is self.found:
            self.records = records


# What is assumed where that is done.
BY_TOKENS = (
    "a decode step takes longer with the tokens in use, at the rate of that profile's own cache between empty and full"
)


def by_tokens(profile: Profile) -> Profile:
    """The profile with decode times by the tokens in use, where it has them by the share of its own cache in use.

    Else a larger cache would make the same work faster. Both agree where the cache is empty and where it is full.
    """
    step = profile.step
    if not profile.times_by_share:
        return profile
    per_token = (step.decode_usage + step.decode_usage_squared) / (profile.num_blocks * profile.block_size)
    return replace(
        profile,
        step=replace(
            step, decode_usage=0.0, decode_usage_squared=0.0, decode_context_token=step.decode_context_token + per_token
        ),
    )


@dataclass(frozen=True, slots=True)
class Fleet:
    """What all fleets that are tried have in common."""

    setting: Setting  # its profiles are replaced
    profile: Profile
    slo: Mapping[str, float]
    attainment: float
    percentiles: Sequence[float] = PERCENTILES
    rate: float | None = None  # that the load was drawn for, in requests a second
    reached: dict[tuple[int, int], float] = field(default_factory=dict)  # by fleet: after how long in a load too short

    def of(self, replicas: int, tokens: int) -> Setting:
        return replace(
            self.setting, profiles=[replace(self.profile, num_blocks=tokens // self.profile.block_size)] * replicas
        )

    def judged(self, size: Size, number: int, work: Workload, outcome: Outcome) -> tuple[Point, Sequence[Record]]:
        """What is to be said of a fleet, and the requests that it was judged by. Raises TooShort."""
        whole = self._summary(outcome)
        whole_share = whole["goodput"]["share"]
        if self.rate is None or whole_share < self.attainment:  # its beginning and its end only make it easier
            return self._point(size, number, whole, whole_share >= self.attainment), outcome.done
        began, ended = steady(outcome.done, work.conversations)
        needed = max(began, LEAST_SECONDS, LEAST_REQUESTS / self.rate)
        if ended - began < needed:
            before = self.reached.setdefault((number, size.tokens), began)
            if began > PILES_UP * before:
                return self._point(size, number, whole, False), outcome.done
            raise TooShort(math.ceil(1.1 * self.rate * (began + needed)), whole["request_throughput"])
        held = copy(outcome)
        held.done = [record for record in outcome.done if began <= record.due <= ended]
        held.began, held.ended, held.total = began, ended, len(held.done) + outcome.not_sent
        answered = sum(began <= record.last <= ended and record.error is None for record in outcome.done)
        report = self._summary(held) | {"request_throughput": round(answered / (ended - began), 3)}
        keeps_up = answered >= KEEPS_UP * len(held.done)
        kept = keeps_up and report["goodput"]["share"] >= self.attainment
        return self._point(size, number, report, kept), held.done

    def _summary(self, outcome: Outcome) -> dict[str, object]:
        return summarise(outcome, self.slo, self.percentiles)

    def _point(self, size: Size, number: int, report: dict[str, object], kept: bool) -> Point:
        target = f"{number} simulated engines of {size.tokens:,} tokens"
        report = {"target": target, "model": self.profile.name, **report}
        return Point(number, size.tokens, report["goodput"]["share"], kept, report)


def search(
    work: Workload,
    fleet: Fleet,
    sizes: Sequence[Size],
    processes: int = 1,
    said: Callable[[Point], None] = lambda point: None,
) -> None:
    """Until every size has its answer; each round tries one number of each, in as many processes. Raises TooShort."""
    while asked := [(size, size.number) for size in sizes if size.number is not None]:
        outcomes: Iterator[Outcome] = played(work, [fleet.of(number, size.tokens) for size, number in asked], processes)
        for (size, number), outcome in zip(asked, outcomes, strict=True):
            point, judged_by = fleet.judged(size, number, work, outcome)
            size.tell(point, judged_by)
            said(point)
