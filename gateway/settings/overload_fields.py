"""Limits, classes and the queue as fields of the settings' schema: read as mappings, and checked by `overload`.

A flag and the environment have them as text, one line of YAML. `overload` imports the policies, which take a fifth of a
second: it is imported for those who use it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from replicas import yaml_text


def read_mapping(value: Any) -> Any:
    """A flag and the environment say in one line of YAML what a file says in several."""
    return yaml_text.load(value) if isinstance(value, str) else value


def _check_slo(value: Any) -> Any:
    from . import overload

    limits = overload.parse_slo(value)
    if isinstance(value, dict):
        return value
    return {name: f"{1e3 * one:g}ms" for name, one in limits._asdict().items() if one is not None}


def _check_scheduler(value: Any) -> Any:
    from . import overload

    overload.parse_scheduler(value)
    return value


def _check_admission(value: Any) -> Any:
    from . import overload

    rules, _ = overload.parse_admission(value)
    return {**value, "max_bytes": rules.max_bytes} if "max_bytes" in value else value


def one_workers_admission(settings: Any, count: int) -> dict[str, Any] | None:
    """What `admission` is in one of so many workers: each has a queue of its own, so its bounds are divided, also those
    that are not given. None if the settings ask for no queue."""
    if settings.slo is settings.scheduler is settings.request_router is settings.admission is None:
        return None
    from . import overload

    given = settings.admission or {}
    rules, _ = overload.parse_admission(given)
    return {
        **given,
        "max_requests": rules.max_requests // count or 1,
        "max_bytes": rules.max_bytes // count or 1,
    }


def class_names(scheduler: Any) -> list[str]:
    """Of the classes of `scheduler`, which was checked; none without it."""
    if scheduler is None:
        return []
    from . import overload

    return [one.name for one in overload.parse_scheduler(scheduler)]


def check_routes(routes: Any, scheduler: Any) -> None:
    """Raises ValueError if the routes are wrong, or lead to classes that are not there."""
    if routes is None:
        return
    if scheduler is None:
        raise ValueError("its routes lead to classes, and there are none; name them under scheduler.qos_classes")
    from . import overload

    overload.parse_routes(routes, overload.parse_scheduler(scheduler))


Slo = Annotated[dict[str, Any], BeforeValidator(_check_slo)]
Scheduler = Annotated[dict[str, Any], BeforeValidator(_check_scheduler), BeforeValidator(read_mapping)]
Routes = Annotated[dict[str, Any], BeforeValidator(read_mapping)]
Admission = Annotated[dict[str, Any], BeforeValidator(_check_admission), BeforeValidator(read_mapping)]
