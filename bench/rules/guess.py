"""What a router that hears no events takes its replicas to hold: the prompts it sent there, least recently used out
first.

The peers keep a tree of characters or tokens, each node with the replicas that saw it. A chained hash names its whole
prefix, so one dict per replica, hash -> when last sent, is the same tree down to a block, and finer than one block is
not known here. A block is never older than those after it, so to throw out the oldest leaves no holes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Guess:
    """`blocks`: more are never kept for one replica. Prompts are thrown out whole, and a tenth of all at once when it
    is too much, as the peers do now and then: to look for the oldest takes a sort."""

    def __init__(self, blocks: int) -> None:
        self._limit, self._time = blocks, 0
        self._held: dict[str, dict[int, int]] = {}

    def blocks(self, replica: str, hashes: Sequence[int]) -> int:
        """How many leading blocks of a prompt were sent there."""
        held = self._held.get(replica)
        if not held or not hashes or hashes[0] not in held:
            return 0
        return bisect_left(hashes, True, 1, key=lambda block: block not in held)

    def size(self, replica: str) -> int:
        return len(self._held.get(replica, ()))

    def add(self, replica: str, hashes: Sequence[int]) -> None:
        """A prompt was sent there."""
        self._time += 1
        held = self._held.setdefault(replica, {})
        held.update(dict.fromkeys(hashes[: self._limit], self._time))
        if len(held) > self._limit:
            newest = sorted(held.values(), reverse=True)
            oldest = newest[self._limit * 9 // 10]
            self._held[replica] = {block: when for block, when in held.items() if when > oldest}

    def forget(self, replica: str) -> None:
        self._held.pop(replica, None)
