"""The types that a Router reads and returns: the prefix map, evaluations and decisions.

The prefix map knows which replica holds which KV cache blocks. It names a replica by its slot, a number. What a replica
holds in memory slower than its first tier is a sequence of *runs*, in the prompt's order. A run is a pair (tier, count)
for adjacent blocks in one tier. The prefix map counts runs in blocks, evaluations and decisions in tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from .costs import Lower
from .legs import LegChoice
from .vocabulary import Candidate, Choice, Demand, Pull


def leading(runs: Iterable[tuple[str, int]], most: int, size: int = 1) -> Lower:
    """Return the first `most` blocks of some runs, with their counts converted from blocks to tokens.

    `runs`: pairs (tier, number of adjacent blocks). `size`: tokens per block; 1 leaves the counts as they are.
    """
    kept: list[tuple[str, int]] = []
    for tier, count in runs:
        if most <= 0:
            break
        kept.append((tier, min(count, most) * size))
        most -= count
    return tuple(kept)


def behind(runs: Iterable[tuple[str, int]], start: int) -> Lower:
    """Return what is left of some runs (tier, number of adjacent blocks) after their first `start` blocks."""
    kept: list[tuple[str, int]] = []
    for tier, count in runs:
        if count > start:
            kept.append((tier, count - start))
        start = max(0, start - count)
    return tuple(kept)


class Match(Protocol):
    """How many blocks of a prompt each replica in the prefix map holds; a replica goes by its slot, a number.

    `held`: by slot, the number of leading blocks in the first tier; `lower`: by slot, the runs of (tier, blocks) in
    slower tiers that follow these.
    """

    @property
    def held(self) -> Sequence[int]: ...

    @property
    def lower(self) -> Mapping[int, Sequence[tuple[str, int]]]: ...


class PrefixMap(Protocol):
    """A map of which replica holds which prompt prefixes.

    A replica is given by its slot, a number, and a prompt by the chained hashes of its blocks.
    """

    def match(self, hashes: Sequence[int], now: float, most: int | None = None) -> Match:
        """Return how many blocks of a prompt each replica holds. `most`: how many blocks can be hits (None: all)."""

    def last_below(self, slot: int, hashes: Sequence[int], held: int) -> int | None:
        """Return how many tokens of a prompt's last block an engine does not report as cached if a slower tier has it.

        The prompt must end exactly with that block. The result is 0 or 1, by the kind of tier, or None if no slower
        tier has the block. `held`: how many leading blocks of the prompt are in the replica's first tier.
        """

    def leading(self, tier: str, hashes: Sequence[int]) -> Sequence[int]:
        """Return how many leading blocks of a prompt each replica holds in this slower tier, by slot.

        Blocks in other tiers do not count.
        """

    def expect(self, slot: int, hashes: Sequence[int], now: float) -> int:
        """Note that a prompt was just sent to this replica, which will hold its blocks; return the prompt's number."""

    def take_back(self, slot: int, hashes: Sequence[int], held: int, number: int) -> None:
        """Cancel the expected blocks of a prompt that was not computed, except its first `held` ones.

        `number`: what `expect` returned for the prompt.
        """

    def learn(self, slot: int, hashes: Sequence[int], predicted: int, reported: int) -> None:
        """Learn from one prompt: how many blocks were predicted to be cached, and how many the engine reported."""

    def holds_below(self, slot: int) -> bool:
        """Return whether the replica is known to hold any block in tiers slower than the first."""

    def drop(self, slot: int, drops: bool, to_end: bool = True) -> None:
        """Set whether the replica recomputes ("drops") the last block of every hit, as some engines that speculate do.

        `to_end`: its lookup includes a block that ends exactly at the prompt's end.
        """

    def drops(self, slot: int) -> bool:
        """Return whether the replica always recomputes ("drops") the last block of a hit."""

    def clear(self, slot: int) -> None:
        """Forget all blocks that the replica holds."""

    def detach(self, slot: int) -> None:
        """Remove a replica, and free its slot for another."""


NO_PULLS: Mapping[str, Pull] = {}


class Held(NamedTuple):
    """A request as prepared for one space, with the number of its blocks that each replica holds.

    A space is one tokenizer, chat template and block size. `match` is None if the request has no full block or may not
    use the cache.
    """

    demand: Demand
    match: Match | None


class Evaluation(NamedTuple):
    """The policy's choice of a replica for a request, before the request is counted in the replica's load.

    The choice rests on the loads that this gateway knows. Another choice may replace it: a shared ledger's `Decision`.
    """

    demand: Demand
    candidates: Sequence[Candidate]
    choice: Choice
    overlap: int  # prompt tokens that the chosen candidate holds in its first tier
    spaces: Mapping[int, Held] | None = None  # if the candidates are of several spaces: the request in each
    lower: Lower = ()  # prompt tokens that the chosen candidate holds in slower tiers, after the overlap
    pulls: Mapping[str, Pull] = NO_PULLS  # by replica: what candidates would fetch from another replica's memory
    settled: bool = False  # whether admission has decided where it is served: by `legs`, or by one replica if None
    legs: LegChoice | None = None  # the two replicas that compute its prompt and write its answer
    peers: Collection[Candidate] = ()  # replicas that may fetch the prompt from one another, for evaluating it again
    narrowed: str = ""  # admission's decision, if it excluded candidates that could take the request


class Decision(NamedTuple):
    """A choice of a replica by the load ledger that several gateways share, which has already counted the load."""

    index: int  # type: ignore[assignment]  # of the chosen candidate; hides tuple.index, which nobody calls
    replica: str
    overlap: int  # prompt tokens that the replica holds in its first tier, in tokens of the evaluation's demand
    others: tuple[int, ...]  # the other gateways' load on it, as the tuple that `Ledger.own` returns
    counted: bool  # whether the shared ledger's present sums include this reservation
    lower: Lower = ()  # prompt tokens that it holds in slower tiers, in tokens of the evaluation's demand
    note: bytes = b""  # the message that the shared ledger sent to other gateways; only that ledger reads it


class Move(NamedTuple):
    """The transfer of a prompt's KV cache to the replica that writes the answer.

    `tokens`: the prompt tokens that this replica lacks, by its own tokenizer; `seconds`: the predicted duration.
    """

    tokens: int
    seconds: float


# The replicas that may compute a request's prompt, and those that may write its answer with a KV cache computed by any
# of the former.
Pairing = tuple[Sequence[Candidate], Sequence[Candidate]]
