"""The date that a model's engines write into prompts, if the chat template prints the date.

Engines print the date of their own time zone, which they do not report. Each date that an engine prints rules out some
time zones, and after a day only one is left. In every zone the day begins at a full quarter of an hour of UTC. So an
engine is asked again after each quarter, and its date is certain in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import date, datetime
from functools import lru_cache

_EPOCH = date(1970, 1, 1).toordinal()
_QUARTER, _A_DAY = 900, 96  # seconds in a quarter of an hour; quarters in a day
MARGIN = 5  # seconds by which an engine's clock may differ from the gateway's
ALL_ZONES = frozenset(range(-48, 57))  # in quarters of an hour from UTC: from -12:00 to +14:00


def days_in(zones: frozenset[int], now: float) -> Sequence[date]:
    """Return the dates that clocks in these time zones may show at `now` (seconds since 1970), in ascending order.

    `zones`: time zones in quarters of an hour from UTC. The clocks may be wrong by up to 5 seconds.
    """
    return _days(zones, int((now - MARGIN) // _QUARTER), int((now + MARGIN) // _QUARTER))


@lru_cache(64)
def _days(zones: frozenset[int], *quarters: int) -> tuple[date, ...]:
    days = {(quarter + zone) // _A_DAY for quarter in quarters for zone in zones}
    return tuple(date.fromordinal(_EPOCH + day) for day in sorted(days))


def zones_left(zones: frozenset[int], printed: Collection[date], since: float, until: float) -> frozenset[int]:
    """Return the time zones in which an engine may be, given the dates that it printed between two times.

    `zones`: the zones to choose from, in quarters of an hour from UTC; `printed`: the dates; `since` and `until`: the
    times, in seconds since 1970. If no zone is left, because summer time began or ended or the engine's clock was set,
    all zones of the world are tried. If none of these fits either, all of them are returned.
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
    """Return the number of seconds until the next quarter of an hour has begun by every engine's clock.

    `now`: seconds since 1970. Engines' clocks may be wrong by up to 5 seconds.
    """
    return _QUARTER - (now - MARGIN) % _QUARTER


def another_time(moment: datetime, hours: int) -> datetime:
    """Return another time on the same day as `moment`, with another hour, minute, second and microsecond.

    `hours`: the number of hours by which the hour moves on; the minutes and seconds move on by multiples of it. With
    `hours` 0 only the microsecond differs. A conversation is rendered at several such times to find where the template
    prints the time.
    """
    return moment.replace(
        hour=(moment.hour + hours) % 24,
        minute=(moment.minute + 7 * hours) % 60,
        second=(moment.second + 11 * hours) % 60,
        microsecond=(moment.microsecond + 1 + hours) % 1_000_000,
    )


class Clock:
    """The present date and time as one model's engines write them into prompts.

    Which dates are possible depends on the time zones (`zones`) that the engines may be in. The time of day is the
    gateway's own.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.now = now
        # The time zones that the engines may be in, in quarters of an hour from UTC; None: the gateway's own.
        self.zones: frozenset[int] | None = None

    def moments(self) -> list[datetime]:
        """Return the present date and time of the engines, once for each date that their time zones allow.

        The time of day is the gateway's own.
        """
        now = self.now()
        here = datetime.fromtimestamp(now)
        return (
            [here] if self.zones is None else [datetime.combine(day, here.time()) for day in days_in(self.zones, now)]
        )

    def on(self, day: date) -> datetime:
        """Return this date with the gateway's present time of day."""
        return datetime.combine(day, datetime.fromtimestamp(self.now()).time())

    def strftime_now(self, pattern: str) -> str:
        """Return the present date and time in the format `pattern`, for a template to print.

        If the engines' time zones allow several dates, the earliest one is used.
        """
        return self.moments()[0].strftime(pattern)
