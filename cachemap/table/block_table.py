"""The block table of one tier: which replicas hold which block, at about 30 bytes a block.

A look-up reads `Blocks`; `Capacity` makes the table grow and evicts from it; this module applies the changes that
engines' events report. A removal event carries only the engine's own key of a block, so each replica has a table of
aliases, which maps the engine's key to the number that the block has in this table.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from cachemap.table.blocks import OLDEST, u64
from cachemap.table.buckets import MIX, U64, distinct
from cachemap.table.capacity import Budget, Capacity

Heads = list[tuple[int, int]]


class BlockTable:
    """The confirmed blocks of one memory tier (GPU, host memory, ...) and the replicas that hold them.

    A replica goes by its slot (its index, a small int). Arrays of block hashes and of tags (shortened engine keys, see
    `tags`) are uint64. Look prompts up through `blocks`; attach, detach and clear replicas through `capacity`.
    `refused`: how many blocks were not stored because the memory budget had no room.
    """

    def __init__(self, budget: Budget):
        self.capacity = Capacity(budget)
        self.blocks = self.capacity.blocks
        self.aliases = self.capacity.aliases
        self.refused = 0
        id_bits = self.capacity.id_bits
        self._id_mask = U64((1 << id_bits) - 1)
        self._tag_top = U64(1 << (63 - id_bits))
        self._tag_shift = U64(id_bits)

    @property
    def tag_bits(self) -> int:
        """The width in bits of a tag (a shortened engine key), including its top bit, which is always set."""
        return 64 - self.capacity.id_bits

    def store(self, slot: int, hashes: np.ndarray, tags: np.ndarray, heads: Heads) -> list[int]:
        """Record that the replica holds these blocks; return the indices of the blocks that it held already.

        Each returned index means one more copy of a block with the same hash and tag. If the blocks do not fit into the
        memory budget, none is stored and all are counted in `refused`.

        `slot`: the replica's index. `hashes`, `tags`: each block's hash and tag (shortened engine key). `heads`: for
        each chain of consecutive blocks, the index of its first block and the hash of the block before it (0 at the
        start of a prompt).
        """
        numbers = self._settle(slot, hashes, heads)
        if numbers is None:
            self.refused += len(hashes)
            return []
        alias = self.aliases[slot]
        packed = (tags << self._tag_shift) | numbers.view(np.uint64)
        at = alias.find(tags)
        if (at >= 0).any() or self._held(slot, numbers).any() or len(distinct(numbers)) < len(numbers):
            return self._store_again(slot, numbers, packed, at)
        self.blocks.join(slot, numbers)
        lost = alias.words.take(alias.add(tags, packed)) != packed
        if lost.any():  # two of these blocks have one tag: the engine's key is repeated, or two keys collide
            self.blocks.release(slot, numbers[lost])
        return []

    def _held(self, slot: int, numbers: np.ndarray) -> np.ndarray:
        return self.blocks.holders.has(self.blocks.sets.take(numbers), slot)

    def _store_again(self, slot: int, numbers: np.ndarray, packed: np.ndarray, at: np.ndarray) -> list[int]:
        """Store blocks if some of their hashes or tags are known already, or occur twice among them.

        A tag is a shortened engine key. Returns, as `store` does, the indices of the blocks that the replica held
        already. `numbers`: the blocks' numbers in this table. `packed`: for each block its tag and number in one 64-bit
        word. `at`: the place of each tag in the replica's table of aliases, -1 if the tag is unknown.
        """
        alias, twins = self.aliases[slot], self.capacity.twins.setdefault(slot, Counter())
        known = at >= 0
        again: list[int] = known.nonzero()[0][alias.payloads(at[known]) == numbers[known]].tolist()
        renamed = distinct(at[known])
        before = alias.payloads(renamed)
        alias.put(at[known], packed[known])
        added = np.empty(0, np.int64)
        if len(again) < len(numbers):
            added = distinct(alias.add(packed[~known] >> self._tag_shift, packed[~known]))
        now = alias.payloads(renamed)
        moved = before != now
        named = np.concatenate((now[moved], alias.payloads(added)))
        first = distinct(named[~self._held(slot, named)])
        if len(first):
            self.blocks.join(slot, first)
        if len(first) < len(named):
            beyond = Counter(named.tolist()) - Counter(first.tolist())
            twins.update(dict(zip(self.blocks.hashes[[*beyond]].tolist(), beyond.values())))
        self._unname(slot, before[moved])
        self.blocks.release(slot, numbers[~self._held(slot, numbers)])  # blocks whose tag now names another block
        return again

    def _unname(self, slot: int, numbers: np.ndarray) -> np.ndarray:
        """Subtract one from each block's count of aliases (engine keys), and release blocks without any alias left.

        `numbers`: the blocks' numbers in this table. Returns the hashes of the released blocks, which the replica no
        longer holds.
        """
        hashes: np.ndarray = self.blocks.hashes[numbers]
        twins = self.capacity.twins.get(slot)
        if twins:
            last = np.array([not fewer(twins, block) for block in hashes.tolist()], bool)
            numbers, hashes = numbers[last], hashes[last]
        self.blocks.release(slot, numbers)
        return hashes

    def _settle(self, slot: int, hashes: np.ndarray, heads: Heads) -> np.ndarray | None:
        """Return the blocks' numbers in this table, after adding unknown blocks; None if they do not fit.

        Also marks the blocks as used now. The arguments are those of `store`.
        """
        if not self.capacity.fit(slot, len(hashes)):
            return None
        numbers = self.blocks.index.numbers(hashes)
        new = (numbers == 0).nonzero()[0]
        if len(new):
            numbers[new] = self.blocks.enter(hashes.take(new), self.capacity.end())
        ends = [head for head, _ in heads[1:]] + [len(numbers)]
        for (start, parent), end in zip(heads, ends):
            self.blocks.date(numbers[start:end], parent)
        self.blocks.tick(len(numbers))
        return numbers

    def remove(self, slot: int, tags: np.ndarray) -> np.ndarray:
        """Remove the engine keys with these tags from the replica; return the hashes of the blocks it no longer holds.

        A tag is a shortened engine key (see `tags`). The replica holds a block until the last of its keys is removed.
        """
        self.capacity.clean()
        alias = self.aliases[slot]
        at = alias.find(tags)
        at = distinct(at[at >= 0])
        numbers = alias.payloads(at)
        alias.drop(at)
        return self._unname(slot, numbers)

    def resolve(self, slot: int, tags: np.ndarray) -> np.ndarray:
        """Return the hash of the replica's block with each tag (shortened engine key), 0 where the tag is unknown."""
        alias = self.aliases[slot]
        at = alias.find(tags)
        hashes = self.blocks.hashes.take(alias.payloads(at))
        hashes[at < 0] = 0
        return hashes

    def held(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the hashes and the tags (shortened engine keys) of all blocks that the replica holds, in no order."""
        alias = self.aliases[slot]
        words = alias.words[alias.words.nonzero()]
        return self.blocks.hashes[(words & self._id_mask).view(np.int64)], words >> self._tag_shift

    def contents(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the hashes and the tags (shortened engine keys) of all blocks that the replica holds.

        Both arrays begin with the least recently used block.
        """
        hashes, tags = self.held(slot)
        numbers = self.aliases[slot].payloads(self.aliases[slot].words.nonzero()[0])
        order = np.argsort(OLDEST * 2 - 1 - self.blocks.ages(numbers), kind="stable")
        return hashes[order], tags[order]

    def differing(self, slot: int, hashes: np.ndarray, tags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compare the blocks that the table has for the replica with the given ones.

        Returns the indices of the given blocks that the replica does not hold, and the tags (shortened engine keys) of
        the blocks that it holds besides the given ones.
        """
        alias = self.aliases[slot]
        at = alias.find(tags)
        held = self.blocks.hashes.take(alias.payloads(at)) == hashes
        missing = ((at < 0) | ~held).nonzero()[0]
        besides = alias.words != 0
        besides[at[at >= 0]] = False
        return missing, alias.words[besides] >> self._tag_shift

    def tags(self, engine_keys: Sequence[int | bytes]) -> np.ndarray:
        """Return a tag for each engine key: the key's bits mixed and cut to `tag_bits` bits, as uint64, never 0."""
        try:
            keys = u64(engine_keys)  # type: ignore[arg-type]  # tried first: most engines' keys are ints
        except (TypeError, OverflowError):  # bytes, or ints that are signed or longer
            keys = u64(map(key_bits, engine_keys))
        return ((keys * MIX) >> self._tag_shift) | self._tag_top


def fewer(counts: Counter[Any], what: object) -> bool:
    """Remove one of a block's further copies, those beyond the first; return whether it had any.

    If the result is False, the block had only one copy and is gone with it. `counts`: the number of further copies, by
    block. `what`: the block.
    """
    beyond = counts.get(what, 0)
    if beyond > 1:
        counts[what] = beyond - 1
    elif beyond:
        del counts[what]
    return beyond > 0


def key_bits(key: int | bytes) -> int:
    """Return an engine key as u64: an int's low 64 bits, or the last 8 bytes of a digest, as vLLM shortens it."""
    return (int.from_bytes(key[-8:], "big") if isinstance(key, bytes) else key) & (1 << 64) - 1
