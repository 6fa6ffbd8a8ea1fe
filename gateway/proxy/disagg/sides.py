"""The roles of replicas (prefill, decode, both), and which replicas can give a prompt's KV cache to which others."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

from replicas import TAKES_TRAFFIC, pairing
from replicas.problems import Problem
from replicas.roles import BOTH, REMEDY, SPEAK_ALIKE, lacks, unlike
from replicas.served import base_names

from ..backend import Backend

if TYPE_CHECKING:
    from replicas.engines.transfer import Transfer

log = logging.getLogger("hitherto.proxy")


class Kind(NamedTuple):
    """A group of replicas in which each prefiller can give its KV cache to each decoder, by the same KV transfer."""

    transfer: Transfer
    prefillers: list[Backend]
    decoders: list[Backend]


def _sides_of(transfer: Transfer, backends: Sequence[Backend]) -> tuple[list[Backend], list[Backend]]:
    return pairing.sides_of(transfer, backends, lambda one: one.replica)


def _by_transfer(backends: Iterable[Backend]) -> dict[Transfer, list[Backend]]:
    ways: dict[Transfer, list[Backend]] = {}
    for one in backends:
        if (transfer := one.replica.transfer) is not None:
            ways.setdefault(transfer, []).append(one)
    return ways


def _sentence(remedy: str) -> str:
    """Return a text with its first letter made a capital."""
    return remedy[0].upper() + remedy[1:]


class Sides:
    """The prefillers and decoders among one model's ready replicas, in groups (`kinds`) that can exchange KV caches.

    `any`: whether some replica has the role prefill or decode alone. If all have both roles, there are no groups.
    """

    def __init__(self, backends: Sequence[Backend]):
        self.any = any(one.replica.role != BOTH for one in backends)
        self.kinds = [
            Kind(transfer, *group)
            for transfer, alike in _by_transfer(backends if self.any else ()).items()
            for group in pairing.groups(*_sides_of(transfer, alike), transfer)
        ]


class Roles:
    """The check of all replicas' roles, which logs each misconfiguration once."""

    def __init__(self) -> None:
        self.any = False  # whether some replica has a role other than both
        self._said: set[str] = set()

    def look(self, backends: Sequence[Backend], awaited: Set[str] = frozenset()) -> None:
        """Check the roles of the replicas, log what is newly wrong, and note at each replica why it cannot be paired.

        `awaited`: roles of replicas that have never been ready: their models are not known yet, so their roles are not
            reported as missing.
        """
        self.any = any(one.replica.role != BOTH for one in backends)
        if not any(one.replica.state in TAKES_TRAFFIC for one in backends):
            return
        wrong, unlike_ones = set(), dict[Backend, list[str]]()
        if self.any:
            models: set[str | None] = {name for one in backends for name in base_names(one.replica.models)}
            for model in models or {None}:
                serving = [one.replica for one in backends if one.serves(model)]
                said = f"model {model}: " if model else ""
                if what := lacks({one.role for one in serving} | awaited):
                    wrong.add(f"{said}{what}. {_sentence(REMEDY)}")
                elif what := unlike((one.role, None if one.transfer is None else one.transfer.name) for one in serving):
                    wrong.add(f"{said}{what}. {_sentence(SPEAK_ALIKE)}")
                else:
                    for complaint in unlike_pairs([one for one in backends if one.serves(model)]):
                        lacks_it = complaint.lacking
                        remedy = lacks_it.replica.dialect.remedies.transfer if lacks_it is not None else pairing.REMEDY
                        wrong.add(f"{said}{complaint.text}. {_sentence(remedy)}")
                        for one in (*complaint.prefillers, *complaint.decoders):
                            unlike_ones.setdefault(one, []).append(str(Problem(complaint.text, remedy)))
        for one in backends:
            one.replica.unlike = tuple(dict.fromkeys(unlike_ones.get(one, ())))
        for what in wrong - self._said:
            log.warning("%s", what)
        self._said = wrong


def unlike_pairs(backends: Sequence[Backend]) -> list[pairing.Complaint[Backend]]:
    """Return the complaints about replicas of one model that use the same KV transfer and cannot exchange caches."""
    return [
        complaint
        for transfer, alike in _by_transfer(backends).items()
        for complaint in pairing.complaints(*_sides_of(transfer, alike), transfer)
    ]
