"""Float32 matrix products with the weight as it lies in the checkpoint, one row per output."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import Array
from std.math import ceildiv
from std.sys import num_physical_cores, simd_width_of

comptime F32 = DType.float32
comptime WIDTH = simd_width_of[F32]()
# A tile of 4 by 4 outputs: 16 accumulators, and 8 loads for 16 multiply-adds.
comptime TILE = 4
# Rows of x that are multiplied with all weights before the next: they stay in the second cache.
comptime BLOCK = 32
# Below this many multiply-adds a second thread costs more than it brings.
comptime PARALLEL_FROM = 1 << 17


@always_inline
def _tile[
    rows: Int, columns: Int
](
    x: Pointer[Scalar[F32], _],
    w: Pointer[Scalar[F32], _],
    y: Pointer[mut=True, Scalar[F32], _],
    k: Int,
    n: Int,
):
    """Writes a tile of y: rows of x times rows of w, each of k elements."""
    var sums = Array[SIMD[F32, WIDTH], rows * columns](fill=0)
    var whole = k - k % WIDTH
    for at in range(0, whole, WIDTH):
        var weights = Array[SIMD[F32, WIDTH], columns](fill=0)
        comptime for c in range(columns):
            weights[c] = w.unsafe_offset(c * k + at).unsafe_load[width=WIDTH]()
        comptime for r in range(rows):
            var values = x.unsafe_offset(r * k + at).unsafe_load[width=WIDTH]()
            comptime for c in range(columns):
                sums[r * columns + c] = values.fma(weights[c], sums[r * columns + c])
    comptime for r in range(rows):
        comptime for c in range(columns):
            var total = sums[r * columns + c].reduce_add()
            for at in range(whole, k):
                total += (
                    x.unsafe_offset(r * k + at).unsafe_load()
                    * w.unsafe_offset(c * k + at).unsafe_load()
                )
            y.unsafe_offset(r * n + c).unsafe_store(total)


@extensibility.register("rolecall_matmul")
struct Matmul:
    """Computes y[m, n] = x[m, k] times the transpose of w[n, k]."""

    @staticmethod
    def execute[
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        w: InputTensor[dtype=F32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var m = x.dim_size(0)
        var k = x.dim_size(1)
        var n = w.dim_size(0)
        var xp = x.unsafe_ptr()
        var wp = w.unsafe_ptr()
        var yp = y.unsafe_ptr()
        if m == 0:
            return
        var threads = 1 if m * n * k < PARALLEL_FROM else num_physical_cores()
        var share = ceildiv(ceildiv(n, threads), TILE) * TILE

        def work(thread: Int) {imm}:
            var begin = thread * share
            var end = min(n, begin + share)
            for block in range(0, m, BLOCK):
                var rows = min(BLOCK, m - block)
                var column = begin
                while column < end:
                    var row = block
                    var stop = block + rows
                    if column + TILE <= end:
                        while row + TILE <= stop:
                            _tile[TILE, TILE](
                                xp.unsafe_offset(row * k),
                                wp.unsafe_offset(column * k),
                                yp.unsafe_offset(row * n + column),
                                k,
                                n,
                            )
                            row += TILE
                        while row < stop:
                            _tile[1, TILE](
                                xp.unsafe_offset(row * k),
                                wp.unsafe_offset(column * k),
                                yp.unsafe_offset(row * n + column),
                                k,
                                n,
                            )
                            row += 1
                        column += TILE
                    else:
                        while row < stop:
                            _tile[1, 1](
                                xp.unsafe_offset(row * k),
                                wp.unsafe_offset(column * k),
                                yp.unsafe_offset(row * n + column),
                                k,
                                n,
                            )
                            row += 1
                        column += 1

        sync_parallelize(work, threads)
