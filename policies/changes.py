"""Changes: which replicas' figures changed since one last looked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Changes(Generic[T]):
    """What changed, for those who ask now and then and remember how far they had heard."""

    __slots__ = ("_latest", "count")

    def __init__(self) -> None:
        self._latest: deque[T] = deque(maxlen=4096)
        self.count = 0

    def tell(self, what: T) -> None:
        self._latest.append(what)
        self.count += 1

    def since(self, count: int) -> Iterable[T] | None:
        """What was told after the first `count`, in any order; None: too much to remember."""
        new = self.count - count
        return None if new > len(self._latest) else islice(reversed(self._latest), new)
