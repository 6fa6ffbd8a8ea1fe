"""Pools: several kinds of engine that one gateway launches, for the parts of a request or for several models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from replicas.launch.command import LaunchProfile
from replicas.roles import BOTH, DECODERS, PREFILLERS, lacks

Role = Literal["prefill", "decode", "both"]


class Pool(BaseModel):
    """Engines that are launched alike."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str = Field(min_length=1)
    launch: int = Field(ge=1, le=256, strict=True)  # not `yes`
    role: Role | None = None  # None: the profile's
    model: str | None = None  # None: the gateway's
    served_model_name: str | None = None
    spill: bool = False  # gets what nobody else can answer in time

    @model_validator(mode="before")
    @classmethod
    def _is_mapping(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError(f"a pool is a mapping like {{profile: sim, launch: 2}}, not {given!r}")
        return given

    @model_validator(mode="after")
    def _is_whole(self) -> Pool:
        if self.spill and self.role not in (None, BOTH):
            raise ValueError(
                f"spill and role: {self.role} exclude each other: a slow pool takes whole requests; leave one of them out"
            )
        return self

    def role_of(self, profile: LaunchProfile) -> str:
        return self.role or profile.role


Kind = tuple[str, str, LaunchProfile]  # a pool's name, its role, and how its engines are launched


def complaints(kinds: Mapping[str, list[Kind]], adopted: Iterable[str]) -> list[str]:
    """Why pools cannot work together as their roles want it, each with what would be right. `kinds`: by the model that
    they serve; `adopted`: roles of replicas that are not launched, of which nobody knows the model yet."""
    elsewhere = {role for role in adopted if role != BOTH}
    found = []
    for pools in kinds.values():
        roles = {role for _, role, _ in pools}
        if roles == {BOTH}:
            continue  # what is adopted may be of another model, and whole requests are what these can take
        found += [f"{name}: {profile.no_transfer}" for name, _, profile in pools if profile.no_transfer]
        if what := lacks(roles | elsewhere):
            found.append(f"{' and '.join(name for name, *_ in pools)}: {what}. Add a pool with the role that is missing, of the same model, "
                         "or leave the role out")  # fmt: skip
        found += _unlike(pools)
    return found


def _unlike(pools: list[Kind]) -> list[str]:
    """Pairs of pools of which one is to fetch what the other computed, and cannot."""
    found: dict[frozenset[str], str] = {}
    for one, role, prefiller in pools:
        for other, its_role, decoder in pools:
            if one == other or role not in PREFILLERS or its_role not in DECODERS or prefiller.no_transfer:
                continue
            if decoder.engine != prefiller.engine:
                why = [f"their engines are {prefiller.engine} and {decoder.engine}: let both be of one kind"]
            else:
                why = prefiller.unlike(decoder)
            if why:
                found.setdefault(frozenset((one, other)), f"{one} and {other}: {'; '.join(why)}")
    return [*found.values()]
