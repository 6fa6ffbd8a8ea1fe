"""Memory for large arrays, in pages of 4 KiB that can be returned to the system piece by piece.

numpy would request pages of 2 MiB. These take 0.1 ms each, or 20 ms on a virtual machine that has to get them from its
host; pages of 4 KiB take 4 us each. A page takes this time when it is first touched.
"""

from __future__ import annotations

import mmap

import numpy as np

LARGE = 1 << 20  # bytes from which an array gets a memory mapping of its own


def zeros(count: int, dtype: str | type) -> np.ndarray:
    """Return an array of `count` zeros; the memory of a large array can be released by `give_back`."""
    size = count * np.dtype(dtype).itemsize
    if size < LARGE:
        return np.zeros(count, dtype)
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype, count)


def give_back(array: np.ndarray, start: int) -> int:
    """Release the next `LARGE` bytes of memory of an array that is no longer used, from byte offset `start` on.

    Returns the offset for the next call, or 0 if everything is released. Releasing all at once would take 0.5 s a GiB.
    """
    # numpy's version decides whether an array's base is the mapping itself or a memoryview of it
    mapping = array.base.obj if isinstance(array.base, memoryview) else array.base
    if isinstance(mapping, mmap.mmap) and start < array.nbytes:
        mapping.madvise(mmap.MADV_DONTNEED, start, min(LARGE, len(mapping) - start))
        return start + LARGE
    return 0
