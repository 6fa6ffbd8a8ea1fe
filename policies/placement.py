"""The types that a Router reads and returns: the prefix map, evaluations and decisions.

The prefix map knows which replica holds which blocks. In it a replica is a slot, a number. What a replica holds beyond
its first tier is a sequence of *runs*: (tier, number of adjacent blocks or tokens), in the prompt's order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from .costs import Lower
from .legs import LegChoice
from .vocabulary import Candidate, Choice, Demand, Pull


def leading(runs: Iterable[tuple[str, int]], most: int, size: int = 1) -> Lower:
    """Return the first `most` blocks of some runs, with the blocks of each run times `size` (tokens per block)."""
    kept: list[tuple[str, int]] = []
    for tier, count in runs:
        if most <= 0:
            break
        kept.append((tier, min(count, most) * size))
        most -= count
    return tuple(kept)


def behind(runs: Iterable[tuple[str, int]], start: int) -> Lower:
    """Return what is left of some runs without their first `start` blocks."""
    kept: list[tuple[str, int]] = []
    for tier, count in runs:
        if count > start:
            kept.append((tier, count - start))
        start = max(0, start - count)
    return tuple(kept)


class Match(Protocol):
    """What each replica in the prefix map holds of a prompt.

    `held`: by slot, the leading blocks in the first tier; `lower`: by slot, the runs in slower tiers that follow these.
    """

    @property
    def held(self) -> Sequence[int]: ...

    @property
    def lower(self) -> Mapping[int, Sequence[tuple[str, int]]]: ...


class PrefixMap(Protocol):
    """A map of which replica holds which prefix; a replica is a slot, a prompt the chained hashes of its blocks."""

    def match(self, hashes: Sequence[int], now: float, most: int | None = None) -> Match:
        """Return what each slot holds of a prompt. `most`: how many of its blocks can be hits (None: all)."""

    def last_below(self, slot: int, hashes: Sequence[int], held: int) -> int | None:
        """Return how many tokens of a prompt's last block a slower tier does not count as found; None if none has it.

        The prompt must end with that block. `held`: leading blocks of the prompt in the slot's first tier.
        """

    def leading(self, tier: str, hashes: Sequence[int]) -> Sequence[int]:
        """Return how many leading blocks each slot is known to hold in this slower tier, whatever other tiers hold."""

    def expect(self, slot: int, hashes: Sequence[int], now: float) -> int:
        """Note that a prompt was just sent to this replica, which will hold its blocks; return the prompt's number."""

    def take_back(self, slot: int, hashes: Sequence[int], held: int, number: int) -> None:
        """Cancel the expected blocks of a prompt that was not computed, except its first `held` ones.

        `number`: what `expect` returned for the prompt.
        """

    def learn(self, slot: int, hashes: Sequence[int], predicted: int, reported: int) -> None:
        """Compare how many blocks of a prompt were predicted to be cached with how many the engine reported."""

    def holds_below(self, slot: int) -> bool:
        """Return whether the replica is known to hold anything in slower tiers."""

    def drop(self, slot: int, drops: bool, to_end: bool = True) -> None:
        """Set whether the replica computes the last block that it finds once more.

        `to_end`: whether that includes the block that ends with the prompt.
        """

    def drops(self, slot: int) -> bool:
        """Return whether the replica is known to compute its last found block once more."""

    def clear(self, slot: int) -> None:
        """Forget everything that the replica holds."""

    def detach(self, slot: int) -> None:
        """Remove a replica, and free its slot for another."""


NO_PULLS: Mapping[str, Pull] = {}


class Held(NamedTuple):
    """A request in the tokens and blocks of one space, with what each slot of the prefix map holds of it."""

    demand: Demand
    match: Match | None


class Evaluation(NamedTuple):
    """The policy's choice for a request by the loads known here, before anything is counted."""

    demand: Demand
    candidates: Sequence[Candidate]
    choice: Choice
    overlap: int  # prompt tokens that the chosen candidate holds in its first tier
    spaces: Mapping[int, Held] | None = None  # by space, if the candidates are of several
    lower: Lower = ()  # prompt tokens that the chosen candidate holds in slower tiers, after the overlap
    pulls: Mapping[str, Pull] = NO_PULLS  # by replica: what candidates would fetch from another replica
    settled: bool = False  # whether admission has decided: in these `legs`, or on one replica if they are None
    legs: LegChoice | None = None
    peers: Collection[Candidate] = ()  # replicas that may fetch the prompt from one another, for evaluating it again
    narrowed: str = ""  # admission's decision, if it excluded candidates that could take the request


class Decision(NamedTuple):
    """A choice made, and already counted, by a ledger that several gateways share."""

    index: int  # type: ignore[assignment]  # of the chosen candidate; hides tuple.index, which nobody calls
    replica: str
    overlap: int  # prompt tokens that it holds in its first tier, in tokens of the evaluation's demand
    others: tuple[int, ...]  # the other gateways' load on it, in the order of `Ledger.own`
    counted: bool  # whether the shared ledger's present sums include this reservation
    lower: Lower = ()  # prompt tokens that it holds in slower tiers, in tokens of the evaluation's demand
    note: bytes = b""  # what the shared ledger has told the other gateways; only that ledger reads it


class Move(NamedTuple):
    """The transfer of a prompt's cache to the replica that writes the answer.

    `tokens`: those that this replica lacks, counted in its own space; `seconds`: the predicted duration.
    """

    tokens: int
    seconds: float


# The replicas that may compute a request's prompt, and those that may write its answer with a cache computed by any of
# the former
Pairing = tuple[Sequence[Candidate], Sequence[Candidate]]
