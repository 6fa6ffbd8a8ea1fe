"""A bounded log of the replicas whose figures changed, read by polling."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Changes(Generic[T]):
    """A log of changes for readers that poll it; each remembers the `count` up to which it has read."""

    __slots__ = ("_latest", "count")

    def __init__(self) -> None:
        self._latest: deque[T] = deque(maxlen=4096)
        self.count = 0

    def tell(self, what: T) -> None:
        """Log a change."""
        self._latest.append(what)
        self.count += 1

    def since(self, count: int) -> Iterable[T] | None:
        """Return what was logged after the first `count` entries, in any order; None if some of it was overwritten."""
        new = self.count - count
        return None if new > len(self._latest) else islice(reversed(self._latest), new)
