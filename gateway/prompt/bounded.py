"""A dictionary that may take so many bytes and no more, for what requests leave behind."""

from __future__ import annotations

from collections.abc import Hashable
from sys import getsizeof
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_ENTRY_BYTES = 200  # an entry's places in the dictionary, its pair and its size


class Bounded(Generic[K, V]):
    """Entries in two generations: what is used moves to the young one; when that has half of the budget it
    becomes the old one, and what was in the old one and unused is gone.

    Thread safe: a race between two threads costs an entry or the count of its bytes until the next generation.
    """

    __slots__ = ("_half", "_young", "_old", "_young_bytes")

    def __init__(self, budget_bytes: int) -> None:
        self._half = budget_bytes // 2
        self._young: dict[K, tuple[V, int]] = {}
        self._old: dict[K, tuple[V, int]] = {}
        self._young_bytes = 0

    def get(self, key: K) -> V | None:
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is None:
                return None
            self._add(key, found)
        return found[0]

    def put(self, key: K, value: V, size: int) -> None:
        """`size`: bytes of key and value. An entry that would take a quarter of the budget is not kept."""
        self.pop(key)
        if 2 * size <= self._half:
            self._add(key, (value, size + _ENTRY_BYTES))

    def _add(self, key: K, entry: tuple[V, int]) -> None:
        self._young[key] = entry
        self._young_bytes += entry[1]
        if self._young_bytes > self._half:
            self._old, self._young, self._young_bytes = self._young, {}, 0

    def pop(self, key: K) -> None:
        found = self._young.pop(key, None)
        if found is not None:
            self._young_bytes -= found[1]
        self._old.pop(key, None)

    def clear(self) -> None:
        self._young, self._old, self._young_bytes = {}, {}, 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)  # what was moved counts twice until the old ones are gone


def bytes_of(value: Any) -> int:
    """Memory of nested tuples and lists of plain values, shared ones counted each time."""
    if isinstance(value, (tuple, list)):
        return getsizeof(value) + sum(map(bytes_of, value))
    return getsizeof(value) if isinstance(value, (str, bytes)) else 32
