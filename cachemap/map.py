"""The cache map: for every replica (engine), how many leading blocks of a prompt its KV cache holds.

What the map knows of a replica comes from one of three sources:
confirmed blocks, which the engine reported in events: in block tables, one for each tier (GPU, host memory, disk ...);
predicted blocks, those of prompts just routed to the replica: kept apart, and forgotten after some seconds;
modelled blocks, where the engine publishes no events: those in a model of its cache, fed with the routed prompts.
Replicas with events have a model too, for the parts of prompts that no event reports (`GuessedBlocks`).
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from cachemap.changes import CacheGroup, Change, ChunkTier, Clear, Contents, Observe, Remove, Store, outlives
from cachemap.hashing import GuessedBlocks
from cachemap.table.block_table import BlockTable, fewer
from cachemap.table.blocks import NO_BLOCKS, u64
from cachemap.table.capacity import Budget
from cachemap.table.chains import BYTES_PER_BLOCK, EngineModel
from cachemap.table.groups import GroupTables
from cachemap.table.routed import Routed

# How long a routed prompt's blocks are predicted: longer than a queue and a prefill take, shorter than the time in
# which a cache is replaced.
PREDICTED_SECONDS = 5.0
UNKNOWN_CAPACITY = 8192  # blocks assumed for an engine that does not report its capacity: 131,072 tokens at 16 a block
LOWER_TIERS = ("cpu", "disk", "remote")  # memory slower than the GPU's, nearest first
LEAST_BUDGET = 1 << 20
PIECE = 1024  # blocks stored by one call to a table: enough to spread a call's cost, few compared with any table


@dataclass(slots=True)
class Match:
    """How many blocks of one prompt each replica has in its KV cache; a replica goes by its slot, its index in the map.

    `held`: for each slot, how many blocks from the prompt's start the replica is known or assumed to hold: confirmed by
    events, predicted, or modelled.
    `confirmed`: for each slot, how many blocks from the prompt's start events confirm.
    `lower`: by slot, the blocks after the `held` ones that are in slower memory tiers, as runs of (tier, number of
    blocks) in the prompt's order; a slot without such blocks is left out.
    For a replica with several cache groups (`CacheGroup`) a block counts only if it is a hit in all groups.
    """

    held: list[int]
    confirmed: list[int]
    lower: dict[int, list[tuple[str, int]]]


@dataclass(slots=True)
class _Replica:
    name: str
    model: EngineModel
    observed: bool
    # Two requests that compute the same block leave two copies of it, and engines report the storing and the removal
    # of each. The block is gone with its last copy. `copies`: by tier and tag (shortened engine key) of a block, how
    # many copies it has beyond the first.
    copies: Counter[tuple[str, int]] = field(default_factory=Counter)
    journal: Callable[[Change], None] | None = None


class CacheMap:
    """The blocks that each replica is known, predicted or modelled to hold, within `budget_bytes` of memory.

    A replica goes by its slot: a small int that indexes the lists in `Match` and is reused after `detach`. A block goes
    by its hash, a nonzero u64 from `hash_blocks`. Parameters called `now` are in seconds, monotonic. Methods that
    change a replica raise KeyError if no replica has the slot. Not thread-safe. Every call is short: growth, eviction
    and the removal of a replica advance with each call, in steps of at most some milliseconds (see bench/scale.py).
    """

    def __init__(self, budget_bytes: int, predicted_seconds: float = PREDICTED_SECONDS):
        if budget_bytes < LEAST_BUDGET:
            raise ValueError(f"budget_bytes is {budget_bytes}, the least is {LEAST_BUDGET} (1 MiB)")
        self._chain_budget = budget_bytes // 4  # for predicted and modelled blocks
        self._budget = Budget(budget_bytes - self._chain_budget)
        self._gpu = BlockTable(self._budget)
        self._lower: dict[str, BlockTable] = {}
        # The tiers slower than the GPU, nearest first, in the order of `_lower`. A tier that finds single blocks is
        # entered as the engine's own tier with chunks of one block.
        self._tiers: list[ChunkTier] = []
        self._groups = GroupTables(self._budget)
        self._routed = Routed(predicted_seconds, self._groups.of)
        self._replicas: list[_Replica | None] = []
        self._live: list[tuple[int, _Replica]] = []
        self._modelled: list[tuple[int, EngineModel]] = []
        self._observed = False
        self._dropping: dict[int, bool] = {}  # `to_end` of `drop`, by slot
        # The last call of `match`: its `hashes`, how many leading blocks full attention holds by slot, and its `most`.
        self._last: tuple[Sequence[int], list[int], int | None] = ([], [], None)

    def attach(self, name: str, capacity_blocks: int | None, observed: bool) -> int:
        """Add a replica and return its slot, the index by which the other methods address it.

        `capacity_blocks`: the size of the replica's cache in blocks, None if unknown.
        `observed`: the replica's events are followed; otherwise its cache is modelled.
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
        """Set the size of the replica's cache in blocks, None if unknown."""
        self._replica(slot).model.resize(capacity_blocks or UNKNOWN_CAPACITY)
        self._gpu.capacity.expect(slot, capacity_blocks or 0)

    def detach(self, slot: int) -> None:
        """Remove the replica with all of its blocks; its slot may then be given to another replica."""
        self._replica(slot)
        for table in (self._gpu, *self._lower.values()):
            table.capacity.detach(slot)
        self._groups.keep(slot, ())
        self._routed.clear(slot)
        self._dropping.pop(slot, None)
        self._replicas[slot] = None
        self._recount()

    def _recount(self) -> None:
        """Recompute the lists of attached and of modelled replicas, and the limits on predicted and modelled blocks.

        Called when a replica is attached or removed, or changes between events and a model of its cache. The limits
        divide the memory budget for such blocks among the replicas.
        """
        self._live = [(slot, replica) for slot, replica in enumerate(self._replicas) if replica]
        self._modelled = [(slot, one.model) for slot, one in self._live if not one.observed]
        self._observed = len(self._modelled) < len(self._live)  # predictions are only made for observed replicas
        most = self._chain_budget // BYTES_PER_BLOCK // max(len(self._live), 1)
        guessed = most // 4  # the model of a replica with events only has `GuessedBlocks`
        self._routed.most = (most - guessed) * (len(self._live) - len(self._modelled)) // 2  # two generations of them
        for _, replica in self._live:
            replica.model.most = guessed if replica.observed else most

    def match(self, hashes: Sequence[int], now: float, most: int | None = None) -> Match:
        """Return how many blocks of the prompt with these block hashes each replica holds.

        `most`: how many of the prompt's blocks can be hits (None: all); the block with the last token cannot, as the
        engine always computes that token. `most` matters only for replicas with several cache groups (layers of
        several kinds, each kind with blocks of its own), and for replicas that drop the last block of a hit (`drop`).
        """
        if self._observed:
            gpu = self._gpu.blocks
            found = gpu.prefix(hashes)
            full = confirmed = gpu.reach(found, len(self._replicas))
            grouped = self._groups.of
            if grouped:
                confirmed = full.copy()
                for slot, reach in self._groups.reach(hashes, full, len(hashes) if most is None else most).items():
                    confirmed[slot] = reach
            held = confirmed.copy()
            if self._routed:
                for slot, reach in self._routed.reach(hashes, now, full).items():
                    if not grouped or slot not in grouped:
                        while reach < found.count and gpu.holds(slot, found.number(reach)):
                            reach += 1  # confirmed blocks that follow the predicted ones
                    held[slot] = reach
        else:  # no replica reports its blocks, so the tables are empty
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
        """Set whether the replica drops (recomputes) the last block of each hit.

        Engines that speculate with the model's hidden states do so. `to_end`: if the replica has several cache groups,
        its lookup includes a block that ends exactly at the prompt's end.
        """
        self._replica(slot)
        if drops:
            self._dropping[slot] = to_end
        else:
            self._dropping.pop(slot, None)

    def drops(self, slot: int) -> bool:
        """Return whether the replica was set by `drop` to recompute the last block of each hit."""
        return slot in self._dropping

    def _drop(self, hashes: Sequence[int], full: list[int], held: list[int], confirmed: list[int], most: int) -> None:
        """Shorten hits, in place, for replicas that recompute the last block of a hit.

        With several cache groups a hit may become shorter by more than one block, so it is looked up again. `full`: for
        each slot (a replica's index), how many leading blocks full attention holds; `held` and `confirmed`: the lists
        of `Match`, changed here; `most`: how many of the prompt's blocks can be hits.
        """
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

    def _guess(self, hashes: GuessedBlocks, held: list[int]) -> None:
        """Extend `held`, in place, over those blocks of the prompt that engine events never report.

        `held`: for each slot (a replica's index), how many leading blocks the replica holds. A replica is assumed to
        hold such blocks if this prompt was sent to it before, its model of the cache has not evicted them since, and it
        still holds all known blocks before them.
        """
        for slot, replica in self._live:
            if replica.observed and held[slot] >= hashes.known:
                held[slot] = max(held[slot], replica.model.reach(hashes))

    def _further(self, hashes: Sequence[int], held: list[int]) -> dict[int, list[tuple[str, int]]]:
        """Return for each replica which blocks in slower memory tiers directly follow its first `held` blocks.

        The result is `Match.lower`: by slot (the replica's index), runs of (tier, number of blocks).
        """
        wanted = u64(hashes)
        in_chunks: list[tuple[ChunkTier, list[int]]] = []
        tiers: list[tuple[str, list[int]]] = []  # each with every block's holders, an int with a bit for each slot
        for tier, table in zip(self._tiers, self._lower.values(), strict=True):
            chunk = tier.blocks
            holders = table.blocks.holders_of(wanted[chunk - 1 :: chunk])  # a chunk is known by its last block
            if tier.own and chunk > 1:
                in_chunks.append((tier, holders))
            else:
                tiers.append((tier.base, holders if chunk == 1 else [one for one in holders for _ in range(chunk)]))
        lower = {}
        for slot, _ in self._live:
            if slot in self._groups.of:
                continue  # events do not say which of its groups a slower tier holds
            start = held[slot]
            size = self.own_chunk(slot) if in_chunks else 1
            of_size = [(tier.base, holders) for tier, holders in in_chunks if tier.blocks == size]
            bases = _in_own_chunks(slot, start, size, of_size) if of_size else []
            for i in range(start, len(hashes) if not bases else 0):
                base = next((base for base, holders in tiers if i < len(holders) and holders[i] >> slot & 1), None)
                if base is None:
                    break
                bases.append(base)
            if slot in self._dropping:
                del bases[-1:]
            if bases:
                lower[slot] = [(base, len(list(run))) for base, run in groupby(bases)]
        return lower

    def holds_below(self, slot: int) -> bool:
        """Return whether events reported any block of this replica in a tier slower than the GPU."""
        return any(table.aliases[slot].count for table in self._lower.values())

    def chunk_tiers(self, slot: int) -> list[ChunkTier]:
        """Return the slower memory tiers in which this replica has blocks that are kept in chunks of several blocks."""
        tables = zip(self._tiers, self._lower, self._lower.values(), strict=True)
        return [tier for tier, name, table in tables if name not in LOWER_TIERS and table.aliases[slot].count]

    def own_chunk(self, slot: int) -> int:
        """Return the size in blocks of this replica's chunks in the engine's own slower tiers, or 1 if it has none.

        A chunk is a run of blocks that are only found together. If events reported several sizes, the largest is meant.
        """
        tables = zip(self._tiers, self._lower.values(), strict=True)
        return max([tier.blocks for tier, table in tables if tier.own and table.aliases[slot].count], default=1)

    def last_below(self, slot: int, hashes: Sequence[int], held: int) -> int | None:
        """Return by how many tokens an engine's report is short of a prompt's last block that a slower tier has.

        The result is 0 if the nearest slower tier that has the block is the engine's own, 1 if it is a store below the
        engine, and None if no slower tier has the block. The one token is the prompt's last. The engine always computes
        it, but reports it as cached if the block is in a tier of its own.

        `hashes`: the hashes of the prompt's blocks; the prompt must end exactly with the last block. `held`: how many
        leading blocks are found elsewhere, on the GPU for example.
        """
        if slot not in self._groups.of:
            last = u64(hashes[-1:])
            for (_, chunk, own), table in zip(self._tiers, self._lower.values(), strict=True):
                whole = not len(hashes) % chunk and (not own or len(hashes) - held >= chunk)
                if whole and table.blocks.holders_of(last)[0] >> slot & 1:
                    return 0 if own else 1
        return None

    def leading(self, tier: str, hashes: Sequence[int]) -> list[int]:
        """Return for each slot (a replica's index) how many leading blocks the replica holds in this slower tier.

        Blocks that the replica holds only in other tiers do not count. A replica with several cache groups gets 0, as
        events do not say which groups the tier holds.
        """
        most = [0] * len(self._replicas)
        for (base, chunk, own), table in zip(self._tiers, self._lower.values(), strict=True):
            if base == tier and own:
                found = table.blocks.reach(table.blocks.prefix(hashes[chunk - 1 :: chunk]), len(self._replicas))
                most = [max(blocks, chunks * chunk) for blocks, chunks in zip(most, found, strict=True)]
        return [0 if slot in self._groups.of else blocks for slot, blocks in enumerate(most)]

    def expect(self, slot: int, hashes: Sequence[int], now: float) -> int:
        """Note that a prompt with these blocks was just routed to this replica; return a number for `take_back`.

        From now on `match` predicts that the replica holds the blocks. The number is 0 if no prediction is needed. That
        is so if the replica's cache is modelled, or if the last `match` was called with the same list object and found
        all of its blocks confirmed.
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
        """Withdraw the prediction that `expect` made for a prompt, as the replica has not computed the prompt.

        `hashes`: the prompt's blocks. `held`: how many leading blocks the replica was taken to hold before this prompt.
        `number`: the result of `expect`.
        """
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
        """Record that the replica holds these blocks.

        `engine_keys`: the engine's own key of each block. `heads`: for each chain of consecutive blocks, in order, the
        index of its first block and the hash of the block before it (0 at a prompt's start). None means that all blocks
        are one chain from a prompt's start. Storing a known key again in a separate call counts as one more copy of the
        block.
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
        """Record that the replica has this cache group (layers with blocks of their own) besides full attention.

        The group's blocks are stored and removed with `tier` set to `group.tier`. `clear` also forgets the group.
        """
        if group.tier not in self.groups(slot):
            self.change(slot, Store(group.tier, NO_BLOCKS, NO_BLOCKS, []))

    def groups(self, slot: int) -> dict[str, CacheGroup]:
        """Return the replica's cache groups (layers with blocks of their own) besides full attention, by tier name."""
        self._replica(slot)
        return self._groups.of.get(slot, {})

    def remove(self, slot: int, engine_keys: Sequence[int | bytes], tier: str = "gpu") -> int:
        """Remove one copy of each block with these engine keys; return how many blocks the replica no longer holds.

        A block is gone only when its last copy is removed. Unknown keys are ignored.
        """
        self._replica(slot)
        if not engine_keys or (tier != "gpu" and tier not in self._lower and tier not in self.groups(slot)):
            return 0
        return self.change(slot, Remove(tier, self._gpu.tags(engine_keys)))

    def change(self, slot: int, change: Change) -> int:
        """Apply one change to the blocks that a replica is known to hold.

        Returns how many blocks a Remove took from the replica, else 0. All changes go through here, including those of
        `store`, `remove`, `clear` and `observed`, so maps that apply the same changes in the same order are equal.
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
            tags = u64(tag for tag in tags.tolist() if not fewer(replica.copies, (tier, tag)))
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
        """Reserve `more` bytes of the memory budget for data that the decoding of events keeps.

        A negative number releases bytes. Returns False, and reserves nothing, if the budget has no room.
        """
        return self._budget.hold(more)

    def record(self, slot: int, journal: Callable[[Change], None] | None) -> None:
        """Call `journal` with each change to this replica from now on, before it is applied; None ends the calls."""
        self._replica(slot).journal = journal

    @property
    def tag_bits(self) -> int:
        """The width in bits of tags (shortened engine keys); only maps with equal widths can exchange changes."""
        return self._gpu.tag_bits

    def held(self, slot: int) -> int:
        """Return how many blocks this replica holds according to its events, in all tiers and cache groups."""
        lower = zip(self._tiers, self._lower.values(), strict=True)
        below = sum([table.aliases[slot].count * (tier.blocks if tier.own else 1) for tier, table in lower])
        return self._gpu.aliases[slot].count + below + self._groups.held(slot)

    def contents(self, slot: int) -> Contents:
        """Return all blocks that this replica holds according to its events, with the counts of their copies."""
        replica = self._replica(slot)
        tiers = {"gpu": self._gpu, **self._lower}
        held = {tier: table.contents(slot) for tier, table in tiers.items() if table.aliases[slot].count}
        held |= {name: self._groups.tables[name].contents(slot) for name in self.groups(slot)}
        return Contents(replica.observed, held, dict(replica.copies))

    def differs(self, slot: int) -> Callable[[Sequence[int | bytes]], tuple[list[int], list[int]]]:
        """Take a snapshot of the replica's GPU blocks; return a function that compares it with the engine's keys.

        The returned function takes the keys of all blocks that the engine says it has on the GPU. It returns the
        positions of the keys that the map does not know, and the hashes of the blocks that only the map has. For a
        million blocks the snapshot takes 20 ms and the comparison 1.2 s; the comparison may run in a thread.
        """
        self._replica(slot)
        hashes, known = self._gpu.held(slot)

        def compare(engine_keys: Sequence[int | bytes]) -> tuple[list[int], list[int]]:
            tags = self._gpu.tags(engine_keys)
            besides: list[int] = hashes[~np.isin(known, tags)].tolist()
            return (~np.isin(tags, known)).nonzero()[0].tolist(), besides

        return compare

    def become(self, slot: int, contents: Contents) -> Iterator[None]:
        """Change the replica's confirmed blocks to those of `contents`, in steps of a millisecond.

        Iterate to the end; between steps the map can be used. Only blocks that differ are changed, and the function set
        by `record` is not called.
        """
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
        """Return the hash of the replica's block for each engine key, in any tier or cache group; 0 if unknown."""
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
        """Forget all blocks of the replica.

        Without `below`, blocks in slower tiers that outlive the engine's own cache (`outlives`) are kept.
        """
        self.change(slot, Clear(below or not self._outliving(slot)))

    def _outliving(self, slot: int) -> list[str]:
        """Return the tiers whose blocks of this replica stay when the engine's own cache is cleared (`outlives`)."""
        return [tier for tier, table in self._lower.items() if table.aliases[slot].count and outlives(tier)]

    def observed(self, slot: int, observed: bool) -> None:
        """Set whether the replica's blocks come from its events or, if `observed` is False, from a model of its cache.

        If this changes, all blocks of the replica are forgotten.
        """
        if self._replica(slot).observed != observed:
            self.change(slot, Observe(observed))

    def learn(self, slot: int, hashes: Sequence[int], predicted_blocks: int, reported_blocks: int) -> None:
        """Correct the modelled size of the replica's cache by the outcome of one prompt.

        `hashes`: the prompt's blocks. `predicted_blocks`, `reported_blocks`: how many of them the map predicted, and
        the engine reported, to be in the cache.
        """
        replica = self._replica(slot)
        if not replica.observed or type(hashes) is GuessedBlocks:
            replica.model.learn(predicted_blocks, reported_blocks)

    def stats(self) -> dict[str, Any]:
        """Return counts for metrics: blocks by source and by slot, memory, evicted and refused blocks.

        `bytes` counts the tables, and an estimate for predicted and modelled blocks.
        """
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


def _in_own_chunks(slot: int, start: int, size: int, tiers: list[tuple[str, list[int]]]) -> list[str]:
    """Return in which slower tiers one replica has the blocks after a prompt's first `start` blocks, as tier names.

    These are tiers of the engine that find a prompt only in whole chunks of `size` blocks. The list has one name for
    each block and ends before the first chunk that no tier has. `slot`: the replica's index. `tiers`: for each tier its
    name, and for each chunk of the prompt the replicas that hold it, as an int with a bit for each slot.
    """
    bases: list[str] = []
    for number in range(start // size, len(tiers[0][1])):
        base = next((base for base, holders in tiers if holders[number] >> slot & 1), None)
        if base is None:
            break
        bases += [base] * min(size, (number + 1) * size - start)
    return bases if len(bases) >= size else []  # the engine fetches no less than a chunk
