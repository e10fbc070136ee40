"""Products with a matrix of weights however it is kept, as phases of kernels that compute several.

A matrix's type says how it is kept: bytes are blocks of integers, and anything else are floats. Rows
that are multiplied with blocks are rounded to 8 bits (``quantized``), or the blocks are widened to
float32 (``widened``).
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import List
from std.math import ceildiv
from std.sys import num_physical_cores

from .blocks import BLOCK, LANES, U8
from .matmul import float_products
from .norm import norm_row
from .phases import counters, finish, product_spans, take, wait
from .quantized import quantized_products
from .rounded import round_row, rounded_words
from .rows import add_row
from .tile import F32, PARALLEL_FROM
from .widened import widened_products

# Outputs are divided among threads in groups, which are whole panels and whole blocks.
comptime GROUP = BLOCK


@extensibility.register("rolecall_quantized_matmul")
struct QuantizedMatmul:
    """Computes y[m, n] = x[m, k] times the transpose of w[n, k], which is blocks."""

    @staticmethod
    def execute[
        bits: Int,
        offset: Int,
        has_minimum: Bool,
        rounds: Bool,
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        w: InputTensor[dtype=U8, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var m = x.dim_size(0)
        var k = x.dim_size(1)
        var n = y.dim_size(1)
        if m == 0:
            return
        var panel_bytes = w.dim_size(1)
        var xp = x.unsafe_ptr()
        var wp = w.unsafe_ptr()
        var yp = y.unsafe_ptr()
        var threads = 1 if m * n * k < PARALLEL_FROM else num_physical_cores()
        var all_rounded = List[Int32](length=m * rounded_words(k) if rounds else 0, fill=0)
        var rounded = all_rounded.unsafe_ptr()
        var counts = counters(2)
        var shared = counts.unsafe_ptr()

        def work(thread: Int) {imm}:
            round_phase[rounds](shared, 0, threads, xp, rounded, m, k)
            product_phase[bits, offset, has_minimum, rounds](
                shared, 1, threads, xp, rounded, wp, panel_bytes, yp, k, m, n, xp
            )

        sync_parallelize(work, threads)
        _ = all_rounded^
        _ = counts^


@always_inline
def prepare_row[
    rounds: Bool
](x: Pointer[Scalar[F32], _], k: Int, rounded: Pointer[mut=True, Int32, _], row: Int):
    """Rounds a row of x[rows, k] where products take it rounded."""
    comptime if rounds:
        round_row(x.unsafe_offset(row * k), k, rounded.unsafe_offset(row * rounded_words(k)))


@always_inline
def product[
    dtype: DType, //, bits: Int, offset: Int, has_minimum: Bool, rounds: Bool
](
    x: Pointer[Scalar[F32], _],
    rounded: Pointer[Int32, _],
    w: Pointer[Scalar[dtype], _],
    panel_bytes: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    k: Int,
    rows: Int,
    first: Int,
    columns: Int,
):
    """Writes y[rows, columns], the products of x[rows, k] with a matrix from its output first on.

    Where the matrix is blocks, first is a multiple of a panel's outputs.
    """
    comptime if dtype == DType.uint8:
        var panels = w.unsafe_offset(first // LANES * panel_bytes)
        comptime if rounds:
            quantized_products[bits, offset, has_minimum](
                rounded, panels, panel_bytes, y, y_stride, k, rows, columns
            )
        else:
            widened_products[bits, offset, has_minimum](
                x, panels, panel_bytes, y, y_stride, k, rows, columns
            )
    else:
        float_products(x, w.unsafe_offset(first * k), y, y_stride, k, rows, columns)


@always_inline
def norm_phase[
    rounds: Bool
](
    counters: Pointer[mut=True, Int64, _],
    phase: Int,
    threads: Int,
    x: Pointer[Scalar[F32], _],
    weight: Pointer[Scalar[F32], _],
    normed: Pointer[mut=True, Scalar[F32], _],
    rounded: Pointer[mut=True, Int32, _],
    rows: Int,
    width: Int,
    epsilon: Scalar[F32],
    offset: Scalar[F32],
):
    """Norms x[rows, width], and rounds it where products take it rounded."""
    var span = take(counters, phase, rows, threads)
    while span.count() > 0:
        for row in range(span.begin, span.end):
            var at = row * width
            norm_row(
                normed.unsafe_offset(at), x.unsafe_offset(at), weight, width, epsilon, offset
            )
            prepare_row[rounds](normed, width, rounded, row)
        finish(counters, phase, span)
        span = take(counters, phase, rows, threads)
    wait(counters, phase, rows)


@always_inline
def round_phase[
    rounds: Bool
](
    counters: Pointer[mut=True, Int64, _],
    phase: Int,
    threads: Int,
    x: Pointer[Scalar[F32], _],
    rounded: Pointer[mut=True, Int32, _],
    rows: Int,
    width: Int,
):
    """Rounds x[rows, width] where products take it rounded."""
    comptime if rounds:
        var span = take(counters, phase, rows, threads)
        while span.count() > 0:
            for row in range(span.begin, span.end):
                prepare_row[rounds](x, width, rounded, row)
            finish(counters, phase, span)
            span = take(counters, phase, rows, threads)
        wait(counters, phase, rows)


@always_inline
def product_phase[
    dtype: DType, //,
    bits: Int,
    offset: Int,
    has_minimum: Bool,
    rounds: Bool,
    adds: Bool = False,
](
    counters: Pointer[mut=True, Int64, _],
    phase: Int,
    threads: Int,
    x: Pointer[Scalar[F32], _],
    rounded: Pointer[Int32, _],
    w: Pointer[Scalar[dtype], _],
    panel_bytes: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    k: Int,
    rows: Int,
    outputs: Int,
    residual: Pointer[Scalar[F32], _],
):
    """Writes y[rows, outputs], the products of x[rows, k] with a matrix; and adds a residual."""
    var groups = ceildiv(outputs, GROUP)
    var spans = product_spans(rows, threads)
    var span = take(counters, phase, groups, spans)
    while span.count() > 0:
        var begin = span.begin * GROUP
        var columns = min(outputs, span.end * GROUP) - begin
        product[bits, offset, has_minimum, rounds](
            x, rounded, w, panel_bytes, y.unsafe_offset(begin), outputs, k, rows, begin, columns
        )
        comptime if adds:
            for row in range(rows):
                var at = row * outputs + begin
                add_row(y.unsafe_offset(at), residual.unsafe_offset(at), 1, columns)
        finish(counters, phase, span)
        span = take(counters, phase, groups, spans)
    wait(counters, phase, groups)
