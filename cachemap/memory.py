"""Memory: where the arrays of a block table lie. In this process, or where other processes can read them.

Shared arrays are anonymous files of the kernel's (memfd), one each: they need no names and no /dev/shm, which containers
keep small, and they go with the last process that has them, however it ends. A table that grows gets new arrays; who
still reads the old ones sees the table as it was.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np


LARGE = 1 << 20  # bytes from which an array gets a mapping of its own


class Memory:
    """Of this process. Large arrays get pages of 4 KiB as they are touched, 4 us each, and give them back piece by piece:
    numpy would ask for pages of 2 MiB, which take 0.1 ms, but 20 ms where a virtual machine gets them from its host."""

    def zeros(self, count: int, dtype: str | type) -> np.ndarray:
        size = count * np.dtype(dtype).itemsize
        if size < LARGE:
            return np.zeros(count, dtype)
        return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype, count)

    def give_back(self, array: np.ndarray, start: int) -> int:
        """Free the next `LARGE` bytes of an array that nobody needs any more; gives where to go on, 0 at the end. All
        at once would take 0.5 s a GiB."""
        mapping = array.base.obj if isinstance(array.base, memoryview) else array.base  # which of them depends on numpy's version
        if isinstance(mapping, mmap.mmap) and start < array.nbytes:
            mapping.madvise(mmap.MADV_DONTNEED, start, min(LARGE, len(mapping) - start))
            return start + LARGE
        return 0

    def laid_out(self) -> None:
        """A table has new arrays."""


PRIVATE = Memory()


class SharedMemory(Memory):
    """Arrays that other processes can `mapped`; `on_layout` hears when a table has new ones."""

    def __init__(self, on_layout: Callable[[], None]):
        self._on_layout = on_layout
        self._descriptors: dict[int, tuple[int, int]] = {}
        self._made = 0

    def zeros(self, count: int, dtype: str | type) -> np.ndarray:
        dtype = np.dtype(dtype)
        descriptor = segment(count * dtype.itemsize)
        array = np.frombuffer(mmap.mmap(descriptor, 0), dtype)
        self._made += 1
        self._descriptors[id(array)] = descriptor, self._made
        weakref.finalize(array, self._gone, id(array))
        return array

    def give_back(self, array: np.ndarray, start: int) -> int:
        """Nothing of what others may still read."""
        return 0 if id(array) in self._descriptors else super().give_back(array, start)

    def _gone(self, key: int) -> None:
        os.close(self._descriptors.pop(key)[0])

    def descriptor(self, array: np.ndarray) -> tuple[int, int]:
        """Open as long as the array is; with a number that no other array ever has, as descriptors may."""
        return self._descriptors[id(array)]

    def laid_out(self) -> None:
        self._on_layout()


def segment(size: int) -> int:
    """A descriptor of so many bytes, all zero, that other processes may map."""
    descriptor = os.memfd_create("hitherto", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def mapped(descriptor: int, dtype: str, writable: bool) -> np.ndarray:
    """Another process's array; the descriptor is closed."""
    try:
        return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ), dtype)
    finally:
        os.close(descriptor)
