"""Which replicas can fetch the KV cache of a prompt that another replica computed.

A request may have two legs: one replica, the prefiller, computes the prompt, and another, the decoder, fetches the
prompt's KV cache (by a `Transfer`) and writes the answer. Engines compare their settings when two of them first meet,
and fail the request where these differ. Most settings are known before, from an engine's report and its launch profile.
The functions here pair replicas in the gateway and in `explain`, refuse pools before they start, and tell operators
what to change. They have no state and no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from .roles import DECODERS, PREFILLERS

if TYPE_CHECKING:
    from replicas.engines.transfer import Transfer

NAMED = 3  # replicas that a complaint names on each side; the others are counted
REMEDY = "start the engines of a model alike; those that differ get no request together"


class Traits(NamedTuple):
    """The settings that decide whether two engines can exchange KV caches; an unknown one (None) fits any other."""

    version: str | None = None
    model: str | None = None  # the folder or hub name that it was started with
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    speculative_config: str | None = None
    block_size: int | None = None
    unable: frozenset[str] = frozenset()  # ids of the transfers for which it has no connector

    def known(self, other: Traits) -> Traits:
        """Return these traits, with values from `other` for those that are unknown (None) here."""
        return self._replace(**{name: value for name, value in other._asdict().items() if getattr(self, name) is None})


ALIKE = ("version", "model", "dtype", "kv_cache_dtype", "attention_backend", "speculative_config")


def refusals(prefiller: Traits, decoder: Traits, compared: Iterable[str] = ALIKE) -> list[str]:
    """Return the reasons why `decoder` cannot fetch KV caches from `prefiller`; [] if no known trait prevents it.

    `prefiller`, `decoder`: traits of the replica that computes the prompt, and of the one that writes the answer.
    `compared`: names of the traits that have to be equal.
    """
    found = []
    for name in compared:
        one, other = getattr(prefiller, name), getattr(decoder, name)
        if one is not None and other is not None and one != other:
            found.append(f"{name} is {one} in one and {other} in the other: caches are moved only where it is the same")
    theirs, ours = prefiller.block_size, decoder.block_size
    if theirs and ours and ours % theirs:
        found.append(f"block_size {ours} of the decoder is no multiple of the prefiller's {theirs}")
    return found


def obstacles(prefiller: Traits, decoder: Traits, transfer: Transfer) -> list[str]:
    """Return the reasons why `decoder` cannot fetch KV caches from `prefiller` by `transfer`; [] if none is known."""
    sides = (("prefiller", prefiller), ("decoder", decoder))
    lacking = [f"the {side} has no connector for {transfer.name}" for side, one in sides if transfer.id in one.unable]
    return lacking or (refusals(prefiller, decoder, transfer.compares) if transfer.compares else [])


class Paired(Protocol):
    """An object with the id and the traits of a replica: a replica itself, or a backend of the gateway."""

    @property
    def id(self) -> str: ...
    @property
    def traits(self) -> Traits: ...


T = TypeVar("T", bound=Paired)


def sides_of(transfer: Transfer, ones: Iterable[T], replica_of: Callable[[T], Any]) -> tuple[list[T], list[T]]:
    """Return the replicas that may prefill, and those that may decode, if `transfer` moves the KV caches.

    `ones`: the replicas, or objects that stand for them. `replica_of`: returns for one of them an object with its
    `role` and `rank`.
    """
    known = [(one, replica_of(one)) for one in ones]
    prefillers = [(one, replica) for one, replica in known if replica.role in PREFILLERS]
    if transfer.header:  # the header names an engine and no rank
        prefillers = [(one, replica) for one, replica in prefillers if replica.rank is None]
    return [one for one, _ in prefillers], [one for one, replica in known if replica.role in DECODERS]


class Complaint(NamedTuple, Generic[T]):
    """The reason why some decoders cannot fetch the KV caches that some prefillers computed."""

    text: str
    prefillers: list[T]
    decoders: list[T]
    lacking: T | None  # one of them that was started without the transfer's connector, if that is the reason


def groups(prefillers: Sequence[T], decoders: Sequence[T], transfer: Transfer) -> list[tuple[list[T], list[T]]]:
    """Divide replicas into groups in which every decoder can fetch KV caches from every prefiller.

    Each group is a list of prefillers and a list of decoders. Each decoder is in one group, with all prefillers that it
    can fetch from. A prefiller may be in several groups. Decoders that can fetch from none are in a group without
    prefillers.
    """
    computing, among = _by_traits(prefillers), dict[Traits, tuple[Traits, ...]]()
    found: dict[tuple[Traits, ...], list[T]] = {}
    for decoder in decoders:
        traits = decoder.traits
        if traits not in among:
            among[traits] = tuple(one for one in computing if not obstacles(one, traits, transfer))
        found.setdefault(among[traits], []).append(decoder)
    if not found:
        return [([*prefillers], [])]
    return [([one for of in fitting for one in computing[of]], some) for fitting, some in found.items()]


def complaints(prefillers: Sequence[T], decoders: Sequence[T], transfer: Transfer) -> list[Complaint[T]]:
    """Return why some decoders cannot fetch the KV caches that some prefillers computed.

    Replicas with equal traits are treated as one, so there is at most one complaint for each pair of a set of equal
    prefillers and a set of equal decoders.
    """
    found, writing = [], _by_traits(decoders)
    for traits, some in _by_traits(prefillers).items():
        for theirs, others in writing.items():
            why = obstacles(traits, theirs, transfer)
            if why and (len(some) > 1 or some != others):  # else it is one replica compared with itself
                said = f"{_whose(some, others)}: {'; '.join(why)}"
                lacking = [one for one in (some[0], others[0]) if transfer.id in one.traits.unable]
                found.append(Complaint(said, some, others, lacking[0] if lacking else None))
    return found


def _by_traits(replicas: Iterable[T]) -> dict[Traits, list[T]]:
    found: dict[Traits, list[T]] = {}
    for one in replicas:
        found.setdefault(one.traits, []).append(one)
    return found


def _whose(prefillers: Sequence[Paired], decoders: Sequence[Paired]) -> str:
    """Return a clause for a message, such as "B cannot fetch what A computes", with the replicas' ids.

    A replica in both lists is named on one side only if other replicas remain on the other side, as it need not fetch
    from itself.
    """
    computing = [one for one in prefillers if one not in decoders] or prefillers
    fetching = [one for one in decoders if one not in computing] or decoders
    verb = "computes" if len(computing) == 1 else "compute"
    return f"{_named(fetching)} cannot fetch what {_named(computing)} {verb}"


def _named(replicas: Sequence[Paired]) -> str:
    names = [one.id for one in replicas[:NAMED]]
    if more := len(replicas) - len(names):
        names.append(f"{more} more")
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
