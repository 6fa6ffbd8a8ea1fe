"""Routed: what was sent where within the last seconds, and is predicted to be there until events say so.

One tree for all replicas, so a look-up walks it once however many they are; beside each segment a stamp for each
replica that it was sent to. Against a dict entry a block for each replica, adding a prompt of 110 blocks takes a sixth
of the instructions.
"""

from array import array
from collections.abc import Container, Iterator, Sequence

from cachemap.table.chains import Segment, Tree

SEGMENT_BLOCKS = 8  # a segment takes 700 bytes as blocks of BYTES_PER_BLOCK; its blocks 9 each

Stamp = tuple[float, int]  # predicted until then; the number of the prompt that says so


class _Generation(Tree):
    """What was sent within some seconds: it goes as a whole, not one by one."""

    __slots__ = ("_dropped", "_told", "_told_blocks", "ends")

    def __init__(self) -> None:
        super().__init__()
        self._told: list[tuple[int, int, Sequence[int]]] = []
        self._told_blocks = 0
        self._dropped: dict[tuple[int, int], int] = {}
        self.ends: dict[int, set[int]] = {}  # by slot with several cache groups: the last blocks of hits to come

    @property
    def size(self) -> int:
        """In blocks of BYTES_PER_BLOCK."""
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
        """Slots with more of this chain than is confirmed: how much, and the segment with the last of it."""
        segment, end = self._longest(hashes)
        least, root = min(confirmed), self._root
        while end > least and segment is not root:
            for slot, (until, _) in segment.stamps.items():
                if end > confirmed[slot] and until > now:
                    yield slot, end, segment
            end, segment = segment.start, segment.parent

    def sent(self, slot: int, hashes: Sequence[int], now: float) -> int:
        """How much of this chain was sent to the replica."""
        segment, end = self._longest(hashes)
        while segment is not self._root and segment.stamps.get(slot, (now, 0))[0] <= now:
            end, segment = segment.start, segment.parent
        return end

    def drop(self, slot: int, number: int, hashes: Sequence[int]) -> None:
        """The replica dropped these after the prompt of this number. Most are never asked for: they are only put
        aside."""
        self._told.append((slot, number, hashes))
        self._told_blocks += len(hashes)

    @property
    def dropped(self) -> dict[tuple[int, int], int]:
        """By slot and block, the number of the last prompt before."""
        if self._told:
            for slot, number, hashes in self._told:
                self._dropped.update(dict.fromkeys([(slot, block) for block in hashes], number))
            self._told.clear()
        return self._dropped

    def take_back(self, slot: int, hashes: Sequence[int], held: int, number: int) -> None:
        segment, end = self._longest(hashes)
        if end < segment.start + len(segment.blocks):  # a longer chain, so not what was sent with these
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
    """Replicas are slots. Hashes may be lists or arrays. What `most` blocks take in memory is held twice at most.

    `grouped` has the replicas with several cache groups: what is sent there makes hits only up to where `add_in_groups`
    says.
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
        """Predict these from now on. Return the number of this prompt, for `take_back`."""
        if now >= self._turn or self._new.size > self.most:
            self._old = self._new if now < self._turn + self._seconds else _Generation()
            self._new = _Generation()
            self._turn = now + self._seconds
        self._number += 1
        self._new.add(slot, hashes, (now + self._seconds, self._number))
        return self._number

    def add_in_groups(self, slot: int, hashes: Sequence[int], now: float, most: int, full: int) -> int:
        """As `add`, to a replica with several cache groups, of which full attention holds `full` blocks for certain. A
        later prompt finds a hit up to the last block that could be one for this prompt, and up to where this one leaves
        what full attention has by then: there vLLM keeps what the other groups lacked."""
        branch = max(full, *[one.sent(slot, hashes, now) for one in (self._new, self._old)])
        number = self.add(slot, hashes, now)
        self._new.ends.setdefault(slot, set()).update([hashes[end - 1] for end in (most, min(branch, most)) if end])
        return number

    def take_back(self, slot: int, hashes: Sequence[int], held: int, number: int) -> None:
        """Withdraw the blocks that prompt `number` added to the prediction; the first `held` were there before it.

        Blocks that later prompts share with it stay, since those prompts are still on their way to the replica.
        """
        for generation in (self._new, self._old):
            generation.take_back(slot, hashes, held, number)

    def reach(self, hashes: Sequence[int], now: float, confirmed: Sequence[int]) -> dict[int, int]:
        """By slot, how far the chain is predicted to be held, where that is further than confirmed."""
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
        """Of what full attention will hold, how much will be a hit in all cache groups; `least` if it is no more."""
        ends = [generation.ends.get(slot, ()) for generation in (self._new, self._old)]
        while reach > least and not any(hashes[reach - 1] in one for one in ends):
            reach -= 1
        return reach

    def _undropped(self, slot: int, hashes: Sequence[int], start: int, end: int, segment: Segment) -> int:
        """How far from `start` on nothing was dropped since it was sent there."""
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
        """The replica said that it dropped these."""
        if self:
            self._new.drop(slot, self._number, hashes)
            if self._new.size > self.most:  # so much went that what was predicted before is decided
                self._old, self._new = self._new, _Generation()

    def clear(self, slot: int) -> None:
        """Nothing is predicted of this replica."""
        self._new.clear(slot)
        self._old.clear(slot)
