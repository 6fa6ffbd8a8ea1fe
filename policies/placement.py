"""What a Router reads and answers with: the map, and what is evaluated and decided of a request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from .costs import Lower
from .legs import LegChoice
from .vocabulary import Candidate, Choice, Demand, Pull


def leading(runs: Iterable[tuple[str, int]], most: int, size: int = 1) -> Lower:
    """Return the first `most` units of runs of a tier each, times `size`."""
    kept: list[tuple[str, int]] = []
    for tier, count in runs:
        if most <= 0:
            break
        kept.append((tier, min(count, most) * size))
        most -= count
    return tuple(kept)


def behind(runs: Iterable[tuple[str, int]], start: int) -> Lower:
    """Return what is left of runs of a tier each behind their first `start` units."""
    kept: list[tuple[str, int]] = []
    for tier, count in runs:
        if count > start:
            kept.append((tier, count - start))
        start = max(0, start - count)
    return tuple(kept)


class Match(Protocol):
    """How many leading blocks of a prompt each slot of a map holds, and what follows in lower tiers, in runs."""

    @property
    def held(self) -> Sequence[int]: ...

    @property
    def lower(self) -> Mapping[int, Sequence[tuple[str, int]]]: ...


class PrefixMap(Protocol):
    """Who holds which prefix. A replica is a slot here, a prompt the hashes of its blocks."""

    def match(self, hashes: Sequence[int], now: float, most: int | None = None) -> Match:
        """`most`: of these blocks, how many can be hits (None: all)."""

    def last_below(self, slot: int, hashes: Sequence[int], held: int) -> int | None:
        """Where a slower tier has the last of these blocks, with which a prompt ends, for who holds the first `held` in
        its first tier: how many of its tokens the engine does not count as found. None: no tier has it."""

    def leading(self, tier: str, hashes: Sequence[int]) -> Sequence[int]:
        """How many leading blocks each slot is known to hold in this slower tier, whatever it holds elsewhere."""

    def expect(self, slot: int, hashes: Sequence[int], now: float) -> int:
        """Note that the prompt was just sent to this replica, and return its number."""

    def take_back(self, slot: int, hashes: Sequence[int], held: int, number: int) -> None:
        """The prompt of this number was not computed there: beyond the `held` blocks none of it will come."""

    def learn(self, slot: int, hashes: Sequence[int], predicted: int, reported: int) -> None:
        """The engine told how many blocks of this prompt it had found."""

    def holds_below(self, slot: int) -> bool:
        """Whether the replica is known to hold anything in slower tiers."""

    def drop(self, slot: int, drops: bool, to_end: bool = True) -> None:
        """Whether the replica computes the last block that it finds once more; `to_end`: it looks for the block that
        ends with the prompt."""

    def drops(self, slot: int) -> bool:
        """Whether it does, as far as is known."""

    def clear(self, slot: int) -> None:
        """The replica holds nothing."""

    def detach(self, slot: int) -> None:
        """The replica is gone, and its slot free for another."""


NO_PULLS: Mapping[str, Pull] = {}


class Held(NamedTuple):
    """A request in the tokens and blocks of one space, and how many of its blocks each slot of the map holds."""

    demand: Demand
    match: Match | None


class Evaluation(NamedTuple):
    """What the policy would do with a request by the loads known here. Nothing is done yet. `overlap`: prompt tokens
    that the candidate it chose holds in its first tier; `lower`: those that follow in slower tiers. `settled`:
    admission has chosen how it goes, in these `legs`, or whole if there are none. `peers`: the replicas that may fetch
    its prompt from one another's memory, for whoever evaluates it again. `narrowed`: admission's decision on
    it, where that left out others that could take it, too; "" if it left out none."""

    demand: Demand
    candidates: Sequence[Candidate]
    choice: Choice
    overlap: int
    spaces: Mapping[int, Held] | None = None  # by space, where the candidates are of several
    lower: Lower = ()
    pulls: Mapping[str, Pull] = NO_PULLS  # of the candidates that would fetch from another replica
    settled: bool = False
    legs: LegChoice | None = None
    peers: Collection[Candidate] = ()
    narrowed: str = ""


class Decision(NamedTuple):
    """What a ledger that several gateways share has chosen and counted: `index` into the candidates, prompt tokens held
    there in the first tier, what other gateways have on it, whether the reservation is in the sums that count now, and
    prompt tokens held in slower tiers. Tokens are those of the evaluation's demand; what is not held is counted. `note`
    is the ledger's own, of what it told other gateways."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    replica: str
    overlap: int
    others: tuple[int, ...]
    counted: bool
    lower: Lower = ()
    note: bytes = b""


class Move(NamedTuple):
    """A prompt's cache on its way to a decoder: `tokens` that the decoder lacks, in those of its own space, and the
    seconds that this is predicted to take."""

    tokens: int
    seconds: float


# Who may compute a request's prompt, and who may write its answer with the cache of one of these.
Pairing = tuple[Sequence[Candidate], Sequence[Candidate]]
