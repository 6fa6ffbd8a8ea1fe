"""Warnings about settings that have no effect as they are.

Such settings are no errors, because the part that is missing may still be set.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.decisions import SPILL
from replicas.replica import parse_url

from ..proxy.admission.overload import Overload
from ..tenants.key_file import KeyFileError, read
from .derived import added_replicas, known_urls, overload_of
from .schema import Settings


class SettingWarning(NamedTuple):
    """A warning about a setting without effect: a sentence without its full stop, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy[:1].upper()}{self.remedy[1:]}"


def find_warnings(settings: Settings) -> list[SettingWarning]:
    """Return a warning for each setting that has no effect."""
    try:
        keys = read(settings.api_keys).values() if settings.api_keys is not None else ()
        named: set[str | None] | None = {one.qos_class for one in keys}
    except KeyFileError:
        named = None  # reported as an error elsewhere
    found = overload_of(settings)
    said: list[SettingWarning | None] = []
    added = added_replicas(settings)
    for url in settings.replica_url:
        if (later := added.get(parse_url(url).id, url)) != url:
            what = f"replica_url: {url} is not used: {later} of {settings.replica_file} came later, by POST /replicas"
            said.append(SettingWarning(what, "to undo that, remove its line in that file"))
    if found is not None:
        said += [_spilling(settings, found), _without_key(settings)]
        if named is not None:
            said.append(_unreached(settings, found, named))
    if settings.scheduler is None and named and (classes := sorted(map(str, named - {None}))):
        what = f"{settings.api_keys}: class: {', '.join(classes)} says nothing, since there are no classes"
        said.append(SettingWarning(what, "name them in scheduler.qos_classes, or leave class out of the file"))
    return [one for one in said if one is not None]


def _spilling(settings: Settings, found: Overload) -> SettingWarning | None:
    """Return a warning if the step `spill` (send to the slow pool) is set but no replica or pool is slow, else None."""
    places = ["admission.when_full"] if SPILL in found.rules.when_full else []
    places += [
        f"scheduler.qos_classes.{one.name}.when_full" for one in found.classes.all if SPILL in (one.when_full or ())
    ]
    if not places or (settings.discover is not None and SPILL in settings.discover.labels):
        return None
    if any(one.spill for one in (*settings.pools.values(), *map(parse_url, known_urls(settings)))):
        return None
    what = f"{', '.join(places)}: {SPILL} is passed over, since no replica is of a slow pool"
    return SettingWarning(
        what, "write #spill=yes behind a replica's URL or spill: true in a pool, or leave the step out"
    )


def _without_key(settings: Settings) -> SettingWarning | None:
    """Return a warning if a route matches requests by API key although no API keys are configured, else None."""
    routes = settings.request_router.routes if settings.request_router is not None else ()
    keys = [one.match.key for one in routes if one.match.key is not None]
    if not keys or settings.api_keys is not None:
        return None
    what = f"request_router: no request matches key: {', '.join(keys)}, since there are no API keys"
    return SettingWarning(what, "name their file with --api-keys, or leave the routes out")


def _unreached(settings: Settings, found: Overload, named: set[str | None]) -> SettingWarning | None:
    """Return a warning about classes of service that no route and no API key gives to requests, or None.

    `named`: the classes that the key file names now.
    """
    names = [one.name for one in found.classes.unreached(named, keys=settings.api_keys is not None)]
    if not names:
        return None
    what = f"scheduler.qos_classes: no request is of {', '.join(names)}, since no route and no API key leads there"
    remedy = (
        "name it as the class of a route in request_router, or of a key in the file of --api-keys "
        "(hitherto key new --class), or leave it out"
    )
    return SettingWarning(what, remedy)
