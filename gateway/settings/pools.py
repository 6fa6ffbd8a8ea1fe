"""Pools: several kinds of engine that one gateway launches, for the phases of a request or for several models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import permutations
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


class Launch(NamedTuple):
    """A number of equal engines to launch, with fields in the order of the parameters of `Fleet.launch`."""

    count: int
    profile: LaunchProfile
    directory: Path | None  # the model's folder; None: the replicas report it
    served_name: str
    role: str
    spill: bool = False  # whether they are the overflow pool


def incompatibilities(launched: Mapping[str, Launch], adopted: Iterable[str]) -> list[str]:
    """Return why pools cannot work together in their roles (prefill, decode), each reason with its remedy.

    `launched`: the engines of each pool, by the pool's name; `adopted`: the roles of replicas that run already, whose
    models are not known yet.
    """
    elsewhere = {role for role in adopted if role != BOTH}
    found = []
    for served in dict.fromkeys(one.served_name for one in launched.values()):
        pools = {name: one for name, one in launched.items() if one.served_name == served}
        roles = {one.role for one in pools.values()}
        if roles == {BOTH}:
            continue  # these take whole requests, and adopted replicas may be of another model
        found += [f"{name}: {why}" for name, one in pools.items() if (why := one.profile.no_transfer)]
        if what := lacks(roles | elsewhere):
            remedy = "Add a pool with the role that is missing, of the same model, or leave the role out"
            found.append(f"{' and '.join(pools)}: {what}. {remedy}")
        wrong = {}
        for name, other in permutations(pools, 2):
            if why := _unlike(pools[name], pools[other]):
                wrong.setdefault(frozenset((name, other)), f"{name} and {other}: {'; '.join(why)}")
        found += wrong.values()
    return found


def _unlike(one: Launch, other: Launch) -> list[str]:
    """Return why the decode engines of `other` cannot fetch KV cache from the prefill engines of `one`.

    The result is [] if they can, or if `one` does not prefill or `other` does not decode.
    """
    if one.role not in PREFILLERS or other.role not in DECODERS or one.profile.no_transfer:
        return []
    if one.profile.engine != other.profile.engine:
        why = [f"their engines are {one.profile.engine} and {other.profile.engine}: let both be of one kind"]
    else:
        why = refusals(one.profile.traits, other.profile.traits)
        if one.profile.transfer != other.profile.transfer:
            why.append("they pass caches on by different connectors: give both the same kv_connector")
    if one.directory != other.directory:
        why.append(f"they are started with different models, {one.directory} and {other.directory}, under one name: "
                   "give both the same, or each its own served_model_name and both roles")  # fmt: skip
    return why
