"""Memory for large arrays, from pages of 4 KiB that can be given back piece by piece.

numpy would ask for pages of 2 MiB, which take 0.1 ms, but 20 ms where a virtual machine gets them from its host. Pages
of 4 KiB take 4 us each, as they are touched.
"""

from __future__ import annotations

import mmap

import numpy as np

LARGE = 1 << 20  # bytes from which an array gets a mapping of its own


def zeros(count: int, dtype: str | type) -> np.ndarray:
    size = count * np.dtype(dtype).itemsize
    if size < LARGE:
        return np.zeros(count, dtype)
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype, count)


def give_back(array: np.ndarray, start: int) -> int:
    """Free the next `LARGE` bytes of an array that is not needed any more; returns where to go on, 0 at the end. All at
    once would take 0.5 s a GiB."""
    # which of them depends on numpy's version
    mapping = array.base.obj if isinstance(array.base, memoryview) else array.base
    if isinstance(mapping, mmap.mmap) and start < array.nbytes:
        mapping.madvise(mmap.MADV_DONTNEED, start, min(LARGE, len(mapping) - start))
        return start + LARGE
    return 0
