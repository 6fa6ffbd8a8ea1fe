"""What comes up in one turn of the event loop, done together at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

# What else the loop has waits meanwhile (`prompt.offload` bounds the time that prompts take of it). 16 and 32 at a time
# cost the same (24 pairs of bursts: .96 to 1.04 of each other), 8 an eighth more where prompts are long.
MOST = 12


class Batcher(Generic[Item]):
    """Items that are worked on by the dozen, so that of several stages each can be done for all before the next one.

    A busy loop wakes up to a dozen requests. From the socket to the socket, one by one, each finds the kernel's code
    and the stages before and after its own in the core's caches, instead of its own.
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
