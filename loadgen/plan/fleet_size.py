"""Search by simulation for the fewest replicas that keep an SLO, for several sizes of the KV cache.

For each cache size the number of replicas is doubled until enough requests are within the SLO; then the range down to
the largest number that was too small is bisected. This assumes that more replicas never do worse.

If the load was drawn for a request rate, a fleet is judged only by the requests sent while that rate is held
(`rates.steady`). Before, while conversations ramp up, and after the last one has begun, the fleet has less to do. A
load that does not hold its rate for long enough cannot size a fleet (`TooShort`).
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

# A rate is held long enough if it is held for LEAST_SECONDS, for LEAST_REQUESTS requests, and for as long as the load
# took to reach it. A fleet keeps up if, while the rate is held, it answers at least the share KEEPS_UP of the requests
# that are sent. It does not keep up if a longer load takes more than PILES_UP times as long to reach its rate.
LEAST_SECONDS, LEAST_REQUESTS = 30.0, 200
KEEPS_UP = 0.95
PILES_UP = 2.0


@dataclass(eq=False)
class TooShort(Exception):
    """The load ends before its rate has been held long enough to judge a fleet."""

    requests: int  # an estimate of how many the load would need
    answered: float  # requests answered per second in the load as it is


@dataclass(frozen=True, slots=True)
class Point:
    """The result of simulating one fleet."""

    replicas: int
    tokens: int  # of KV cache in each replica
    share: float  # of the requests that judge the fleet, failed ones included: those answered within the limits
    kept: bool  # the fleet is large enough
    report: Mapping[str, object]  # the figures of the requests that judge the fleet


@dataclass(slots=True)
class Size:
    """The search for the fewest replicas with one size of the KV cache: which number to try next. Performs no I/O."""

    tokens: int  # of KV cache in each replica
    most: int  # replicas to try at most
    missed: int = 0  # the largest number of replicas so far that was too small
    kept: int | None = None  # the smallest number so far that was enough
    points: dict[int, Point] = field(default_factory=dict)  # results by number of replicas
    records: Sequence[Record] = ()  # requests that judged the fleet which `found` returns

    @property
    def found(self) -> Point:
        """The result of the smallest fleet that was enough or, if none was, of the largest fleet that was tried."""
        return self.points[self.kept or self.missed]

    @property
    def number(self) -> int | None:
        """The number of replicas to try next; None when the search is over."""
        if self.kept is None:
            return min(2 * self.missed or 1, self.most) if self.missed < self.most else None
        return (self.missed + self.kept) // 2 if self.kept > self.missed + 1 else None

    def tell(self, point: Point, records: Sequence[Record]) -> None:
        """Record the result of the fleet that was tried, and the requests by which it was judged."""
        self.points[point.replicas] = point
        if point.kept:
            self.kept = point.replicas
        else:
            self.missed = point.replicas
        if point is self.found:
            self.records = records


# The assumption that `by_tokens` makes, in words for the list of assumptions.
BY_TOKENS = (
    "a decode step takes longer with the tokens in use, at the rate of that profile's own cache between empty and full"
)


def by_tokens(profile: Profile) -> Profile:
    """Return the profile with decode times that depend on the tokens in use, not on the share of the cache in use.

    Otherwise a larger cache would make the same work faster. Old and new times are equal when the profile's own cache
    is empty and when it is full.
    """
    step = profile.step
    if not profile.times_by_share:
        return profile
    per_token = (step.decode_usage + step.decode_usage_squared) / (profile.num_blocks * profile.block_size)
    context_token = step.decode_context_token + per_token
    step = replace(step, decode_usage=0.0, decode_usage_squared=0.0, decode_context_token=context_token)
    return replace(profile, step=step)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The settings that all fleets of a search have in common, and the SLO by which each fleet is judged."""

    setting: Setting  # its profiles are replaced for each fleet
    profile: Profile  # of one replica; the size of its cache is replaced
    slo: Mapping[str, float]  # limits in milliseconds
    attainment: float  # share of the requests that must be within the limits
    percentiles: Sequence[float] = PERCENTILES  # that reports show
    rate: float | None = None  # requests per second for which the load was drawn; None: it was not
    # by (replicas, tokens of cache): seconds that the first load which was too short took to reach its rate
    reached: dict[tuple[int, int], float] = field(default_factory=dict)

    def of(self, replicas: int, tokens: int) -> Setting:
        """Return the setting of a fleet of `replicas` replicas with `tokens` tokens of KV cache each."""
        profile = replace(self.profile, num_blocks=tokens // self.profile.block_size)
        return replace(self.setting, profiles=[profile] * replicas)

    def judged(self, size: Size, number: int, work: Workload, outcome: Outcome) -> tuple[Point, Sequence[Record]]:
        """Return the result of a fleet of `number` replicas, and the requests by which it was judged.

        `size`: the search for which it was simulated; `outcome`: the result of playing `work` on the fleet. Raises
        TooShort if only a longer load could judge the fleet.
        """
        whole = self._summary(outcome)
        whole_share = whole["goodput"]["share"]
        if self.rate is None or whole_share < self.attainment:  # ramp-up and end can only have raised the share
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
    """Search for the fewest replicas with every cache size until all searches are over. Raises TooShort.

    `sizes`: the searches, one per cache size, in which the results are recorded. Each round tries one number of
    replicas per size, in up to `processes` processes. `said`: called with each result.
    """
    while asked := [(size, size.number) for size in sizes if size.number is not None]:
        outcomes: Iterator[Outcome] = played(work, [fleet.of(number, size.tokens) for size, number in asked], processes)
        for (size, number), outcome in zip(asked, outcomes, strict=True):
            point, judged_by = fleet.judged(size, number, work, outcome)
            size.tell(point, judged_by)
            said(point)
