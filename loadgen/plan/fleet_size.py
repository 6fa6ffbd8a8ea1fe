"""How many replicas keep an SLO: a load played in virtual time on more and more of them, for several sizes of their
cache.

For each size the number is doubled until enough requests are within the limits, then the gap between that number and
the last that was too small is halved until they are neighbours. Presumes that more replicas never do worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from loadgen.drive.records import Record
from loadgen.report.summary import PERCENTILES, summarise
from loadgen.simulate import Outcome, Setting
from loadgen.simulate.verb import played
from loadgen.workload.conversations import Workload
from replicas.simulated.profile import Profile


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

    def of(self, replicas: int, tokens: int) -> Setting:
        return replace(
            self.setting, profiles=[replace(self.profile, num_blocks=tokens // self.profile.block_size)] * replicas
        )

    def judged(self, size: Size, number: int, outcome: Outcome) -> Point:
        report = {
            "target": f"{number} simulated engines of {size.tokens:,} tokens",
            "model": self.profile.name,
            **summarise(outcome, self.slo, self.percentiles),
        }
        share = report["goodput"]["share"]
        return Point(number, size.tokens, share, share >= self.attainment, report)


def search(
    work: Workload,
    fleet: Fleet,
    sizes: Sequence[Size],
    processes: int = 1,
    said: Callable[[Point], None] = lambda point: None,
) -> None:
    """Until every size has its answer; each round tries one number of each, in as many processes."""
    while asked := [(size, size.number) for size in sizes if size.number is not None]:
        outcomes: Iterator[Outcome] = played(work, [fleet.of(number, size.tokens) for size, number in asked], processes)
        for (size, number), outcome in zip(asked, outcomes, strict=True):
            point = fleet.judged(size, number, outcome)
            size.tell(point, outcome.done)
            said(point)
