"""The further cache groups of a model whose layers differ, by the rules of vLLM's coordinator and managers.

Besides full attention a model may have layers with a sliding window, or Mamba layers, whose state is modeled here as a
window of two tokens: the last one and the next. Each such group of layers has its own blocks for the same tokens, from
the same pool. A running request releases the blocks that are no longer within its window; they stay cached until they
are taken for another request.

A hit has to be a hit in every group. In a group with a window, all blocks within the next token's window have to be
cached. `retention` says which blocks a group caches:

    "all" (vLLM 0.28)   every full block of a sliding window; of Mamba layers only the block at which a step ended, and
                        the one at which the hit in full attention ended if it was longer than the hit in all groups
    "replay" (0.32)     the blocks that a later prompt needs to resume at the end of this prompt (without its last
                        token), or at the end of that longer hit, as other prompts are likely to share so much
"""

from .batch import Sequence
from .blocks import BlockPool, Key
from .profile import Profile
from .steps import GroupKey, GroupStored

STATE = 2  # the window that stands for a Mamba layer's state


class Groups:
    """The blocks of an engine's requests in cache groups other than full attention.

    `Sequence.beside` has one list for each group: the request's block ids, as many as in `Sequence.held`, with None for
    a block that was released or never taken.
    """

    def __init__(self, profile: Profile, pool: BlockPool):
        self._pool, self._size, self._retains_all = pool, profile.block_size, profile.retention == "all"
        self._windows = [window or STATE for window in profile.windows]
        self._states = [not window for window in profile.windows]

    def longest(self, keys: list[Key], most: int) -> int:
        """Return how many leading blocks of a prompt are a hit in all cache groups.

        `keys`: the keys of the prompt's blocks. `most`: how many leading blocks are a hit in full attention.
        """
        while True:
            before = most
            for group, window in enumerate(self._windows):
                most = self._longest_in(group, window, keys, most)
            if most == before:
                return most

    def _longest_in(self, group: int, window: int, keys: list[Key], most: int) -> int:
        for end in range(most, 0, -1):
            needed = keys[self._passed(window, end * self._size) : end]
            if all(self._pool.block(GroupKey(group, key)) is not None for key in needed):
                return end
        return 0

    def idle(self, keys: list[Key], hits: int) -> int:
        """Return how many blocks a hit of `hits` blocks would take from the free queue in these groups.

        The free queue has the cached blocks that no request uses. `keys`: the keys of the prompt's blocks.
        """
        return sum(self._pool.idle(self._hit_blocks(group, keys, hits)) for group in range(len(self._windows)))

    def admit(self, sequence: Sequence) -> None:
        """Give a request its cached blocks in these groups; `sequence.held` already has those of full attention."""
        hits = len(sequence.held)
        sequence.beside = []
        for group in range(len(self._windows)):
            blocks = self._hit_blocks(group, sequence.keys, hits)
            self._pool.use(blocks)
            sequence.beside.append([None] * (hits - len(blocks)) + blocks)

    def _hit_blocks(self, group: int, keys: list[Key], hits: int) -> list[int]:
        needed = keys[self._passed(self._windows[group], hits * self._size) : hits]
        return [self._pool.block(GroupKey(group, key)) for key in needed]

    def _passed(self, window: int, computed: int) -> int:
        """Return how many leading blocks are outside the window of the next token.

        `window`: its length in tokens. `computed`: how many tokens come before the next one.
        """
        return max(0, computed - (window - 1)) // self._size

    def pass_by(self, sequence: Sequence, computed: int) -> None:
        """Release a request's blocks that are outside its windows when `computed` tokens are computed."""
        for window, blocks in zip(self._windows, sequence.beside):
            end = min(self._passed(window, computed), len(blocks))
            start = end
            while start and blocks[start - 1] is not None:
                start -= 1
            self._pool.release(blocks[start:end])
            blocks[start:end] = [None] * (end - start)

    def take(self, sequence: Sequence, count: int, removed: list[Key]) -> None:
        """Take `count` blocks in each group for a request, and add the keys of evicted blocks to `removed`."""
        for blocks in sequence.beside:
            blocks += self._pool.take(count, removed)

    def fill(self, sequence: Sequence, start: int, end: int) -> list[GroupStored]:
        """Cache a request's full blocks `start` to `end` in the groups that keep them.

        Returns one event for each group, with the keys of the blocks that it keeps.
        """
        request, keys, told = sequence.request, sequence.keys, []
        parent = keys[start - 1] if start else None
        for group, blocks in enumerate(sequence.beside):
            kept = [at for at in range(start, end) if blocks[at] is not None and self._keeps(group, sequence, at, end)]
            self._pool.store([blocks[at] for at in kept], [GroupKey(group, keys[at]) for at in kept])
            told.append(GroupStored(request, start, end, group, [keys[at] for at in kept], parent))
        return told

    def _keeps(self, group: int, sequence: Sequence, at: int, end: int) -> bool:
        if self._retains_all:
            # A Mamba state is stored where a step ends: at `end`, and where full attention had a longer hit (junction).
            return not self._states[group] or at + 1 in (end, sequence.junction)
        ends = ((sequence.request.prompt_tokens - 1) // self._size, sequence.junction)
        return any(self._passed(self._windows[group], end * self._size) <= at < end for end in ends)

    def release(self, sequence: Sequence) -> None:
        for blocks in sequence.beside:
            self._pool.release([block for block in blocks if block is not None])
        sequence.beside = []
