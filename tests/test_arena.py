"""What the arena hands out is zeroed, aligned, its own, and in large pages."""

from __future__ import annotations

import gc
import mmap
from itertools import pairwise

import numpy as np
import pytest

from models.arena import LARGE_PAGE, LINE, SLAB, Arena, large_pages

FLOAT = np.dtype(np.float32)


def test_arrays_begin_at_lines_and_are_zeros_of_the_shape() -> None:
    arena = Arena()
    for shape in ([3], [5, 7], [1, 2, 3], [0, 4]):
        for dtype in map(np.dtype, (np.float32, np.uint8, np.uint16)):
            taken = arena.take(shape, dtype)
            assert taken.shape == tuple(shape)
            assert taken.dtype == dtype
            assert taken.ctypes.data % LINE == 0
            assert taken.flags.c_contiguous
            assert not taken.any()
            taken[...] = 255  # The next is another's memory.


@pytest.mark.parametrize("sizes", [[100] * 8, [SLAB - 64, 100, SLAB, SLAB + 4, 12]])
def test_arrays_do_not_overlap(sizes: list[int]) -> None:
    arena = Arena()
    taken = [arena.take([size], np.dtype(np.uint8)) for size in sizes]
    spans = sorted(
        (array.ctypes.data, array.ctypes.data + size)
        for array, size in zip(taken, sizes, strict=True)
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_small_arrays_lie_side_by_side() -> None:
    arena = Arena()
    first, second = arena.take([3], FLOAT), arena.take([3], FLOAT)
    assert second.ctypes.data - first.ctypes.data == LINE


def test_an_array_outlives_its_arena() -> None:
    values = np.arange(10, dtype=np.float32)
    placed = Arena().place(values)
    gc.collect()
    np.testing.assert_array_equal(placed, values)


def test_what_is_placed_is_a_contiguous_copy() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    placed = Arena().place(values.T)
    np.testing.assert_array_equal(placed, values.T)
    assert placed.flags.c_contiguous
    values[...] = 0
    assert placed.any()


def test_memory_is_asked_for_in_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Recorded(mmap.mmap):
        def madvise(self, option: int, *range_: int) -> None:
            asked.append(option)
            super().madvise(option, *range_)

    monkeypatch.setattr(mmap, "mmap", Recorded)
    memory = large_pages([1000, 1000], FLOAT)
    assert asked == [mmap.MADV_HUGEPAGE]
    assert memory.ctypes.data % LARGE_PAGE == 0
    assert memory.shape == (1000, 1000)
    assert not memory.any()


def test_no_bytes_take_no_memory() -> None:
    assert large_pages([0, 5], FLOAT).shape == (0, 5)
