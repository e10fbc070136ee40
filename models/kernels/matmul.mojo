"""Matrix products in float32 with the weight as it lies in the checkpoint, one row per output."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import List
from std.math import ceildiv
from std.sys import num_physical_cores

from .panel import PANEL, fill_panel, panel_products
from .stream import stream_products
from .tile import F32, PARALLEL_FROM, TILE, products

# From so many rows on it pays to bring weights into panels first.
comptime PANELS_FROM = 12


@extensibility.register("rolecall_matmul")
struct Matmul:
    """Computes y[m, n] = x[m, k] times the transpose of w[n, k]."""

    @staticmethod
    def execute[
        dtype: DType,
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        w: InputTensor[dtype=dtype, rank=2, ...],
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

        def by_stream(thread: Int) {imm}:
            var share = ceildiv(n, threads)
            var begin = thread * share
            stream_products(
                xp,
                wp.unsafe_offset(begin * k),
                yp.unsafe_offset(begin),
                n,
                k,
                m,
                min(n, begin + share) - begin,
            )

        var x_at = List[Int](length=m, fill=0)
        var y_at = List[Int](length=m, fill=0)
        for row in range(m):
            x_at[row] = row * k
            y_at[row] = row * n
        var x_rows = x_at.unsafe_ptr()
        var y_rows = y_at.unsafe_ptr()

        def by_tiles(thread: Int) {imm}:
            var share = ceildiv(ceildiv(n, threads), TILE) * TILE
            var begin = thread * share
            products(
                xp,
                x_rows,
                wp.unsafe_offset(begin * k),
                k,
                yp.unsafe_offset(begin),
                y_rows,
                k,
                m,
                min(n, begin + share) - begin,
            )

        def by_panels(thread: Int) {imm}:
            var share = ceildiv(ceildiv(n, threads), PANEL) * PANEL
            var panel = List[Scalar[F32]](length=PANEL * k, fill=0)
            for begin in range(thread * share, min(n, (thread + 1) * share), PANEL):
                var width = min(PANEL, n - begin)
                fill_panel(panel.unsafe_ptr(), wp.unsafe_offset(begin * k), k, width)
                panel_products(
                    xp, k, panel.unsafe_ptr(), PANEL, k, yp.unsafe_offset(begin), n, m, width
                )
            _ = panel^

        if m < TILE:
            sync_parallelize(by_stream, threads)
        elif m < PANELS_FROM:
            sync_parallelize(by_tiles, threads)
        else:
            sync_parallelize(by_panels, threads)
        _ = x_at^
        _ = y_at^
