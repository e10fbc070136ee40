"""Attention among an image's patches, and the placing of images among tokens."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import List
from std.math import ceildiv, exp
from std.sys import num_physical_cores

from .rows import copy_row
from .tile import F32, WIDTH, products, weighted_rows

# Patches that attend together: their scores stay in the second cache.
comptime BLOCK = 16


@extensibility.register("rolecall_patch_attention")
struct PatchAttention:
    """Attends from each patch to all patches of its image.

    qkv[images * length, 3 * heads * dim] has a patch's queries, keys and values side by side;
    sizes holds the heads and the patches of an image, scale what scores are multiplied with.
    """

    @staticmethod
    def execute[
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        qkv: InputTensor[dtype=F32, rank=2, ...],
        sizes: InputTensor[dtype=DType.int64, rank=1, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var patches = qkv.dim_size(0)
        if patches == 0:
            return
        var heads = Int(sizes.unsafe_ptr().unsafe_load())
        var length = Int(sizes.unsafe_ptr().unsafe_offset(1).unsafe_load())
        var stride = qkv.dim_size(1)
        var width = y.dim_size(1)
        var dim = width // heads
        var factor = scale.unsafe_ptr().unsafe_load()
        var blocks = ceildiv(length, BLOCK)
        var count = patches // length * heads * blocks
        var threads = num_physical_cores()
        # Blocks are the fastest index: a thread's share reads few heads' keys.
        var share = ceildiv(count, threads)
        var source = qkv.unsafe_ptr()
        var yp = y.unsafe_ptr()

        def work(thread: Int) {imm}:
            var scores = List[Scalar[F32]](length=BLOCK * length, fill=0)
            var x_at = List[Int](length=BLOCK, fill=0)
            var y_at = List[Int](length=BLOCK, fill=0)
            for item in range(thread * share, min(count, (thread + 1) * share)):
                var first = item % blocks * BLOCK
                var head = item // blocks % heads
                var image = source.unsafe_offset(item // blocks // heads * length * stride)
                var rows = min(BLOCK, length - first)
                for row in range(rows):
                    x_at[row] = (first + row) * stride + head * dim
                    y_at[row] = row * length
                products(
                    image,
                    x_at.unsafe_ptr(),
                    image.unsafe_offset(width + head * dim),
                    stride,
                    scores.unsafe_ptr(),
                    y_at.unsafe_ptr(),
                    dim,
                    rows,
                    length,
                )
                var to = yp.unsafe_offset(
                    (item // blocks // heads * length + first) * width + head * dim
                )
                for row in range(rows):
                    var own = scores.unsafe_ptr().unsafe_offset(row * length)
                    var total = _exponentials(own, length, factor)
                    weighted_rows(
                        to.unsafe_offset(row * width),
                        own,
                        image.unsafe_offset(2 * width + head * dim),
                        stride,
                        dim,
                        length,
                        1 / total,
                    )

        sync_parallelize(work, threads)


@always_inline
def _exponentials(
    scores: Pointer[mut=True, Scalar[F32], _], count: Int, factor: Scalar[F32]
) -> Scalar[F32]:
    """Replaces scores by exp(factor * (score - the largest)), and returns the sum."""
    var largest = scores.unsafe_load()
    for at in range(1, count):
        largest = max(largest, scores.unsafe_offset(at).unsafe_load())
    var sums = SIMD[F32, WIDTH](0)
    var whole = count - count % WIDTH
    for at in range(0, whole, WIDTH):
        var values = scores.unsafe_offset(at).unsafe_load[width=WIDTH]()
        values = exp((values - largest) * factor)
        scores.unsafe_offset(at).unsafe_store(values)
        sums += values
    var total = sums.reduce_add()
    for at in range(whole, count):
        var value = exp((scores.unsafe_offset(at).unsafe_load() - largest) * factor)
        scores.unsafe_offset(at).unsafe_store(value)
        total += value
    return total


@extensibility.register("rolecall_place_rows")
struct PlaceRows:
    """Copies x[tokens, k] to y, with rows in place of those that at names; below zero is nowhere."""

    @staticmethod
    def execute[
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        rows: InputTensor[dtype=F32, rank=2, ...],
        at: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var k = x.dim_size(1)
        var yp = y.unsafe_ptr()
        copy_row(yp, x.unsafe_ptr(), x.dim_size(0) * k)
        for row in range(rows.dim_size(0)):
            var place = Int(at.unsafe_ptr().unsafe_offset(row).unsafe_load())
            if place >= x.dim_size(0):
                raise Error("an image's row for token ", place, " of ", x.dim_size(0))
            if place >= 0:
                copy_row(
                    yp.unsafe_offset(place * k), rows.unsafe_ptr().unsafe_offset(row * k), k
                )
