"""What comes up in one turn of the event loop, done together at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

# Of what came at once the last waits for the first, and all for what else the loop has: 32 short prompts take some 3 ms.
MOST = 32


class Together(Generic[Item]):
    """Items that are worked on by the dozen, so that whoever has several stages for them can do one after the other for all.

    A busy loop wakes up to a dozen requests. From the socket to the socket, one by one, each finds the kernel's code and the
    stages before and after its own in the core's caches, instead of its own.
    """

    __slots__ = ("_work", "_items")

    def __init__(self, work: Callable[[list[Item]], None]):
        self._work = work
        self._items: list[Item] = []

    def add(self, item: Item) -> None:
        if not self._items:
            asyncio.get_running_loop().call_soon(self._run)
        self._items.append(item)

    def _run(self) -> None:
        items, self._items = self._items[:MOST], self._items[MOST:]
        if self._items:
            asyncio.get_running_loop().call_soon(self._run)
        self._work(items)
