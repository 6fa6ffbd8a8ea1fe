"""Pages: the KV cache blocks of an engine whose blocks are smaller than those of the cache map.

Two sizes of block occur in this module. A *page* is a block of the engine, of one or a few tokens. A *map block* is a
block as prompts are hashed and the cache map keeps it; it consists of several consecutive pages. The map has a map
block while the engine holds all of its pages. `Pages.reach` also counts the leading pages of the next map block.

An event reports any number of consecutive pages, and the page that they follow. If the engine drops a page while it
holds pages after it, the dropped page is kept here as a gap in the chain, until those pages are dropped too or the
engine stores the page again.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np

from cachemap.events.records import Stored
from cachemap.hashing import TOKEN_BYTES, chain_seed, hash_blocks
from cachemap.table.block_table import key_bits
from cachemap.table.buckets import Buckets
from cachemap.table.ids import BlockIdAllocator
from cachemap.table.index import Index
from cachemap.table.memory import zeros

Key = int | bytes
Table = TypeVar("Table", bound=Buckets)
U64 = np.uint64
NUMBER_BITS = 22
# The limits for one replica; an engine with more pages should be started with larger ones. A page takes about
# PAGE_BYTES besides its tokens: 39 in arrays, 5.6 in the index of keys, 10.5 in the set of names, and the last two
# numbers once more while those two tables grow.
MOST_PAGES = (1 << NUMBER_BITS) - 1
PAGE_BYTES, MOST_BYTES = 60, 1 << 28
FIRST_ROOM = 1 << 10  # pages
MOST_SEARCHED = 1 << 13  # pages visited one by one in a step of work


class Chain(NamedTuple):
    """Consecutive map blocks that an event has completed: the engine now holds all pages (smaller blocks) of each."""

    keys: list[int]  # for each block the engine's key of its last page
    hashes: list[int]
    parent: int  # the hash of the block before the first one, or 0 at a prompt's start


class Pages:
    """The pages of one replica: the engine's KV cache blocks, where several of them make up one map block.

    The map knows a map block under the engine's key of its last page. Each page has a number, from 1 on, which indexes
    the arrays below. A page also has a name, a hash that stands for the prompt up to the page's end. Within a map
    block, each page's name is chained to that of the page before. Without `pairs`, the name of the last page is the map
    block's hash. (Engines are not known to hold two pages with one name. If they did, the name would be forgotten with
    the first of the two that is dropped.)

    `page_size`: tokens in a page.
    `pairs`: whether the engine finds a page only if the token after it is equal too. If so, all page names are made of
        pairs of a token and the next token, so the name of a map block's last page is not the map block's hash.
    `searched`: how many pages were visited one by one since a step of the work ended.
    `orphans`: how many pages were ignored because the page before them is unknown.
    """

    def __init__(self, model: str, block_size: int, page_size: int, pairs: bool = False):
        self.pairs = pairs
        self._model, self._block_size, self.page_size = model, block_size, page_size
        self._last = block_size // page_size - 1  # the index of a block's last page
        self._numbers = BlockIdAllocator()
        self._most = min(MOST_PAGES, MOST_BYTES // (PAGE_BYTES + page_size * TOKEN_BYTES))
        room = self._most + 1
        self._keys, self._names = zeros(room, U64), zeros(room, U64)
        self._bases = zeros(room, U64)  # the hash of the block before a page's block, or the seed of its prompt
        # By page number: the page before it; the first page after it; the next and the previous of the pages that
        # follow the same page.
        self._parents, self._first, self._next, self._prev = (zeros(room, np.uint32) for _ in range(4))
        self._places = zeros(room, np.uint16)  # a page's index in its block
        self._held = zeros(room, np.bool_)  # the engine holds the page; otherwise it is a gap
        self._tokens = zeros(room * page_size, np.uint32).reshape(room, page_size)
        self._by_key = Index(FIRST_ROOM, NUMBER_BITS, self._keys)
        self._named = Buckets(FIRST_ROOM)  # the names of the pages that are held
        self.searched = 0
        self.orphans = 0

    def __len__(self) -> int:
        """Return the number of known pages, including dropped ones that are kept because held pages follow them."""
        return int(self._by_key.count)

    def store(self, event: Stored) -> Generator[None, None, list[Chain]]:
        """Record that the engine holds an event's pages (small blocks); yield between steps of the work.

        Returns chains of the map blocks that are complete now. Pages that follow an unknown page are counted in
        `orphans`. Raises OverflowError if the engine holds more pages than can be kept here (at most MOST_PAGES pages,
        and MOST_BYTES bytes).
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
            run = int(known.argmax()) if known.any() else len(known)
            first = np.unique(tags[start : start + run], return_index=True)[1]
            if len(first) < run:  # cut the run before the first key that repeats an earlier one
                run = int((np.sort(first) == np.arange(len(first))).argmin()) or len(first)
            end = start + run
            before, chain = self._append(before, seed, tags[start:end], tokens[start:end], ahead[start:end])
            whole += [chain] if chain.keys else []
            start = end
        return whole

    def remove(self, keys: Sequence[Key]) -> Generator[None, None, list[int]]:
        """Record that the engine dropped some of its pages (small blocks); yield between steps of the work.

        `keys`: the engine's keys of these pages. Returns the map blocks that were complete and now lack a page, each as
        the engine's key of its last page.
        """
        held, parents, children = self._held.data, self._parents.data, self._first.data
        siblings, previous = self._next.data, self._prev.data
        ended: list[int] = []
        gone: list[int] = []
        freed: list[int] = []  # pages that no other page follows
        for page in self._by_key.numbers(_tags(keys)).tolist():
            if not held[page]:
                continue
            ended += [self._keys.item(last) for last in (yield from self._ends_through(page))]
            held[page] = False
            gone.append(page)
            while page and not held[page] and not children[page]:
                freed.append(page)
                above, before, after = parents[page], previous[page], siblings[page]
                if before:
                    siblings[before] = after
                elif above:
                    children[above] = after
                if after:
                    previous[after] = before
                siblings[page] = previous[page] = 0
                page = above
                self.searched += 1
                if self.searched > MOST_SEARCHED:
                    self.searched = 0
                    yield
        at = self._named.find(np.unique(self._names.take(gone)))
        self._named.drop(np.sort(at[at >= 0]))
        numbers = np.sort(np.array(freed, np.int64))
        self._by_key.remove(numbers)
        self._numbers.give(numbers)
        return ended

    def reach(self, held: int, hashes: Sequence[int], seed: int, tokens: memoryview) -> int:
        """Return how many of a prompt's leading tokens the engine holds, in whole pages (the engine's small blocks).

        `held`: how many leading map blocks of the prompt the map finds for the replica. `hashes`, `seed`: the hashes of
        the prompt's map blocks, and the seed of the first one. `tokens`: the prompt's token ids (uint32), without those
        that can never be a hit.
        """
        ahead = int(self.pairs)
        start = max(held - ahead, 0)
        before, width = hashes[start - 1] if start else seed, self._block_size * TOKEN_BYTES
        data = np.frombuffer(tokens[start * width : (start + 1 + ahead) * width + ahead * TOKEN_BYTES], np.uint32)
        pages = (len(data) - ahead) // self.page_size
        if pages <= 0:
            return start * self._block_size
        first, second = (data[at : at + pages * self.page_size].reshape(pages, -1) for at in (0, ahead))
        blocks = hash_blocks(first.tobytes(), self._block_size, before)
        names = np.array(self._page_names(before, 0, blocks, first, second), U64)
        missing = (self._named.find(names) < 0).nonzero()[0]
        return start * self._block_size + (int(missing[0]) if len(missing) else pages) * self.page_size

    def _append(
        self, before: int, seed: int, tags: np.ndarray, tokens: np.ndarray, ahead: np.ndarray
    ) -> tuple[int, Chain]:
        """Add consecutive new pages after the page numbered `before`, or at the start of a prompt if `before` is 0.

        Returns the number of the last new page, and the chain of map blocks that are complete now. `seed`: the seed of
        the prompt's first map block. `tags`: the pages' keys, from `_tags`. `tokens`: a row of token ids for each page.
        `ahead`: with `pairs`, for each page a row of the tokens that follow its tokens.
        """
        lead = self._begun(before)
        place = len(lead)
        base = int(self._bases[before]) if lead else self._hash_at(before) if before else seed
        hashes = hash_blocks(self._tokens.take(lead, 0).tobytes() + tokens.tobytes(), self._block_size, base)
        name = int(self._names[before]) if lead else base
        names = np.array(self._page_names(name, place, hashes, tokens, ahead), U64)
        numbers = self._numbers.take(len(tags), self._most + 1)
        self._keys[numbers], self._names[numbers], self._tokens[numbers] = tags, names, tokens
        at = np.arange(len(tags)) + place
        self._places[numbers] = at % (self._last + 1)
        self._bases[numbers] = np.array([base, *hashes], U64).take(at // (self._last + 1))
        self._parents[numbers[0]], self._parents[numbers[1:]] = before, numbers[:-1]
        self._first[numbers[:-1]], self._first[numbers[-1]] = numbers[1:], 0
        self._held[numbers] = True
        if before:
            if beside := self._first.item(before):
                self._next[numbers[0]], self._prev[beside] = beside, numbers[0]
            self._first[before] = numbers[0]
        self._by_key = _roomy(self._by_key, len(tags))
        self._by_key.insert(tags, numbers)
        self._name(names)
        broken = not self._held.take(lead).all()  # the first of these blocks has a gap, so it is not complete
        ends = np.arange(broken, len(hashes)) * (self._last + 1) + self._last - place
        is_first = not before or (bool(lead) and not self._parents[lead[0]])  # whether that block starts a prompt
        parent = hashes[0] if broken and hashes else 0 if is_first else base
        return int(numbers[-1]), Chain(tags.take(ends).tolist(), hashes[broken:], parent)

    def _begun(self, page: int) -> list[int]:
        """Return the numbers of the pages of an unfinished map block, from the block's first page up to `page`.

        The list is empty if `page` is the last page of its map block, which is then finished, or if it is 0 (no page).
        """
        pages: list[int] = []
        if page and self._places[page] != self._last:
            for _ in range(int(self._places[page]) + 1):
                pages.insert(0, page)
                page = int(self._parents[page])
        return pages

    def _hash_at(self, last: int) -> int:
        """Return the hash of the map block whose last page has the number `last`."""
        if not self.pairs:
            return int(self._names[last])
        pages = [*self._begun(int(self._parents[last])), last]
        return hash_blocks(self._tokens.take(pages, 0).tobytes(), self._block_size, int(self._bases[last]))[0]

    def _page_names(self, name: int, place: int, hashes: list[int], tokens: np.ndarray, ahead: np.ndarray) -> list[int]:
        """Return the names of consecutive pages; a name is a hash of the prompt up to the page's end.

        `name`: the name of the page before the first one, or the hash of the map block before. `place`: the index of
        the first page in its map block. `hashes`: the hashes of the map blocks that the pages complete. `tokens`: a row
        of token ids for each page. `ahead`: with `pairs`, a row of the tokens that follow these.
        """
        rows = np.stack((tokens, ahead), 2).reshape(len(tokens), -1) if self.pairs else tokens
        data, size = rows.tobytes(), rows.shape[1]
        names: list[int] = []
        at = 0
        for block in (*hashes, 0):
            end = at + self._last + 1 - place
            names += hash_blocks(data[at * size * TOKEN_BYTES : end * size * TOKEN_BYTES], size, name)
            if block and not self.pairs:
                names[-1] = block
            at, place, name = end, 0, block
        return names

    def _revive(self, pages: np.ndarray) -> Generator[None, None, list[Chain]]:
        """Record that the engine stored pages again that it had dropped; yield between steps of the work.

        `pages`: the numbers of the pages (small blocks). Returns the map blocks that they complete, each as a chain of
        its own.
        """
        found, held = [], self._held.data
        pages = pages[~self._held.take(pages)]
        self._name(np.unique(self._names.take(pages)))  # a call for each page would take longer than all the rest
        for page in pages.tolist():
            if held[page]:
                continue
            held[page] = True
            for last in (yield from self._ends_through(page)):
                base = int(self._bases[last])
                at_start = not self._parents[self._begun(int(self._parents[last]))[0] if self._last else last]
                found.append(Chain([self._keys.item(last)], [self._hash_at(last)], 0 if at_start else base))
        return found

    def _ends_through(self, page: int) -> Generator[None, None, list[int]]:
        """Find the complete map blocks that contain one page (small block of the engine); yield between steps.

        `page`: the page's number. Returns for each of these map blocks the number of its last page. There are several
        if prompts that share this page differ in a later page of the same map block, and none if each block lacks
        another page.
        """
        places, held, parents, last = self._places.data, self._held.data, self._parents.data, self._last
        children, siblings = self._first.data, self._next.data
        first = page
        while places[first]:
            first = parents[first]
            self.searched += 1
            if not held[first]:
                return []
        if places[page] == last:
            return [page]
        found, todo = [], [children[page]]
        while todo:
            if not (child := todo.pop()):
                continue
            self.searched += 1
            if self.searched > MOST_SEARCHED:
                self.searched = 0
                yield
            todo.append(siblings[child])
            if held[child]:
                if places[child] == last:
                    found.append(child)
                else:
                    todo.append(children[child])
        return found

    def _name(self, names: np.ndarray) -> None:
        names = names[self._named.find(names) < 0]
        self._named = _roomy(self._named, len(names))
        self._named.add(names, names)


def _tags(keys: Sequence[Key]) -> np.ndarray:
    """Return engine keys as an array of nonzero u64, each the key's bits or 1."""
    return np.array([key_bits(key) or 1 for key in keys], U64)


def _salt(event: Stored) -> str | None:
    """Return the tenant's cache salt, the last of the extra keys of the event's first page; None if there is none."""
    first = event.extra[0] if event.extra else None
    return first[-1] if first and isinstance(first[-1], str) else None


def _roomy(table: Table, more: int) -> Table:
    """Do a step of the growth of a hash table, and return the table to use from now on, with room for `more` words.

    This is the same table, or the larger one that replaces it once growth is complete.
    """
    if table.wider is None and table.room < more + table.count // 8:
        table.widen(2 * (table.count + more))
    return cast(Table, table.go_on(more))
