"""CacheMap: for every replica, how much of a prompt it holds.

Confirmed blocks, those that engines reported by events, lie in block tables, one a tier.
Predicted blocks, those of prompts just routed, lie apart and expire. A replica without
events has neither: it has a model of the engine's own cache instead. So have the others, for
the parts of prompts of which no event tells (`GuessedBlocks`).
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cachemap.changes import CacheGroup, Change, ChunkTier, Clear, Contents, Observe, Remove, Store, outlives
from cachemap.hashing import GuessedBlocks
from cachemap.table.block_table import BlockTable
from cachemap.table.blocks import NO_BLOCKS, u64
from cachemap.table.capacity import Budget
from cachemap.table.chains import BYTES_PER_BLOCK, EngineModel
from cachemap.table.groups import GroupTables
from cachemap.table.routed import Routed

PREDICTED_SECONDS = 5.0  # longer than a queue and a prefill take, shorter than a cache turns over
UNKNOWN_CAPACITY = 8192  # blocks assumed of an engine that does not say: 131,072 tokens of 16
LOWER_TIERS = ("cpu", "disk", "remote")  # nearest first
LEAST_BUDGET = 1 << 20
PIECE = 1024  # blocks stored at a time: enough to spread a call's cost, few against any table


class Match:
    """What each replica holds of one prompt.

    `held` and `confirmed` are indexed by slot and count blocks from the prompt's start:
    confirmed by events, and held for any reason (confirmed, predicted or modelled). Of a replica with several
    cache groups (see `CacheGroup`) both are what all of its groups make a hit of.
    `lower` has, for the few slots that need it, the blocks that follow the held ones in
    slower tiers, as runs in the prompt's order.
    """

    __slots__ = ("confirmed", "held", "lower")

    def __init__(self, held: list[int], confirmed: list[int], lower: dict[int, list[tuple[str, int]]]):
        self.held: list[int] = held
        self.confirmed: list[int] = confirmed
        self.lower: dict[int, list[tuple[str, int]]] = lower

    def __repr__(self) -> str:
        return f"Match(held={self.held}, confirmed={self.confirmed}, lower={self.lower})"


@dataclass(slots=True)
class _Replica:
    name: str
    model: EngineModel
    observed: bool
    # Two requests that compute the same block leave two copies, and engines tell of each, when it comes
    # and when it goes. The block is gone with the last; here, by tier and tag, the copies beyond the first.
    copies: Counter[tuple[str, int]] = field(default_factory=Counter)
    journal: Callable[[Change], None] | None = None

    def fewer(self, tier: str, tag: int) -> bool:
        """One copy went; whether there are others."""
        beyond = self.copies.get((tier, tag), 0)
        if beyond > 1:
            self.copies[tier, tag] = beyond - 1
        elif beyond:
            del self.copies[tier, tag]
        return beyond > 0


class CacheMap:
    """All that is known about who holds what, within `budget_bytes`.

    Replicas are slots: small ints that index the lists in `Match` and are used again after
    `detach`. Hashes are nonzero u64 made by `hash_blocks`. `now` is in seconds, monotonic.
    Not thread safe; every call is short: what takes long, growth, shedding and the end of a replica,
    is done in steps of at most some milliseconds, with each call (see bench/scale.py).
    """

    def __init__(self, budget_bytes: int, predicted_seconds: float = PREDICTED_SECONDS):
        if budget_bytes < LEAST_BUDGET:
            raise ValueError(f"budget_bytes is {budget_bytes}, the least is {LEAST_BUDGET} (1 MiB)")
        self._chain_budget = budget_bytes // 4  # predicted and modelled blocks
        self._budget = Budget(budget_bytes - self._chain_budget)
        self._gpu = BlockTable(self._budget)
        self._lower: dict[str, BlockTable] = {}
        self._tiers: list[ChunkTier] = []  # what is in `_lower`, nearest first; in own chunks of 1 where it is in none
        self._groups = GroupTables(self._budget)
        self._routed = Routed(predicted_seconds, self._groups.of)
        self._replicas: list[_Replica | None] = []
        self._live: list[tuple[int, _Replica]] = []
        self._modelled: list[tuple[int, EngineModel]] = []
        self._observed = False
        self._dropping: dict[int, bool] = {}  # by slot: whether it looks at the block that ends with the prompt
        self._last: tuple[Sequence[int], list[int], int | None] = ([], [], None)  # what `match` was asked and found

    def attach(self, name: str, capacity_blocks: int | None, observed: bool) -> int:
        """A replica joins; `capacity_blocks` is its cache's size in blocks, None if unknown.

        `observed`: its events are followed. Otherwise its cache is modelled.
        """
        model = EngineModel(capacity_blocks or UNKNOWN_CAPACITY)
        replica = _Replica(name, model, observed)
        if None in self._replicas:
            slot = self._replicas.index(None)
            self._replicas[slot] = replica
        else:
            slot = len(self._replicas)
            self._replicas.append(replica)
        self._gpu.capacity.attach(slot, capacity_blocks or 0)
        for table in self._lower.values():
            table.capacity.attach(slot, 0)
        self._recount()
        return slot

    def resize(self, slot: int, capacity_blocks: int | None) -> None:
        """The replica's cache has another size than was told when it joined."""
        self._replica(slot).model.resize(capacity_blocks or UNKNOWN_CAPACITY)
        self._gpu.capacity.expect(slot, capacity_blocks or 0)

    def detach(self, slot: int) -> None:
        """The replica is gone and its slot free for another."""
        self._replica(slot)
        for table in (self._gpu, *self._lower.values()):
            table.capacity.detach(slot)
        self._groups.keep(slot, ())
        self._routed.clear(slot)
        self._dropping.pop(slot, None)
        self._replicas[slot] = None
        self._recount()

    def _recount(self) -> None:
        """After a change of replicas: who is there how, and their shares of the chain budget."""
        self._live = [(slot, replica) for slot, replica in enumerate(self._replicas) if replica]
        self._modelled = [(slot, one.model) for slot, one in self._live if not one.observed]
        self._observed = len(self._modelled) < len(self._live)  # only of these anything is predicted
        most = self._chain_budget // BYTES_PER_BLOCK // max(len(self._live), 1)
        guessed = most // 4  # of an observed replica only what `GuessedBlocks` say is modelled
        self._routed.most = (most - guessed) * (len(self._live) - len(self._modelled)) // 2  # two generations
        for _, replica in self._live:
            replica.model.most = guessed if replica.observed else most

    def match(self, hashes: Sequence[int], now: float, most: int | None = None) -> Match:
        """How much of the prompt with these block hashes each replica holds. `most`: blocks that can be hits, as the
        engine always computes the last token; None: all. Only where a replica has several cache groups, or drops the
        last block that it finds, does it matter which they are."""
        if self._observed:
            gpu = self._gpu.blocks
            found = gpu.prefix(hashes)
            full = confirmed = gpu.reach(found, len(self._replicas))
            grouped = self._groups.of
            if grouped:
                confirmed = self._in_all_groups(hashes, full, most)
            held = confirmed.copy()
            if self._routed:
                for slot, reach in self._routed.reach(hashes, now, full).items():
                    if not grouped or slot not in grouped:
                        while reach < found.count and gpu.holds(slot, found.number(reach)):
                            reach += 1  # confirmed again after what is predicted
                    held[slot] = reach
        else:  # no replica reports its blocks, so the table has none
            full = confirmed = [0] * len(self._replicas)
            held = confirmed.copy()
        for slot, model in self._modelled:
            held[slot] = model.reach(hashes)
        if type(hashes) is GuessedBlocks:
            self._guess(hashes, held)
        self._last = (hashes, full, most)
        if self._dropping:
            if confirmed is full:
                confirmed = full.copy()
            self._drop(hashes, full, held, confirmed, len(hashes) if most is None else most)
        return Match(held, confirmed, self._further(hashes, held) if self._lower else {})

    def drop(self, slot: int, drops: bool, to_end: bool = True) -> None:
        """Whether the replica computes the last block that it finds once more, as engines do that speculate with the
        model's hidden states. `to_end`: with several cache groups it looks for the block that ends with the prompt too.
        """
        self._replica(slot)
        if drops:
            self._dropping[slot] = to_end
        else:
            self._dropping.pop(slot, None)

    def drops(self, slot: int) -> bool:
        """Whether the last block that the replica finds is taken to be computed once more."""
        return slot in self._dropping

    def _drop(self, hashes: Sequence[int], full: list[int], held: list[int], confirmed: list[int], most: int) -> None:
        """What is left of hits where the last block is dropped; those of several cache groups are looked up anew."""
        most = min(most, len(hashes))
        for slot, to_end in self._dropping.items():
            if slot in self._groups.of and self._replica(slot).observed:
                end = min(most + 1, len(hashes)) if to_end else most
                hit = self._groups.reach_dropping(slot, hashes, full[slot], most, end)
                predicted = held[slot] > confirmed[slot]
                held[slot] = max(hit, min(held[slot], most) - 1) if predicted else hit
                confirmed[slot] = hit
            else:
                held[slot] = max(0, min(held[slot], most) - 1)
                confirmed[slot] = min(confirmed[slot], held[slot])

    def _in_all_groups(self, hashes: Sequence[int], full: list[int], most: int | None) -> list[int]:
        """What is a hit in all cache groups, of what full attention holds."""
        held = full.copy()
        for slot, reach in self._groups.reach(hashes, full, len(hashes) if most is None else most).items():
            held[slot] = reach
        return held

    def _guess(self, hashes: GuessedBlocks, held: list[int]) -> None:
        """No event tells of the blocks behind the known ones. They are taken to be where this prompt was sent before,
        as far as the known ones are still there and the replica's cache has room."""
        for slot, replica in self._live:
            if replica.observed and held[slot] >= hashes.known:
                held[slot] = max(held[slot], replica.model.reach(hashes))

    def _further(self, hashes: Sequence[int], held: list[int]) -> dict[int, list[tuple[str, int]]]:
        """For each slot the runs of blocks after the held ones that lie in lower tiers."""
        wanted = u64(hashes)
        in_chunks: list[tuple[ChunkTier, list[int]]] = []
        tiers: list[tuple[str, list[int]]] = []  # and who holds each block
        for tier, table in zip(self._tiers, self._lower.values(), strict=True):
            chunk = tier.blocks
            holders = table.blocks.holders_of(wanted[chunk - 1 :: chunk])  # of each whole chunk, by its last block
            if tier.own and chunk > 1:
                in_chunks.append((tier, holders))
            else:
                tiers.append((tier.base, holders if chunk == 1 else [one for one in holders for _ in range(chunk)]))
        lower = {}
        for slot, _ in self._live:
            if slot in self._groups.of:
                continue  # which of its groups a slower tier holds is not known
            start = held[slot]
            size = self.own_chunk(slot) if in_chunks else 1
            of_size = [(tier.base, holders) for tier, holders in in_chunks if tier.blocks == size]
            runs = _in_own_chunks(slot, start, size, of_size) if of_size else []
            for i in range(start, len(hashes) if not runs else 0):
                base = next((base for base, holders in tiers if i < len(holders) and holders[i] >> slot & 1), None)
                if base is None:
                    break
                _add(runs, base, 1)
            if slot in self._dropping:
                runs = _but_last(runs)
            if runs:
                lower[slot] = runs
        return lower

    def holds_below(self, slot: int) -> bool:
        """Whether the replica is known to hold anything in slower tiers."""
        return any(table.aliases[slot].count for table in self._lower.values())

    def chunk_tiers(self, slot: int) -> list[ChunkTier]:
        """The slower tiers in which this replica has chunks."""
        tables = zip(self._tiers, self._lower, self._lower.values(), strict=True)
        return [tier for tier, name, table in tables if name not in LOWER_TIERS and table.aliases[slot].count]

    def own_chunk(self, slot: int) -> int:
        """How many blocks the replica's own slower tiers find together or not at all, as far as events told."""
        tables = zip(self._tiers, self._lower.values(), strict=True)
        return max([tier.blocks for tier, table in tables if tier.own and table.aliases[slot].count], default=1)

    def last_below(self, slot: int, hashes: Sequence[int], held: int) -> int | None:
        """Where a slower tier of the replica has the last of these blocks, the last of a prompt that ends with it, and
        it is found there behind the first `held` ones: how many of its tokens are not counted as found. An engine
        computes the last token whatever it finds. Its own tiers count that one as found all the same, a store below it
        does not. None: no tier has the block."""
        if slot not in self._groups.of:
            last = u64(hashes[-1:])
            for (_, chunk, own), table in zip(self._tiers, self._lower.values(), strict=True):
                whole = not len(hashes) % chunk and (not own or len(hashes) - held >= chunk)
                if whole and table.blocks.holders_of(last)[0] >> slot & 1:
                    return 0 if own else 1
        return None

    def leading(self, tier: str, hashes: Sequence[int]) -> list[int]:
        """How many leading blocks each replica is known to hold in this slower tier, whatever it holds elsewhere. One
        with several cache groups has none: which of them the tier holds is not known."""
        most = [0] * len(self._replicas)
        for (base, chunk, own), table in zip(self._tiers, self._lower.values(), strict=True):
            if base == tier and own:
                found = table.blocks.reach(table.blocks.prefix(hashes[chunk - 1 :: chunk]), len(self._replicas))
                most = [max(blocks, chunks * chunk) for blocks, chunks in zip(most, found, strict=True)]
        return [0 if slot in self._groups.of else blocks for slot, blocks in enumerate(most)]

    def expect(self, slot: int, hashes: Sequence[int], now: float) -> int:
        """Note that a prompt with these blocks was just routed to this replica. Return its number, for `take_back`.

        Called right after `match` of the same list, it leaves out one that is confirmed as a whole.
        """
        replica, (last, confirmed, most) = self._replica(slot), self._last
        if replica.observed and type(hashes) is GuessedBlocks:
            replica.model.add(hashes)
        if not replica.observed or last is not hashes or slot >= len(confirmed) or confirmed[slot] < len(hashes):
            if replica.observed and slot in self._groups.of:
                asked = last is hashes and slot < len(confirmed)
                full, end = confirmed[slot] if asked else 0, most if asked and most is not None else len(hashes)
                return self._routed.add_in_groups(slot, hashes, now, end, full)
            if replica.observed:
                return self._routed.add(slot, hashes, now)
            replica.model.add(hashes)
        return 0

    def take_back(self, slot: int, hashes: Sequence[int], held: int, number: int) -> None:
        """The replica refused the prompt that `expect` gave this number, of which `held` blocks were taken to be there
        before."""
        replica = self._replica(slot)
        if replica.observed:
            self._routed.take_back(slot, hashes, held + (slot in self._dropping), number)
        if not replica.observed or type(hashes) is GuessedBlocks:
            replica.model.take_back(hashes, held)

    def store(
        self,
        slot: int,
        hashes: list[int],
        engine_keys: Sequence[int | bytes],
        tier: str = "gpu",
        heads: list[tuple[int, int]] | None = None,
    ) -> None:
        """The replica reports that it now has these blocks, under these keys of its own.

        They are taken to be one chain from a prompt's start, unless `heads` says where
        chains begin: (index of the first block, hash of the block before it or 0), in order.
        A key known for the same block already means one more copy of it, if it comes in a call of its own.
        """
        heads = heads or [(0, 0)]
        for start in range(0, len(hashes), PIECE):
            end = start + PIECE
            part = [(at - start, parent) for at, parent in heads if start <= at < end]
            if not part or part[0][0]:
                part.insert(0, (0, hashes[start - 1]))
            tags = self._gpu.tags(engine_keys[start:end])
            self.change(slot, Store(tier, u64(hashes[start:end]), tags, part))

    def add_group(self, slot: int, group: CacheGroup) -> None:
        """The replica has this cache group beside that of full attention. Its blocks are stored and removed as those of
        tier `group.tier`, and it is forgotten when all is."""
        if group.tier not in self.groups(slot):
            self.change(slot, Store(group.tier, NO_BLOCKS, NO_BLOCKS, []))

    def groups(self, slot: int) -> dict[str, CacheGroup]:
        """The replica's cache groups beside that of full attention."""
        self._replica(slot)
        return self._groups.of.get(slot, {})

    def remove(self, slot: int, engine_keys: Sequence[int | bytes], tier: str = "gpu") -> int:
        """The replica reports that it dropped these; gives how many of them were known and are gone."""
        self._replica(slot)
        if not engine_keys or (tier != "gpu" and tier not in self._lower and tier not in self.groups(slot)):
            return 0
        return self.change(slot, Remove(tier, self._gpu.tags(engine_keys)))

    def change(self, slot: int, change: Change) -> int:
        """One change to what a replica is known to hold, in terms that mean the same in every map.

        All changes pass here, those of `store`, `remove`, `clear` and `observed` too, so a map that is told
        the same ones in the same order holds the same. Gives how many blocks are gone for a Remove.
        """
        replica = self._replica(slot)
        if isinstance(change, Store) and not replica.observed:
            return 0
        if replica.journal is not None:
            replica.journal(change)
        if isinstance(change, Store):
            tier, hashes, tags, heads = change
            table = self._table(tier, slot)
            for again in table.store(slot, hashes, tags, heads) if len(hashes) else ():
                replica.copies[tier, int(tags[again])] += 1
        elif isinstance(change, Remove):
            return self._remove(slot, replica, change)
        elif isinstance(change, Clear):
            self._clear(slot, replica, change.below)
        elif replica.observed != change.observed:
            self._clear(slot, replica)
            replica.observed = change.observed
            self._recount()
        return 0

    def _remove(self, slot: int, replica: _Replica, change: Remove) -> int:
        tier, tags = change
        if replica.copies:
            tags = u64(tag for tag in tags.tolist() if not replica.fewer(tier, tag))
        hashes = self._table(tier, slot).remove(slot, tags)
        if self._routed and tier not in self._lower:
            self._routed.discard(slot, array("Q", hashes.tobytes()))
        return len(hashes)

    def _clear(self, slot: int, replica: _Replica, below: bool = True) -> None:
        self._gpu.capacity.clear(slot)
        spared = () if below else self._outliving(slot)
        for tier, table in self._lower.items():
            if tier not in spared:
                table.capacity.clear(slot)
        self._groups.keep(slot, ())
        for copy in [copy for copy in replica.copies if copy[0] not in spared]:
            del replica.copies[copy]
        self._routed.clear(slot)
        replica.model.clear()
        self._last = ([], [], None)

    def hold(self, more: int) -> bool:
        """Whoever makes blocks of what engines tell keeps so many bytes more for that, or less; False: it may not."""
        return self._budget.hold(more)

    def record(self, slot: int, journal: Callable[[Change], None] | None) -> None:
        """Tell `journal` of every change to this replica from now on, before it is made."""
        self._replica(slot).journal = journal

    @property
    def tag_bits(self) -> int:
        """Maps can exchange changes and contents if this is equal."""
        return self._gpu.tag_bits

    def held(self, slot: int) -> int:
        """Blocks that events told of this replica, in all tiers and cache groups."""
        lower = zip(self._tiers, self._lower.values(), strict=True)
        below = sum([table.aliases[slot].count * (tier.blocks if tier.own else 1) for tier, table in lower])
        return self._gpu.aliases[slot].count + below + self._groups.held(slot)

    def contents(self, slot: int) -> Contents:
        """All that events told of this replica."""
        replica = self._replica(slot)
        tiers = {"gpu": self._gpu, **self._lower}
        held = {tier: table.contents(slot) for tier, table in tiers.items() if table.aliases[slot].count}
        held |= {name: self._groups.tables[name].contents(slot) for name in self.groups(slot)}
        return Contents(replica.observed, held, dict(replica.copies))

    def differs(self, slot: int) -> Callable[[Sequence[int | bytes]], tuple[list[int], list[int]]]:
        """What events have told of the replica's GPU until now, to be compared with the keys of all that it says it has
        there: which of them are not known, by their position, and the hashes of the blocks that are known besides.

        For a million blocks this takes 20 ms, and the comparison 1.2 s; that may be done in a thread."""
        self._replica(slot)
        hashes, known = self._gpu.held(slot)

        def compare(engine_keys: Sequence[int | bytes]) -> tuple[list[int], list[int]]:
            tags = self._gpu.tags(engine_keys)
            besides: list[int] = hashes[~np.isin(known, tags)].tolist()
            return (~np.isin(tags, known)).nonzero()[0].tolist(), besides

        return compare

    def become(self, slot: int, contents: Contents) -> Iterator[None]:
        """Make a replica's part equal to contents, in steps of a millisecond: between them others may look
        things up. Only what differs is touched. Not journaled."""
        replica = self._replica(slot)
        if replica.observed != contents.observed:
            self._clear(slot, replica)
            replica.observed = contents.observed
            self._recount()
        replica.copies = Counter(contents.copies)
        self._groups.keep(slot, contents.held)
        for tier in {"gpu", *self._lower, *contents.held}:
            table = self._table(tier, slot)
            hashes, tags = contents.held.get(tier, (NO_BLOCKS, NO_BLOCKS))
            missing, besides = table.differing(slot, hashes, tags)
            if len(besides):
                table.remove(slot, besides)
                yield
            for start in range(0, len(missing), PIECE):
                piece = missing[start : start + PIECE]
                table.store(slot, hashes[piece], tags[piece], [(0, 0)])
                yield

    def resolve(self, slot: int, engine_keys: Sequence[int | bytes]) -> list[int]:
        """Hashes of the blocks the replica holds in any tier or group under these keys, 0 if unknown."""
        self._replica(slot)
        tags = self._gpu.tags(engine_keys)
        hashes: np.ndarray = self._gpu.resolve(slot, tags)
        for table in [*self._lower.values(), *self._groups.of_slot(slot)]:
            if hashes.all():
                break
            hashes = np.where(hashes == 0, table.resolve(slot, tags), hashes)
        known: list[int] = hashes.tolist()
        return known

    def clear(self, slot: int, below: bool = True) -> None:
        """The replica holds nothing: it said so, restarted, or we lost track of it. Without `below`, tiers that outlive
        its own cache stay."""
        self.change(slot, Clear(below or not self._outliving(slot)))

    def _outliving(self, slot: int) -> list[str]:
        """The tiers with blocks of this replica that its own cache's end leaves as they are."""
        return [tier for tier, table in self._lower.items() if table.aliases[slot].count and outlives(tier)]

    def observed(self, slot: int, observed: bool) -> None:
        """Follow the replica's events from now on, or model its cache; starts from nothing."""
        if self._replica(slot).observed != observed:
            self.change(slot, Observe(observed))

    def learn(self, slot: int, hashes: Sequence[int], predicted_blocks: int, reported_blocks: int) -> None:
        """The engine reported how much of a prompt it had; corrects what is modelled of the replica."""
        replica = self._replica(slot)
        if not replica.observed or type(hashes) is GuessedBlocks:
            replica.model.learn(predicted_blocks, reported_blocks)

    def stats(self) -> dict[str, Any]:
        """Sizes: `bytes` counts tables and the estimate for predicted and modelled blocks."""
        tables = (self._gpu, *self._lower.values(), *self._groups.tables.values())
        blocks = sum(table.blocks.index.count for table in tables)
        chained = len(self._routed) + sum(len(replica.model) for _, replica in self._live)
        return {
            "blocks": blocks,
            "bytes": self._budget.used + chained * BYTES_PER_BLOCK,
            "bytes_per_block": self._budget.used / blocks if blocks else 0.0,
            "predicted": len(self._routed),
            "modelled": sum(len(replica.model) for _, replica in self._live),
            "evicted": sum(table.capacity.evicted for table in tables),
            "refused": sum(table.refused for table in tables),
            "slots": {
                slot: self.held(slot) if replica.observed else len(replica.model) for slot, replica in self._live
            },
        }

    def _replica(self, slot: int) -> _Replica:
        replica = self._replicas[slot] if 0 <= slot < len(self._replicas) else None
        if replica is None:
            raise KeyError(f"no replica is attached to slot {slot}")
        return replica

    def _table(self, tier: str, slot: int) -> BlockTable:
        if tier == "gpu":
            return self._gpu
        table = self._lower.get(tier)
        if table is None:
            if (group := CacheGroup.of(tier)) is not None:
                return self._groups.table(slot, group)
            chunks = ChunkTier.of(tier)
            if tier not in LOWER_TIERS and chunks is None:
                raise ValueError(f"tier {tier!r} is none of gpu, {', '.join(LOWER_TIERS)}")
            table = self._add_lower(tier, chunks or ChunkTier(tier, 1, own=True))
        return table

    def _add_lower(self, tier: str, chunks: ChunkTier) -> BlockTable:
        table = BlockTable(self._budget)
        for slot, replica in enumerate(self._replicas):
            if replica is not None:
                table.capacity.attach(slot, 0)
        place = sum(LOWER_TIERS.index(one.base) <= LOWER_TIERS.index(chunks.base) for one in self._tiers)
        self._tiers.insert(place, chunks)
        lower = list(self._lower.items())
        lower.insert(place, (tier, table))
        self._lower = dict(lower)
        return table


def _in_own_chunks(slot: int, start: int, size: int, tiers: list[tuple[str, list[int]]]) -> list[tuple[str, int]]:
    """Runs behind a prompt's first `start` blocks, in tiers of whole chunks of `size`; `tiers`: who holds each."""
    runs: list[tuple[str, int]] = []
    for number in range(start // size, len(tiers[0][1])):
        base = next((base for base, holders in tiers if holders[number] >> slot & 1), None)
        if base is None:
            break
        _add(runs, base, min(size, (number + 1) * size - start))
    return runs if sum([count for _, count in runs]) >= size else []  # less than a chunk is not fetched


def _but_last(runs: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The same without the last block."""
    return [*runs[:-1], (runs[-1][0], runs[-1][1] - 1)] if runs and runs[-1][1] > 1 else runs[:-1]


def _add(runs: list[tuple[str, int]], tier: str, count: int) -> None:
    before = runs.pop()[1] if runs and runs[-1][0] == tier else 0
    runs.append((tier, before + count))
