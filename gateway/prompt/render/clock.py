"""The day that a model's engines print, where its chat template prints the date.

Engines print the day of their own time zone, and nothing tells which one that is. What an engine printed at one moment
leaves some of the zones that there are, and what it printed in the course of a day leaves one. All zones begin their
days at a quarter of an hour of UTC, so an engine is asked again behind each quarter, and is known in between.
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
    """Return the days that it may be in these zones at `now` (seconds since 1970), the earliest first."""
    return _days(zones, int((now - MARGIN) // _QUARTER), int((now + MARGIN) // _QUARTER))


@lru_cache(64)
def _days(zones: frozenset[int], *quarters: int) -> tuple[date, ...]:
    days = {(quarter + zone) // _A_DAY for quarter in quarters for zone in zones}
    return tuple(date.fromordinal(_EPOCH + day) for day in sorted(days))


def zones_left(zones: frozenset[int], printed: Collection[date], since: float, until: float) -> frozenset[int]:
    """Return those of `zones` in which it was one of the days `printed` at the moment `since` or `until`.

    If it was so in none of them, because summer time began or ended or the engine's clock was set, all zones of the
    world are tried. If it was so in no zone at all, nothing is known, and all zones are returned.
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
    """The clock of a model's engines, as far as it is known."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.now = now
        self.zones: frozenset[int] | None = None  # that its engines may be in; None: the gateway's own

    def moments(self) -> list[datetime]:
        """Return the engines' time now, once for each day that it may be in their time zones."""
        now = self.now()
        here = datetime.fromtimestamp(now)
        return (
            [here] if self.zones is None else [datetime.combine(day, here.time()) for day in days_in(self.zones, now)]
        )

    def on(self, day: date) -> datetime:
        return datetime.combine(day, datetime.fromtimestamp(self.now()).time())

    def strftime_now(self, pattern: str) -> str:
        return self.moments()[0].strftime(pattern)
