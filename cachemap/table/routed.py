"""Predicted blocks: the blocks of prompts routed to replicas within the last seconds, until events report them.

One tree serves all replicas, so a look-up walks it once, whatever the number of replicas; each segment has a stamp for
each replica that a prompt with its blocks was sent to. Adding a prompt of 110 blocks takes a sixth of the instructions
of a dict with an entry for each block and replica.
"""

from array import array
from collections.abc import Container, Iterator, Sequence

from cachemap.table.chains import Segment, Tree

SEGMENT_BLOCKS = 8  # a segment (tree node) counts as so many blocks (700 bytes), besides 9 bytes for each block

Stamp = tuple[float, int]  # when the prediction expires; the number of the last prompt that was sent with these blocks


class _Generation(Tree):
    """The blocks predicted for prompts that were routed within the same few seconds, and are discarded together."""

    __slots__ = ("_dropped", "_told", "_told_blocks", "ends")

    def __init__(self) -> None:
        super().__init__()
        self._told: list[tuple[int, int, Sequence[int]]] = []
        self._told_blocks = 0
        self._dropped: dict[tuple[int, int], int] = {}
        # By slot (replica's index), for replicas with several cache groups: the blocks after which hits can end.
        self.ends: dict[int, set[int]] = {}

    @property
    def size(self) -> int:
        """The memory that the predicted blocks take, in units of BYTES_PER_BLOCK bytes."""
        return self._count + SEGMENT_BLOCKS * len(self._heads) + self._told_blocks

    def add(self, slot: int, hashes: Sequence[int], stamp: Stamp) -> None:
        segment, held = self._longest(hashes)
        if 0 < held - segment.start < len(segment.blocks):
            rest, segment = segment, self._split(segment, held)
            segment.stamps = rest.stamps.copy()
        if held < len(hashes):
            segment = self._branch(segment, held, array("Q", hashes[held:]))
            segment.stamps = {}
        root = self._root
        while segment is not root:
            segment.stamps[slot] = stamp
            segment = segment.parent

    def beyond(self, hashes: Sequence[int], now: float, confirmed: Sequence[int]) -> Iterator[tuple[int, int, Segment]]:
        """Yield each replica for which more leading blocks of this chain are predicted than confirmed.

        Each result has the replica's slot (index), how many leading blocks were in a prompt sent to it, and the segment
        (tree node) of the last of these blocks. A replica may come several times, with the most blocks first. `now`:
        monotonic seconds, to leave out expired predictions. `confirmed`: for each slot, the number of confirmed leading
        blocks.
        """
        segment, end = self._longest(hashes)
        least, root = min(confirmed), self._root
        while end > least and segment is not root:
            for slot, (until, _) in segment.stamps.items():
                if end > confirmed[slot] and until > now:
                    yield slot, end, segment
            end, segment = segment.start, segment.parent

    def sent(self, slot: int, hashes: Sequence[int], now: float) -> int:
        """Return how many leading blocks of this chain are predicted for the replica and have not expired.

        `slot`: the replica's index. `now`: monotonic seconds.
        """
        segment, end = self._longest(hashes)
        while segment is not self._root and segment.stamps.get(slot, (now, 0))[0] <= now:
            end, segment = segment.start, segment.parent
        return end

    def drop(self, slot: int, number: int, hashes: Sequence[int]) -> None:
        """Record that a replica reported these blocks as dropped from its cache.

        `slot`: the replica's index. `number`: the number of the last prompt that was routed before the report.
        `hashes`: the blocks' hashes, which are put into the index (`dropped`) only when it is read, since most are
        never looked up.
        """
        self._told.append((slot, number, hashes))
        self._told_blocks += len(hashes)

    @property
    def dropped(self) -> dict[tuple[int, int], int]:
        """The blocks that replicas reported as dropped, by the replica's slot (index) and the block's hash.

        Routed prompts are numbered in order. The value is the number of the last prompt that was routed before the
        report: predictions that come from this prompt or an earlier one no longer hold for the block, those from a
        later one do.
        """
        if self._told:
            for slot, number, hashes in self._told:
                self._dropped.update(dict.fromkeys([(slot, block) for block in hashes], number))
            self._told.clear()
        return self._dropped

    def take_back(self, slot: int, hashes: Sequence[int], held: int, number: int) -> None:
        segment, end = self._longest(hashes)
        if end < segment.start + len(segment.blocks):  # the segment's end belongs to a longer prompt
            end, segment = segment.start, segment.parent
        while end > held:
            if slot in segment.stamps and segment.stamps[slot][1] <= number:
                if segment.start < held:
                    self._split(segment, held).stamps = segment.stamps.copy()
                del segment.stamps[slot]
            end, segment = segment.start, segment.parent

    def clear(self, slot: int) -> None:
        for segment in self._heads.values():
            segment.stamps.pop(slot, None)
        self.ends.pop(slot, None)


class Routed:
    """The predicted blocks of all replicas, in two generations, of which the older one is discarded as a whole.

    `most`: the memory that each generation may take, in units of BYTES_PER_BLOCK bytes.
    `seconds`: how long a prediction lasts.
    `grouped`: the slots (indices) of the replicas with several cache groups. Their predicted hits end only at the
    places that `add_in_groups` noted.
    """

    __slots__ = ("_new", "_number", "_old", "_seconds", "_turn", "_grouped", "most")

    def __init__(self, seconds: float, grouped: Container[int] = ()):
        self._seconds = seconds
        self._new, self._old = _Generation(), _Generation()
        self._turn = 0.0
        self._number = 0
        self.most = 1 << 30
        self._grouped = grouped

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def add(self, slot: int, hashes: Sequence[int], now: float) -> int:
        """Predict that the replica holds this prompt's blocks, from `now` until the prediction expires.

        `slot`: the replica's index. `now`: monotonic seconds. Returns the prompt's number, for `take_back`.
        """
        if now >= self._turn or self._new.size > self.most:
            self._old = self._new if now < self._turn + self._seconds else _Generation()
            self._new = _Generation()
            self._turn = now + self._seconds
        self._number += 1
        self._new.add(slot, hashes, (now + self._seconds, self._number))
        return self._number

    def add_in_groups(self, slot: int, hashes: Sequence[int], now: float, most: int, full: int) -> int:
        """Predict that a replica with several cache groups holds this prompt's blocks; return the prompt's number.

        `most`: how many of the prompt's blocks can be hits. `full`: how many leading blocks full attention is confirmed
        to hold. In such an engine, a later prompt's hit can end at two places. One is the last block that can be a hit
        for this prompt. The other is the last block that full attention had before this prompt, since vLLM stores there
        what the other groups lacked.
        """
        branch = max(full, *[one.sent(slot, hashes, now) for one in (self._new, self._old)])
        number = self.add(slot, hashes, now)
        self._new.ends.setdefault(slot, set()).update([hashes[end - 1] for end in (most, min(branch, most)) if end])
        return number

    def take_back(self, slot: int, hashes: Sequence[int], held: int, number: int) -> None:
        """Withdraw the prediction that the replica holds the blocks of prompt `number`.

        The prompt's first `held` blocks stay, as the replica held them before this prompt was routed to it. Blocks that
        the prompt shares with prompts routed later stay predicted.
        """
        for generation in (self._new, self._old):
            generation.take_back(slot, hashes, held, number)

    def reach(self, hashes: Sequence[int], now: float, confirmed: Sequence[int]) -> dict[int, int]:
        """Return how many leading blocks of a prompt are predicted for each replica.

        The result is by slot (the replica's index), without replicas for which no more blocks are predicted than
        confirmed. `confirmed`: for each slot, the number of confirmed leading blocks.
        """
        found: dict[int, int] = {}
        grouped = self._grouped
        for generation in (self._new, self._old):
            if generation:
                for slot, end, segment in generation.beyond(hashes, now, confirmed):
                    known = found.get(slot, confirmed[slot])
                    if end > known and (reach := self._undropped(slot, hashes, confirmed[slot], end, segment)) > known:
                        if slot in grouped:
                            reach = self._resumed(slot, hashes, known, reach)
                        found[slot] = reach
        return found

    def _resumed(self, slot: int, hashes: Sequence[int], least: int, reach: int) -> int:
        """Shorten a predicted hit to a length at which a replica with several cache groups can resume a prompt.

        Each cache group (like layers with blocks of their own) must have what it needs at the hit's end. `slot`: the
        replica's index. `hashes`: the prompt's blocks. `reach`: how many of them are predicted. The result is at least
        `least`.
        """
        ends = [generation.ends.get(slot, ()) for generation in (self._new, self._old)]
        while reach > least and not any(hashes[reach - 1] in one for one in ends):
            reach -= 1
        return reach

    def _undropped(self, slot: int, hashes: Sequence[int], start: int, end: int, segment: Segment) -> int:
        """Return how many predicted leading blocks come before the first one that the replica has since dropped.

        `slot`: the replica's index. The first `start` blocks are confirmed, and `end` blocks are predicted. `segment`:
        the tree node of the last predicted block.
        """
        dropped = [generation.dropped for generation in (self._new, self._old)]
        if not any(dropped):
            return end
        reach = end
        while end > start and slot in segment.stamps:
            _, number = segment.stamps[slot]
            for place in range(max(start, segment.start), end):
                block = slot, hashes[place]
                if any(one.get(block, -1) >= number for one in dropped):
                    reach = place
                    break
            end, segment = segment.start, segment.parent
        return reach

    def discard(self, slot: int, hashes: Sequence[int]) -> None:
        """Stop predicting these blocks for a replica, because it reported them as dropped from its cache.

        `slot`: the replica's index. `hashes`: the blocks' hashes. A prompt that is routed later predicts them again.
        """
        if self:
            self._new.drop(slot, self._number, hashes)
            if self._new.size > self.most:  # replicas dropped so many blocks that older predictions are outdated
                self._old, self._new = self._new, _Generation()

    def clear(self, slot: int) -> None:
        """Forget all predictions for the replica in this slot (index)."""
        self._new.clear(slot)
        self._old.clear(slot)
