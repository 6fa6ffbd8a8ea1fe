"""The day that a model's engines print, where its chat template prints the date.

Engines print the day of their own time zone, which they do not report. Each date that an engine prints rules out some
zones, and after a day only one is left. In every zone the day begins at a quarter of an hour of UTC, so an engine is
asked again after each quarter, and its date is certain in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import date, datetime
from functools import lru_cache

_EPOCH = date(1970, 1, 1).toordinal()
_QUARTER, _A_DAY = 900, 96  # seconds; quarters
MARGIN = 5  # seconds by which an engine's clock may differ from the gateway's
ALL_ZONES = frozenset(range(-48, 57))  # in quarters of an hour from UTC: from -12:00 to +14:00


def days_in(zones: frozenset[int], now: float) -> Sequence[date]:
    """Return the dates that these zones may have at `now` (seconds since 1970), in ascending order."""
    return _days(zones, int((now - MARGIN) // _QUARTER), int((now + MARGIN) // _QUARTER))


@lru_cache(64)
def _days(zones: frozenset[int], *quarters: int) -> tuple[date, ...]:
    days = {(quarter + zone) // _A_DAY for quarter in quarters for zone in zones}
    return tuple(date.fromordinal(_EPOCH + day) for day in sorted(days))


def zones_left(zones: frozenset[int], printed: Collection[date], since: float, until: float) -> frozenset[int]:
    """Return those of `zones` whose date at `since` or `until` (seconds since 1970) is one of `printed`.

    If none is left, because summer time began or ended or the engine's clock was set, all zones of the world are tried.
    If no zone at all fits, nothing is known, and all zones are returned.
    """
    left = frozenset(
        zone
        for zone in zones
        for now in (since, until)
        if any(day in printed for day in days_in(frozenset((zone,)), now))
    )
    if left or zones == ALL_ZONES:
        return left or ALL_ZONES
    return zones_left(ALL_ZONES, printed, since, until)


def seconds_to_next_look(now: float) -> float:
    """Return the seconds after which the next quarter of an hour has begun by every engine's clock."""
    return _QUARTER - (now - MARGIN) % _QUARTER


def another_time(moment: datetime, hours: int) -> datetime:
    """Return another time of the same day, whose hour, minute, second and microsecond all differ."""
    return moment.replace(
        hour=(moment.hour + hours) % 24,
        minute=(moment.minute + 7 * hours) % 60,
        second=(moment.second + 11 * hours) % 60,
        microsecond=(moment.microsecond + 1) % 1_000_000,
    )


class Clock:
    """The clock of a model's engines, as far as their time zones are known."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.now = now
        self.zones: frozenset[int] | None = None  # the zones that its engines may be in; None: the gateway's own

    def moments(self) -> list[datetime]:
        """Return the engines' time now, once for each date that their time zones may have."""
        now = self.now()
        here = datetime.fromtimestamp(now)
        return (
            [here] if self.zones is None else [datetime.combine(day, here.time()) for day in days_in(self.zones, now)]
        )

    def on(self, day: date) -> datetime:
        """Return the present time of day on this date."""
        return datetime.combine(day, datetime.fromtimestamp(self.now()).time())

    def strftime_now(self, pattern: str) -> str:
        """Return the time now as the template prints it, on the earliest possible date."""
        return self.moments()[0].strftime(pattern)
