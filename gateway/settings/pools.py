"""Pools: several kinds of engine that one gateway launches, for the phases of a request or for several models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from replicas.launch.command import LaunchProfile
from replicas.pairing import refusals
from replicas.roles import BOTH, DECODERS, PREFILLERS, lacks
from replicas.tables import Table

Role = Literal["prefill", "decode", "both"]


class Pool(Table):
    """Engines that are launched in the same way."""

    profile: str
    launch: int = Field(ge=1, le=256, strict=True)  # strict: `yes` is refused
    role: Role | None = None  # None: the profile's
    model: str | None = None  # None: the gateway's
    served_model_name: str | None = None
    spill: bool = False  # an overflow pool, for requests that no other replica can answer in time
    may_be_empty = frozenset(("role", "model", "served_model_name"))

    @model_validator(mode="after")
    def _is_whole(self) -> Pool:
        if self.spill and self.role not in (None, BOTH):
            raise ValueError(
                f"spill and role: {self.role} exclude each other: a slow pool takes whole requests; leave one of them out"
            )
        return self

    def role_of(self, profile: LaunchProfile) -> str:
        return self.role or profile.role


class Kind(NamedTuple):
    """A pool as it is launched: its name, role, launch profile, and the folder of its model."""

    name: str
    role: str
    profile: LaunchProfile
    directory: Path | None = None


def incompatibilities(kinds: Mapping[str, list[Kind]], adopted: Iterable[str]) -> list[str]:
    """Return why pools cannot work together in their roles, each reason with its remedy.

    `kinds`: the launched pools by the model that they serve; `adopted`: the roles of replicas that run already, and
    whose model is not known yet.
    """
    elsewhere = {role for role in adopted if role != BOTH}
    found = []
    for pools in kinds.values():
        roles = {one.role for one in pools}
        if roles == {BOTH}:
            continue  # these take whole requests, and adopted replicas may be of another model
        found += [f"{one.name}: {why}" for one in pools if (why := one.profile.no_transfer)]
        if what := lacks(roles | elsewhere):
            found.append(f"{' and '.join(one.name for one in pools)}: {what}. Add a pool with the role that is missing, of the same model, "
                         "or leave the role out")  # fmt: skip
        found += _unlike(pools)
    return found


def _unlike(pools: list[Kind]) -> list[str]:
    """Return, for each unfit pair of a prefill and a decode pool, why the latter cannot fetch the former's KV cache."""
    found: dict[frozenset[str], str] = {}
    for one, other in product(pools, pools):
        if one is other or one.role not in PREFILLERS or other.role not in DECODERS or one.profile.no_transfer:
            continue
        if one.profile.engine != other.profile.engine:
            why = [f"their engines are {one.profile.engine} and {other.profile.engine}: let both be of one kind"]
        else:
            why = refusals(one.profile.traits, other.profile.traits)
            if one.profile.transfer != other.profile.transfer:
                why.append("they pass caches on by different connectors: give both the same kv_connector")
        if one.directory != other.directory:
            why.append(f"they are started with different models, {one.directory} and {other.directory}, under one name: "
                       "give both the same, or each its own served_model_name and both roles")  # fmt: skip
        if why:
            found.setdefault(frozenset((one.name, other.name)), f"{one.name} and {other.name}: {'; '.join(why)}")
    return [*found.values()]
