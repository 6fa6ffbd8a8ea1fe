"""The types that a Router reads and returns: the prefix map, evaluations and decisions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from .costs import Lower
from .legs import LegChoice
from .vocabulary import Candidate, Choice, Demand, Pull


def leading(runs: Iterable[tuple[str, int]], most: int, size: int = 1) -> Lower:
    """Return the first `most` units of runs of (tier, units), each times `size`."""
    kept: list[tuple[str, int]] = []
    for tier, count in runs:
        if most <= 0:
            break
        kept.append((tier, min(count, most) * size))
        most -= count
    return tuple(kept)


def behind(runs: Iterable[tuple[str, int]], start: int) -> Lower:
    """Return what follows the first `start` units of runs of (tier, units)."""
    kept: list[tuple[str, int]] = []
    for tier, count in runs:
        if count > start:
            kept.append((tier, count - start))
        start = max(0, start - count)
    return tuple(kept)


class Match(Protocol):
    """The leading blocks of a prompt that each slot of a map holds, and what follows in lower tiers, in runs."""

    @property
    def held(self) -> Sequence[int]: ...

    @property
    def lower(self) -> Mapping[int, Sequence[tuple[str, int]]]: ...


class PrefixMap(Protocol):
    """A map of which replica holds which prefix. A replica is a slot here, a prompt the hashes of its blocks."""

    def match(self, hashes: Sequence[int], now: float, most: int | None = None) -> Match:
        """Return what each slot holds of a prompt. `most`: how many of its blocks can be hits (None: all)."""

    def last_below(self, slot: int, hashes: Sequence[int], held: int) -> int | None:
        """Return how many tokens of a prompt's last block the engine does not count as found; None if no tier has it.

        The prompt ends with that block, and a slower tier has it; the slot holds the first `held` blocks in its first
        tier.
        """

    def leading(self, tier: str, hashes: Sequence[int]) -> Sequence[int]:
        """Return how many leading blocks each slot is known to hold in this slower tier, whatever other tiers hold."""

    def expect(self, slot: int, hashes: Sequence[int], now: float) -> int:
        """Note that the prompt was just sent to this replica, and return its number."""

    def take_back(self, slot: int, hashes: Sequence[int], held: int, number: int) -> None:
        """Cancel the expected blocks of a prompt that was not computed, beyond the `held` ones.

        `number`: the prompt's, from `expect`.
        """

    def learn(self, slot: int, hashes: Sequence[int], predicted: int, reported: int) -> None:
        """Compare the predicted number of cached blocks of a prompt with what the engine reported."""

    def holds_below(self, slot: int) -> bool:
        """Return whether the replica is known to hold anything in slower tiers."""

    def drop(self, slot: int, drops: bool, to_end: bool = True) -> None:
        """Set whether the replica computes the last block that it finds once more.

        `to_end`: it looks up the block that ends with the prompt.
        """

    def drops(self, slot: int) -> bool:
        """Return whether the replica is known to compute its last found block once more."""

    def clear(self, slot: int) -> None:
        """Forget everything that the replica holds."""

    def detach(self, slot: int) -> None:
        """Remove a replica, and free its slot for another."""


NO_PULLS: Mapping[str, Pull] = {}


class Held(NamedTuple):
    """A request in the tokens and blocks of one space, and how many of its blocks each slot of the map holds."""

    demand: Demand
    match: Match | None


class Evaluation(NamedTuple):
    """The policy's choice for a request by the loads known here, before anything is counted.

    `overlap`: prompt tokens that the chosen candidate holds in its first tier; `lower`: those that follow in slower
    tiers. `settled`: admission has decided how it goes: in these `legs`, or whole if there are none. `peers`: the
    replicas that may fetch its prompt from one another's memory, needed to evaluate it again. `narrowed`: admission's
    decision, if it excluded candidates that could take the request; else "".
    """

    demand: Demand
    candidates: Sequence[Candidate]
    choice: Choice
    overlap: int
    spaces: Mapping[int, Held] | None = None  # by space, where the candidates are of several
    lower: Lower = ()
    pulls: Mapping[str, Pull] = NO_PULLS  # by replica: the candidates that would fetch from another one
    settled: bool = False
    legs: LegChoice | None = None
    peers: Collection[Candidate] = ()
    narrowed: str = ""


class Decision(NamedTuple):
    """A choice made, and already counted, by a ledger that several gateways share.

    `index`: into the candidates; `overlap`, `lower`: prompt tokens held there in the first tier and in slower ones, in
    tokens of the evaluation's demand (what is not held is counted); `others`: the other gateways' load on that replica;
    `counted`: whether the current sums include this reservation; `note`: private to the ledger, what it told the
    others.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    replica: str
    overlap: int
    others: tuple[int, ...]
    counted: bool
    lower: Lower = ()
    note: bytes = b""


class Move(NamedTuple):
    """A prompt's cache on its way to a decoder.

    `tokens`: those that the decoder lacks, counted in its own space; `seconds`: predicted for the transfer.
    """

    tokens: int
    seconds: float


# The replicas that may compute a request's prompt, and those that may write its answer with the cache of one of these.
Pairing = tuple[Sequence[Candidate], Sequence[Candidate]]
