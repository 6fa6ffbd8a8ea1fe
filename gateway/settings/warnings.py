"""Warnings about settings that have no effect as they are.

Such settings are no errors, because the part that is missing may still be set.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.decisions import SPILL
from replicas.replica import parse_url

from ..proxy.overload import Overload
from ..tenants.key_file import KeyFileError, read
from .derived import known_urls, overload_of
from .schema import Settings


class SettingWarning(NamedTuple):
    """A setting without effect, as a sentence without its full stop, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy[:1].upper()}{self.remedy[1:]}"


def find_warnings(settings: Settings) -> list[SettingWarning]:
    """Return a warning for each setting that has no effect."""
    found = overload_of(settings)
    if found is None:
        return _without_classes(settings)
    return [
        *_spills_nowhere(settings, found),
        *_unreached(settings, found),
        *_unused_routes(settings),
        *_without_classes(settings),
    ]


def _spills_nowhere(settings: Settings, found: Overload) -> list[SettingWarning]:
    """Warn of the step `spill` (send to the slow pool) where no replica or pool is marked as slow."""
    places = ["admission.when_full"] if SPILL in found.rules.when_full else []
    places += [
        f"scheduler.qos_classes.{one.name}.when_full" for one in found.classes.all if SPILL in (one.when_full or ())
    ]
    if not places or (settings.discover is not None and SPILL in settings.discover.labels):
        return []
    if any(one.spill for one in (*settings.pools.values(), *map(parse_url, known_urls(settings)))):
        return []
    what = f"{', '.join(places)}: {SPILL} is passed over, since no replica is of a slow pool"
    return [
        SettingWarning(what, "write #spill=yes behind a replica's URL or spill: true in a pool, or leave the step out")
    ]


def _unused_routes(settings: Settings) -> list[SettingWarning]:
    """Warn of routes by API key where there are no API keys, and of routes after one that matches every request."""
    routes = settings.request_router.routes if settings.request_router is not None else ()
    said = []
    for index, route in enumerate(routes):
        rule = route.match
        place = f"request_router.routes[{index}]"
        if rule.key is not None and settings.api_keys is None:
            what = f"{place}: no request matches key: {rule.key}, since there are no API keys"
            said.append(SettingWarning(what, "name their file with --api-keys, or leave the route out"))
        elif rule.header is rule.key is None and {rule.path, rule.model} <= {None, "*"} and index < len(routes) - 1:
            what = f"{place}: it matches every request, so no route after it is ever used"
            said.append(SettingWarning(what, "put it last"))
    return said


def _without_classes(settings: Settings) -> list[SettingWarning]:
    """Warn of API keys with a class where there are no classes."""
    if settings.api_keys is None or settings.scheduler is not None:
        return []
    try:
        named = {tenant.qos_class for tenant in read(settings.api_keys).values()} - {None}
    except KeyFileError:
        return []  # reported as an error elsewhere
    if not named:
        return []
    what = f"{settings.api_keys}: class: {', '.join(sorted(map(str, named)))} says nothing, since there are no classes"
    return [SettingWarning(what, "name them in scheduler.qos_classes, or leave class out of the file")]


def _unreached(settings: Settings, found: Overload) -> list[SettingWarning]:
    """Warn of classes that neither a route nor the key file as it is now gives to any request."""
    named: set[str | None] = set()
    if settings.api_keys is not None:
        try:
            named = {tenant.qos_class for tenant in read(settings.api_keys).values()}
        except KeyFileError:
            return []  # reported as an error elsewhere, and the classes in the file are unknown
    names = [one.name for one in found.classes.unreached(named, keys=settings.api_keys is not None)]
    if not names:
        return []
    which = f"class {names[0]}" if len(names) == 1 else f"classes {', '.join(names)}"
    what = f"scheduler.qos_classes: no request is of {which}, since no route and no API key leads there"
    remedy = (
        "name it as the class of a route in request_router, or of a key in the file of --api-keys "
        "(hitherto key new --class), or leave it out"
    )
    return [SettingWarning(what, remedy)]
