"""The types of single settings: how each is read from text, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WrapValidator

from replicas.replica import parse_url
from replicas.sizes import LIKE, MOST_BYTES, parse_size, show_bytes
from replicas.spelling import none_of

from ..http.origins import check_origin
from ..proxy.paths import check_allowed

PolicyName = Literal[
    "least_time", "overlap_cost", "prefix_affinity", "consistent_hash",
    "least_load", "power_of_two", "round_robin", "random",
]  # fmt: skip
OWN = ".py"  # occurs in the name of a policy that is a class in a file
LEGS = "legs:"  # precedes a rule for legs, among the shadow policies
ACTING_LEGS = "legs:seconds"  # the rule that acts, whatever the policy


def parse_bytes(value: Any, least: int = 1) -> int:
    """Return the bytes of a size like `64MiB`, `1.5 G` or `65536`. Raises ValueError if it is under `least`."""
    if value is None or value == "":
        raise ValueError(f"it has no value; write a size {LIKE}")
    size = parse_size(value) if isinstance(value, str) else value
    if type(size) is int and size > MOST_BYTES:
        raise ValueError(f"{str(value)[:40]} is more than any machine has; write a size {LIKE}")
    if type(size) is not int or size < least:
        which = f"of at least {show_bytes(least)}" if least > 1 else "above 0"
        raise ValueError(f"{show_bytes(size) if type(size) is int else repr(value)} is not a size {which}, {LIKE}")
    return size


def split_names(value: Any) -> Any:
    """Return the list of names in a text, separated by commas or spaces, or any other value unchanged."""
    return re.findall(r"[^,\s]+", value) if isinstance(value, str) else value


def _split_urls(value: Any) -> Any:
    """Return the list of URLs in a text, or in a list of texts with several each; other values unchanged."""
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return [url for one in value for url in _split_urls(one)]
    return re.split(r",?\s+|,(?=https?://)", value.strip()) if isinstance(value, str) else value


def _check_once(names: tuple[str, ...], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice; name each {what} once")


def _check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    _check_once(tuple(parse_url(text).id for text in urls), "replica")
    return urls


def _each(check: Callable[[str], str]) -> AfterValidator:
    return AfterValidator(lambda texts: tuple(map(check, texts)))


def _check_host(name: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,253}", name, re.ASCII):
        raise ValueError(f"{name[:300]!r} is not a host name; give it without scheme and port")
    return name


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
        raise ValueError(f"{value[:100]!r} is no name: write 1 to 64 letters, digits, dots, dashes or underscores")
    return value


def _check_redis(url: str) -> str:
    from cachemap.cluster import parse  # importing it takes a fifth of a second

    parse(url)
    return url


def _check_own(name: str) -> str:
    from policies import make_own  # importing the policies takes a fifth of a second

    make_own(name)
    return name


def _own_or(value: Any, named: Callable[[Any], Any]) -> Any:
    return _check_own(value) if isinstance(value, str) and OWN in value else named(value)


def _check_shadow(name: str) -> str:
    if name.startswith(LEGS):
        from policies.leg_rules import make_leg_rule

        make_leg_rule(name.removeprefix(LEGS))
    elif OWN in name:
        _check_own(name)
    elif name not in get_args(PolicyName):
        raise ValueError(none_of(name, get_args(PolicyName)))
    return name


def _check_shadows(names: tuple[str, ...]) -> tuple[str, ...]:
    _check_once(names, "policy")
    return tuple(map(_check_shadow, names))


_NAMES = BeforeValidator(split_names)
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_SHOWN = PlainSerializer(show_bytes, when_used="json")
Bytes = Annotated[int, BeforeValidator(lambda value: parse_bytes(value)), _SHOWN]
CacheBytes = Annotated[int, BeforeValidator(lambda value: parse_bytes(value, least=2**20)), _SHOWN]
Name = Annotated[str, AfterValidator(_check_name)]
Urls = Annotated[tuple[str, ...], BeforeValidator(_split_urls), AfterValidator(_check_urls)]
HostNames = Annotated[tuple[str, ...], _NAMES, _each(_check_host)]
Origins = Annotated[tuple[str, ...], _NAMES, _each(check_origin)]
Paths = Annotated[tuple[str, ...], _NAMES, _each(check_allowed)]
RedisUrl = Annotated[str, AfterValidator(_check_redis)]
AnyPolicy = Annotated[PolicyName, WrapValidator(_own_or)]
Shadows = Annotated[tuple[str, ...], _NAMES, AfterValidator(_check_shadows)]
