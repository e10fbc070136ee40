"""Matrix products in float32 with the weight as it lies in the checkpoint, one row per output."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import List
from std.math import ceildiv
from std.sys import num_physical_cores

from .panel import PANEL, fill_panel, panel_products
from .phases import counters, product_spans, take
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
        if m == 0:
            return
        var xp = x.unsafe_ptr()
        var wp = w.unsafe_ptr()
        var yp = y.unsafe_ptr()
        var threads = 1 if m * n * k < PARALLEL_FROM else num_physical_cores()
        var spans = product_spans(m, threads)
        var panels = ceildiv(n, PANEL)
        var counts = counters(1)
        var shared = counts.unsafe_ptr()

        def work(thread: Int) {imm}:
            var span = take(shared, 0, panels, spans)
            while span.count() > 0:
                var begin = span.begin * PANEL
                float_products(
                    xp,
                    wp.unsafe_offset(begin * k),
                    yp.unsafe_offset(begin),
                    n,
                    k,
                    m,
                    min(n, span.end * PANEL) - begin,
                )
                span = take(shared, 0, panels, spans)

        sync_parallelize(work, threads)
        _ = counts^


@no_inline
def float_products[
    dtype: DType, //
](
    x: Pointer[Scalar[F32], _],
    w: Pointer[Scalar[dtype], _],
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    k: Int,
    rows: Int,
    columns: Int,
):
    """Writes y[rows, columns] = x[rows, k] times the transpose of w[columns, k]."""
    if rows < TILE:
        stream_products(x, w, y, y_stride, k, rows, columns)
    elif rows < PANELS_FROM:
        var x_at = List[Int](length=rows, fill=0)
        var y_at = List[Int](length=rows, fill=0)
        for row in range(rows):
            x_at[row] = row * k
            y_at[row] = row * y_stride
        products(x, x_at.unsafe_ptr(), w, k, y, y_at.unsafe_ptr(), k, rows, columns)
        _ = x_at^
        _ = y_at^
    else:
        var panel = List[Scalar[F32]](length=PANEL * k, fill=0)
        for begin in range(0, columns, PANEL):
            var width = min(PANEL, columns - begin)
            fill_panel(panel.unsafe_ptr(), w.unsafe_offset(begin * k), k, width)
            panel_products(
                x,
                k,
                panel.unsafe_ptr(),
                PANEL,
                k,
                y.unsafe_offset(begin),
                y_stride,
                rows,
                width,
            )
        _ = panel^
