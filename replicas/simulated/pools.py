"""Pools of simulated engines on the virtual clock: kinds of engine, each with a role, as `hitherto serve --pools` has
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from replicas import yaml_text
from replicas.roles import BOTH, DECODERS, PREFILL, PREFILLERS, ROLES, lacks

from .profile import Profile, load_profile

_FIELDS = ("profile", "launch", "role", "speed")
_MOST = 4096  # engines of a pool


@dataclass(frozen=True, slots=True)
class Pool:
    """`launch` engines that are alike."""

    name: str
    profile: Profile
    launch: int
    role: str = BOTH


def read_pools(text: str, profile: str, changes: Mapping[str, int | None]) -> list[Pool]:
    """Read pools from one line of YAML. `profile`: of those that name none; `changes`: fields of all profiles.

    ValueError says which pool is wrong, and how it should be."""
    try:
        given = yaml_text.load(text)
    except yaml_text.NotYaml as error:
        raise ValueError(str(error)) from None
    if not isinstance(given, dict) or not given:
        raise ValueError(
            "expected NAME: {launch: N, role: prefill, ...} for each pool, as in {p: {launch: 2, role: prefill}}"
        )
    pools = [_read_pool(str(name), one, profile, changes) for name, one in given.items()]
    if len({pool.profile.block_size for pool in pools}) > 1:
        raise ValueError("pools must have one block_size: caches are matched and moved by blocks")
    if what := lacks({pool.role for pool in pools}):
        raise ValueError(f"{what}. Add a pool with the role that is missing, or leave the role out")
    return pools


def _read_pool(name: str, given: object, profile: str, changes: Mapping[str, int | None]) -> Pool:
    if not isinstance(given, dict):
        raise ValueError(f"{name}: a pool is a mapping like {{launch: 2, role: prefill}}, not {given!r}")
    for field in given:
        if field not in _FIELDS:
            raise ValueError(f"{name}: unknown field {field!r}; known are {', '.join(_FIELDS)}")
    launch, role, speed = given.get("launch"), given.get("role", BOTH), given.get("speed", 1.0)
    if type(launch) is not int or not 1 <= launch <= _MOST:
        raise ValueError(f"{name}: launch must be a whole number from 1 to {_MOST}, not {launch!r}")
    if role not in ROLES:
        raise ValueError(f"{name}: role must be {', '.join(ROLES)}, not {role!r}")
    if type(speed) not in (int, float) or not 0 < speed < float("inf"):
        raise ValueError(f"{name}: speed must be a number above 0, not {speed!r}")
    try:
        loaded = load_profile(str(given.get("profile", profile)), **changes)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return Pool(name, replace(loaded, speedup=loaded.speedup * speed), launch, role)


def sides(roles: Sequence[str], up: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of the engines that are up, those that may compute prompts for others, and those that may write answers to such
    prompts. Both are empty where nobody has a role."""
    if all(roles[one] == BOTH for one in up):
        return [], []
    return [one for one in up if roles[one] in PREFILLERS], [one for one in up if roles[one] in DECODERS]


def takes_whole(roles: Sequence[str], up: Sequence[int]) -> list[int]:
    """Of the engines that are up, those that take whole requests: prefillers only where nobody else is left."""
    return [one for one in up if roles[one] != PREFILL] or [*up]
