"""Pages: the blocks of an engine whose blocks are smaller than the map's.

Some engines cache token by token, or in pages of a few tokens. The map still keeps larger blocks: it has a block while
the engine holds all pages of the block. `Pages.tail` returns how much of the next, partly held block is held.

An event reports any number of pages, which follow a page reported before. If a page is dropped while the engine holds
pages after it, it is kept here as a gap in the chain until those pages are dropped or it is stored again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np

from cachemap.events.records import Stored
from cachemap.hashing import TOKEN_BYTES, chain_seed, hash_blocks
from cachemap.table.buckets import Buckets
from cachemap.table.ids import BlockIdAllocator
from cachemap.table.index import Index
from cachemap.table.memory import zeros

Key = int | bytes
Table = TypeVar("Table", bound=Buckets)
U64 = np.uint64
NUMBER_BITS = 22
# The limits for one replica: an engine with more should be started with larger pages. A page takes about PAGE_BYTES
# besides its tokens, when it is stored: 34 in arrays, 5.6 in the index of keys, 10.5 in the set of names, and as much
# again while those grow.
MOST_PAGES = (1 << NUMBER_BITS) - 1
PAGE_BYTES, MOST_BYTES = 60, 1 << 28
FIRST_ROOM = 1 << 10  # pages
MOST_SEARCHED = 1 << 13  # pages visited one by one in a step


class Chain(NamedTuple):
    """Consecutive blocks of the map of which the engine now holds all pages."""

    keys: list[int]  # for each block the engine's key of its last page
    hashes: list[int]
    parent: int  # the hash of the block before the first one, or 0 at a prompt's start


class Pages:
    """The pages of one replica. The map knows a block under the engine's key of the block's last page.

    Each page has a number, from 1 on, which indexes the arrays below. A page also has a name, a hash that stands for
    the prompt up to the page's end: within a block, each page's name is chained to that of the page before, and the
    name of the last page is the block's hash.

    `page_size`: tokens in a page.
    `pairs`: the engine finds a page only if the token after it is equal too, so each page's name, the last one's
    included, is made of pairs of a token and the next token.
    `searched`: pages scanned so far to find those that come after a gap.
    `orphans`: pages that were ignored because the page before them is unknown.
    """

    def __init__(self, model: str, block_size: int, page_size: int, pairs: bool = False):
        self.pairs = pairs
        self._model, self._block_size, self.page_size = model, block_size, page_size
        self._last = block_size // page_size - 1  # the index of a block's last page
        self._numbers = BlockIdAllocator()
        self._most = min(MOST_PAGES, MOST_BYTES // (PAGE_BYTES + page_size * TOKEN_BYTES))
        room = self._most + 1
        self._keys, self._names = zeros(room, U64), zeros(room, U64)
        self._parents, self._children = zeros(room, np.uint32), zeros(room, np.uint32)
        # The pages after a page: the first one, and the next and the previous one with the same page before them.
        self._first, self._next, self._prev = zeros(room, np.uint32), zeros(room, np.uint32), zeros(room, np.uint32)
        self._places = zeros(room, np.uint16)  # a page's index in its block
        self._held = zeros(room, np.bool_)
        self._tokens = zeros(room * page_size, np.uint32).reshape(room, page_size)
        self._by_key = Index(FIRST_ROOM, NUMBER_BITS, self._keys)
        self._named = Buckets(FIRST_ROOM)  # the names of the pages that are held
        self._twins: Counter[int] = Counter()  # by name, the held pages with that name beyond the first
        self._ends: dict[int, int] = {}  # with pairs, the hash of a block by its last page
        self._seeds: dict[int, int] = {}  # the seed of a prompt's chain by its first page
        self.searched = 0  # pages visited one by one since that was last counted
        self.orphans = 0  # pages whose predecessor is unknown

    def __len__(self) -> int:
        """Return the number of known pages, including gaps."""
        return int(self._by_key.count)

    # --- events

    def store(self, event: Stored) -> Generator[None, None, list[Chain]]:
        """Record that these pages are held, in steps; return the blocks that they complete.

        Raises OverflowError if the engine holds more than MOST_PAGES, or than MOST_BYTES have room for.
        """
        tags = _tags(event.keys)
        before = 0 if event.parent is None else self._by_key.at(int(_tags([event.parent])[0]))
        if event.parent is not None and not before:
            self.orphans += len(tags)
            return []
        if len(self) + len(tags) > self._most:
            raise OverflowError(f"the engine holds more than {self._most} pages of {self.page_size} tokens")
        tokens = np.frombuffer(event.tokens, np.uint32).reshape(len(tags), self.page_size)
        ahead = np.frombuffer(event.ahead, np.uint32).reshape(-1, self.page_size)
        seed = 0 if before else chain_seed(self._model, self._block_size, event.adapter, _salt(event))
        whole: list[Chain] = []
        start = 0
        while start < len(tags):
            known = self._by_key.numbers(tags[start:])
            if known[0]:
                run = int((known == 0).argmax()) or len(known)
                before = int(known[run - 1])
                whole += yield from self._revive(known[:run])
                start += run
                continue
            end = start + _distinct(tags[start : start + int(known.argmax())] if known.any() else tags[start:])
            before, chain = self._append(before, seed, tags[start:end], tokens[start:end], ahead[start:end])
            whole += [chain] if chain.keys else []
            start = end
        return whole

    def remove(self, keys: Sequence[Key]) -> Generator[None, None, list[int]]:
        """Record that these pages are gone, in steps; return the keys of the blocks that are no longer whole."""
        numbers = self._by_key.numbers(_tags(keys))
        numbers = np.unique(numbers[self._held.take(numbers)])
        if not len(numbers):
            return []
        self._held[numbers] = False
        self._unname(self._names.take(numbers))
        ended: list[int] = self._keys.take(numbers[self._places.take(numbers) == self._last]).tolist()
        gaps = (yield from self._free(numbers)).tolist()
        others = set(gaps)
        for gap in gaps:
            if self._places.item(gap) != self._last:
                ended += [self._keys.item(last) for last in (yield from self._ends_below(gap, others))]
        return ended

    # --- look-ups

    def reach(self, held: int, hashes: Sequence[int], seed: int, tokens: memoryview) -> int:
        """Return how many of a prompt's leading tokens the engine holds, counted in pages.

        `held`: how many leading blocks the map finds. `hashes`, `seed`: the hashes of the prompt's blocks and the seed
        of the first one. `tokens`: the prompt's token ids (uint32), without those that can never be a hit.
        """
        start = max(held - 1, 0) if self.pairs else held
        before, width = hashes[start - 1] if start else seed, self._block_size * TOKEN_BYTES
        if not self.pairs:
            return start * self._block_size + self.tail(before, bytes(tokens[start * width : (start + 1) * width]))
        data = np.frombuffer(tokens[start * width : (start + 2) * width + TOKEN_BYTES], np.uint32)
        pages = (len(data) - 1) // self.page_size
        if pages <= 0:
            return start * self._block_size
        first, second = (data[at : at + pages * self.page_size].reshape(pages, self.page_size) for at in (0, 1))
        blocks = hash_blocks(first.tobytes(), self._block_size, before)
        names = np.array(self._pair_names([], blocks, before, first, second), U64)
        missing = (self._named.find(names) < 0).nonzero()[0]
        return start * self._block_size + (int(missing[0]) if len(missing) else pages) * self.page_size

    def tail(self, before: int, tokens: bytes) -> int:
        """Return how many of the tokens after the last held block are held, in whole pages of that next block.

        The result is less than a block: a whole block would be in the map. `before`: the hash of the last held block,
        or the seed of the prompt's first block. `tokens`: the token ids that follow (uint32).
        """
        names = hash_blocks(tokens[: self._last * self.page_size * TOKEN_BYTES], self.page_size, before)
        if not names:
            return 0
        missing = (self._named.find(np.array(names, U64)) < 0).nonzero()[0]
        return (int(missing[0]) if len(missing) else len(names)) * self.page_size

    # --- chains

    def _append(
        self, before: int, seed: int, tags: np.ndarray, tokens: np.ndarray, ahead: np.ndarray
    ) -> tuple[int, Chain]:
        """Add consecutive new pages after page `before`, or (`before` is 0) at the start of a prompt.

        Returns the number of the last page, and the blocks that are complete now.
        `seed`: the seed of the prompt's first block. `tags`: the pages' keys, from `_tags`. `tokens`: a row of token
        ids for each page. `ahead`: with `pairs`, for each page a row of the tokens that follow its tokens.
        """
        lead = self._begun(before)
        place, above = len(lead), int(self._parents[lead[0]]) if lead else before
        base = self._hash_at(above) if above else self._seeds[lead[0]] if lead else seed
        data = self._tokens.take(lead, 0).tobytes() + tokens.tobytes()
        hashes = hash_blocks(data, self._block_size, base)
        numbers = self._numbers.take(len(tags), self._most + 1)
        if self.pairs:
            names = np.array(self._pair_names(lead, hashes, base, tokens, ahead), U64)
            for end, block in zip(range(self._last - place, len(tags), self._last + 1), hashes, strict=False):
                self._ends[int(numbers[end])] = block
        else:
            names = np.array(self._names_of(data, hashes, base)[place:], U64)
        self._keys[numbers], self._names[numbers], self._tokens[numbers] = tags, names, tokens
        self._parents[numbers[0]], self._parents[numbers[1:]] = before, numbers[:-1]
        self._children[numbers], self._held[numbers] = 1, True
        self._children[numbers[-1]] = 0
        self._first[numbers[:-1]], self._first[numbers[-1]] = numbers[1:], 0
        self._places[numbers] = (np.arange(len(tags)) + place) % (self._last + 1)
        if before:
            self._children[before] += 1
            if beside := self._first.item(before):
                self._next[numbers[0]], self._prev[beside] = beside, numbers[0]
            self._first[before] = numbers[0]
        else:
            self._seeds[int(numbers[0])] = seed
        self._by_key = _roomy(self._by_key, len(tags))
        self._by_key.insert(tags, numbers)
        self._name(names)
        broken = not self._held.take(lead).all()  # the first of these blocks has a gap
        ends = np.arange(broken, len(hashes)) * (self._last + 1) + self._last - place
        parent = hashes[0] if broken and hashes else base if above else 0
        return int(numbers[-1]), Chain(tags.take(ends).tolist(), hashes[broken:], parent)

    def _begun(self, page: int) -> list[int]:
        """Return the pages, up to this one, of the block that contains it; none if it is the last page of its block."""
        pages: list[int] = []
        if page and self._places[page] != self._last:
            for _ in range(int(self._places[page]) + 1):
                pages.insert(0, page)
                page = int(self._parents[page])
        return pages

    def _names_of(self, data: bytes, hashes: list[int], base: int) -> list[int]:
        width, names = self._block_size * TOKEN_BYTES, []
        for at, block in enumerate((*hashes, 0)):
            names += hash_blocks(data[at * width : (at + 1) * width], self.page_size, hashes[at - 1] if at else base)
            if block:
                names[-1] = block
        return names

    def _hash_at(self, last: int) -> int:
        """Return the hash of the block that ends with this page."""
        return self._ends[last] if self.pairs else int(self._names[last])

    def _pair_names(
        self, lead: list[int], hashes: list[int], base: int, tokens: np.ndarray, ahead: np.ndarray
    ) -> list[int]:
        both = np.stack((tokens, ahead), 2).tobytes()
        width, size = 2 * self.page_size * TOKEN_BYTES, 2 * self.page_size
        names: list[int] = []
        at, name, place = 0, int(self._names[lead[-1]]) if lead else base, len(lead)
        for block in (*hashes, 0):
            end = at + self._last + 1 - place
            names += hash_blocks(both[at * width : end * width], size, name)
            at, place, name = end, 0, block
        return names

    def _revive(self, pages: np.ndarray) -> Generator[None, None, list[Chain]]:
        """Record that known pages are stored again; return the blocks that they complete, each as its own chain."""
        pages = np.unique(pages[~self._held.take(pages)])
        if not len(pages):
            return []
        self._held[pages] = True
        names = self._names.take(pages)
        for some in (names,) if len(np.unique(names)) == len(names) else np.split(names, len(names)):
            self._name(some)
        found = []
        revived = set(pages.tolist())
        places, parents, held = self._places.data, self._parents.data, self._held.data
        children, siblings = self._first.data, self._next.data
        for page in pages.tolist():
            first, whole = page, True
            while places[first]:
                first = parents[first]
                whole = whole and held[first]
            self.searched += places[page]
            if self.searched > MOST_SEARCHED:
                self.searched = 0
                yield
            at_end, child = places[page] == self._last, children[page]
            if whole and (at_end or child not in revived or siblings[child]):
                above = parents[first]
                parent = self._hash_at(above) if above else 0
                lasts = [page] if at_end else (yield from self._ends_below(page, revived))
                found += [Chain([self._keys.item(last)], [self._hash_at(last)], parent) for last in lasts]
        return found

    def _ends_below(self, page: int, others: set[int]) -> Generator[None, None, list[int]]:
        """Return the last pages of blocks that contain `page`, which itself is no last page.

        They follow it through pages that are all held and not among `others`. It takes steps of some milliseconds.
        """
        places, held, children, siblings = self._places.data, self._held.data, self._first.data, self._next.data
        found, todo = [], [children[page]]
        while todo:
            if not (child := todo.pop()):
                continue
            self.searched += 1
            if self.searched > MOST_SEARCHED:
                self.searched = 0
                yield
            todo.append(siblings[child])
            if held[child] and child not in others:
                if places[child] == self._last:
                    found.append(child)
                else:
                    todo.append(children[child])
        return found

    # --- coming and going

    def _free(self, numbers: np.ndarray) -> Generator[None, None, np.ndarray]:
        """Forget the pages that no other page follows; return the rest, which are gaps now.

        `numbers`: the pages' numbers, sorted; the engine holds none of them.
        """
        parents = self._parents.take(numbers)
        at = np.minimum(np.searchsorted(numbers, parents), len(numbers) - 1)
        inside = numbers.take(at) == parents
        if (np.bincount(at[inside], minlength=len(numbers)) == self._children.take(numbers)).all():
            above = parents[~inside & (parents > 0)].astype(np.int64)
            np.subtract.at(self._children, above, np.uint32(1))
            self._drop(numbers)
            idle = above[~self._held.take(above) & (self._children.take(above) == 0)]
            yield from self._peel(np.unique(idle).tolist(), set())
            return np.empty(0, np.int64)
        freed: set[int] = set()
        yield from self._peel(numbers[self._children.take(numbers) == 0].tolist(), freed)
        return np.array([one for one in numbers.tolist() if one not in freed], np.int64)

    def _peel(self, pages: list[int], freed: set[int]) -> Generator[None, None, None]:
        """Forget these pages, and pages before them that thereby have no other page after them and are not held.

        They are added to `freed`. It takes steps of some milliseconds.
        """
        some: list[int] = []
        while pages:
            page = pages.pop()
            some.append(page)
            if above := self._parents.item(page):
                self._children[above] -= 1
                if not self._children[above] and not self._held[above]:
                    pages.append(above)
            if len(some) >= MOST_SEARCHED // 4 or not pages:
                freed.update(some)
                self._drop(np.array(some, np.int64))
                some = []
                if pages:
                    yield

    def _drop(self, numbers: np.ndarray) -> None:
        self._by_key.remove(numbers)
        dropped = numbers.tolist()
        within = set(dropped)
        for page, above in zip(dropped, self._parents.take(numbers).tolist(), strict=True):
            if above and above not in within:  # the pages before and after it among those that follow the same one
                before, after = self._prev.item(page), self._next.item(page)
                if before:
                    self._next[before] = after
                else:
                    self._first[above] = after
                if after:
                    self._prev[after] = before
        self._first[numbers] = self._next[numbers] = self._prev[numbers] = 0
        for first in numbers[self._parents.take(numbers) == 0].tolist():
            del self._seeds[first]
        for last in numbers.tolist() if self._ends else ():
            self._ends.pop(last, None)
        self._parents[numbers] = self._children[numbers] = 0
        self._numbers.give(np.sort(numbers))

    def _name(self, names: np.ndarray) -> None:
        known = self._named.find(names) >= 0
        if known.any():
            self._twins.update(names[known].tolist())
            names = names[~known]
        self._named = _roomy(self._named, len(names))
        self._named.add(names, names)

    def _unname(self, names: np.ndarray) -> None:
        if self._twins:
            names = np.array([name for name in names.tolist() if not self._drop_twin(name)], U64)
        self._named.drop(np.unique(self._named.find(names)))

    def _drop_twin(self, name: int) -> bool:
        """Count one page fewer of those that share a name; return False if only one page had this name."""
        if name not in self._twins:
            return False
        self._twins[name] -= 1
        if not self._twins[name]:
            del self._twins[name]
        return True


def _tags(keys: Sequence[Key]) -> np.ndarray:
    """Return engine keys as nonzero u64: an int's low 64 bits, or the last 8 bytes of a digest."""
    bits = (1 << 64) - 1
    return np.array(
        [(int.from_bytes(key[-8:], "big") if isinstance(key, bytes) else key) & bits or 1 for key in keys], U64
    )


def _distinct(tags: np.ndarray) -> int:
    """Return how many tags come before the first repeated one."""
    if len(np.unique(tags)) == len(tags):
        return len(tags)
    seen: set[int] = set()
    for at, tag in enumerate(tags.tolist()):
        if tag in seen:
            return at
        seen.add(tag)
    return len(tags)


def _salt(event: Stored) -> str | None:
    """Return the tenant's cache salt, the last of the extra keys of the event's first page; None if there is none."""
    first = event.extra[0] if event.extra else None
    return first[-1] if first and isinstance(first[-1], str) else None


def _roomy(table: Table, more: int) -> Table:
    """Return the table to use after a step of growth, if it must grow to take `more` words."""
    if table.wider is None and table.room < more + table.count // 8:
        table.widen(2 * (table.count + more))
    if table.wider is None:
        return table
    return cast(Table, table.go_on(more) if table.room > more else table.grown())
