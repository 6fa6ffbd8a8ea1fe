"""Pools of simulated engines for simulations with a virtual clock, described as for `hitherto serve --pools`.

A pool is a number of equal engines with one role: prefill, decode or both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field, TypeAdapter, ValidationError

from replicas import yaml_text
from replicas.roles import BOTH, DECODERS, PREFILL, PREFILLERS, lacks
from replicas.tables import Table, explain

from .profile import Profile, load_profile


class _Given(Table):
    """The settings of one pool as the user writes them in YAML."""

    launch: int = Field(ge=1, le=4096, strict=True)  # strict: `yes` is no number
    role: Literal["prefill", "decode", "both"] = BOTH
    profile: str = ""
    speed: float = Field(1.0, gt=0, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of `launch` equal engines with one profile and one role."""

    name: str
    profile: Profile
    launch: int
    role: str = BOTH


def read_pools(text: str, profile: str, changes: Mapping[str, int | None]) -> list[Pool]:
    """Return the pools in one line of YAML.

    `profile`: for pools without a profile of their own. `changes`: fields to change in all profiles (None: keep).
    Raises ValueError, which says which pool is wrong and what would be right.
    """
    try:
        given = yaml_text.load(text)
        if not isinstance(given, dict) or not given:
            example = "as in {p: {launch: 2, role: prefill}}"
            raise ValueError(f"expected NAME: {{launch: N, role: prefill, ...}} for each pool, {example}")
        asked = TypeAdapter(dict[str, _Given]).validate_python({str(name): one for name, one in given.items()})
    except yaml_text.NotYaml as error:
        raise ValueError(str(error)) from None
    except ValidationError as error:
        raise ValueError(explain(error)) from None
    pools = [_pool(name, one, profile, changes) for name, one in asked.items()]
    if len({pool.profile.block_size for pool in pools}) > 1:
        raise ValueError("pools must have one block_size: caches are matched and moved by blocks")
    if what := lacks({pool.role for pool in pools}):
        raise ValueError(f"{what}. Add a pool with the role that is missing, or leave the role out")
    return pools


def _pool(name: str, given: _Given, profile: str, changes: Mapping[str, int | None]) -> Pool:
    try:
        loaded = load_profile(given.profile or profile, **changes)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return Pool(name, replace(loaded, speedup=loaded.speedup * given.speed), given.launch, given.role)


def sides(roles: Sequence[str], up: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the engines that may take first legs (prefill), and those that may take second legs (decode).

    `roles`: the role of each engine. `up`: the numbers of the engines that run; the results are among these. Both lists
    are empty if all running engines have the role both, since no request is split then.
    """
    if all(roles[one] == BOTH for one in up):
        return [], []
    return [one for one in up if roles[one] in PREFILLERS], [one for one in up if roles[one] in DECODERS]


def takes_whole(roles: Sequence[str], up: Sequence[int]) -> list[int]:
    """Return the running engines that take whole requests: all but prefill engines, or these if there are no others.

    `roles`: the role of each engine. `up`: the numbers of the engines that run.
    """
    return [one for one in up if roles[one] != PREFILL] or [*up]
