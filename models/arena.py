"""Memory of large pages for what every step reads.

A decode step reads all weights once. From pages of 4 KiB this machine class reads at little more
than half the rate: the processor looks up where each page is, and fetches ahead within one only.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T", bound=np.generic)

LARGE_PAGE = 2 << 20
"""Bytes of a large page."""

SLAB = 32 << 20
"""Bytes that are taken from the system at once."""

LINE = 64
"""Where arrays begin: at a line of the cache."""


def large_pages(shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Zeros in memory of large pages, where the system has them; it is taken when it is written.

    Args:
        shape: The sizes.
        dtype: The dtype.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return np.zeros(shape, dtype)
    # Private: the system has no large pages for anonymous memory that is shared.
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    bytes_ = np.frombuffer(memory, np.uint8)
    first = -bytes_.ctypes.data % LARGE_PAGE
    return bytes_[first : first + size].view(dtype).reshape(shape)


class Arena:
    """Arrays side by side in large pages, each as long as anything refers to it.

    Most weights are smaller than a page of 2 MiB, and fill it together.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._slab = np.zeros(0, np.uint8)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Zeros that begin at a line of the cache.

        Args:
            shape: The sizes.
            dtype: The dtype.
        """
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            if size > len(self._slab) - self._used:
                self._slab = large_pages([max(SLAB, size)], np.dtype(np.uint8))
                self._used = 0
            taken = self._slab[self._used : self._used + size]
            self._used += -(-size // LINE) * LINE
        return taken.view(dtype).reshape(shape)

    def place(self, values: npt.NDArray[_T]) -> npt.NDArray[_T]:
        """A copy of an array, C-contiguous."""
        placed = self.take(values.shape, values.dtype)
        placed[...] = values
        return placed
