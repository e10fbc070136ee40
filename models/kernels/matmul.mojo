"""Float32 matrix products with the weight as it lies in the checkpoint, one row per output."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import List
from std.math import ceildiv
from std.sys import num_physical_cores

from .tile import F32, PARALLEL_FROM, TILE, products

# Rows of x that are multiplied with all weights before the next: they stay in the second cache.
comptime BLOCK = 32


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
        var x_at = List[Int](length=m, fill=0)
        var y_at = List[Int](length=m, fill=0)
        for row in range(m):
            x_at[row] = row * k
            y_at[row] = row * n
        var x_rows = x_at.unsafe_ptr()
        var y_rows = y_at.unsafe_ptr()

        def work(thread: Int) {imm}:
            var begin = thread * share
            var end = min(n, begin + share)
            for block in range(0, m, BLOCK):
                products(
                    xp,
                    x_rows.unsafe_offset(block),
                    wp.unsafe_offset(begin * k),
                    k,
                    yp.unsafe_offset(begin),
                    y_rows.unsafe_offset(block),
                    k,
                    min(BLOCK, m - block),
                    end - begin,
                )

        sync_parallelize(work, threads)
        _ = x_at^
        _ = y_at^
