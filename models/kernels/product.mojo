"""Products with a matrix of weights however it is kept, as phases of kernels that compute several.

A matrix's type says how it is kept: bytes are blocks of integers (``quantized``), which rounded
rows are multiplied with, and anything else are floats.
"""

from std.math import ceildiv

from .matmul import float_products
from .norm import norm_row
from .phases import finish, take, wait
from .quantized import BLOCK, LANES, quantized_products, round_row, rounded_words
from .tile import F32

# Outputs are divided among threads in groups, which are whole panels and whole blocks.
comptime GROUP = BLOCK


@always_inline
def prepare_row[
    dtype: DType
](x: Pointer[Scalar[F32], _], k: Int, rounded: Pointer[mut=True, Int32, _], row: Int):
    """Rounds a row of x[rows, k] where products with such a matrix take it rounded."""
    comptime if dtype == DType.uint8:
        round_row(x.unsafe_offset(row * k), k, rounded.unsafe_offset(row * rounded_words(k)))


@always_inline
def product[
    dtype: DType, //, bits: Int, offset: Int, has_minimum: Bool
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
        quantized_products[bits, offset, has_minimum](
            rounded,
            w.unsafe_offset(first // LANES * panel_bytes),
            panel_bytes,
            y,
            y_stride,
            k,
            rows,
            columns,
        )
    else:
        float_products(x, w.unsafe_offset(first * k), y, y_stride, k, rows, columns)


@always_inline
def norm_phase[
    dtype: DType
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
    """Norms x[rows, width], as products with a matrix of this type take it."""
    var span = take(counters, phase, rows, threads)
    while span.count() > 0:
        for row in range(span.begin, span.end):
            var at = row * width
            norm_row(
                normed.unsafe_offset(at), x.unsafe_offset(at), weight, width, epsilon, offset
            )
            prepare_row[dtype](normed, width, rounded, row)
        finish(counters, phase, span)
        span = take(counters, phase, rows, threads)
    wait(counters, phase, rows)


@always_inline
def product_phase[
    dtype: DType, //, bits: Int, offset: Int, has_minimum: Bool, adds: Bool = False
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
    var span = take(counters, phase, groups, threads)
    while span.count() > 0:
        var begin = span.begin * GROUP
        var columns = min(outputs, span.end * GROUP) - begin
        product[bits, offset, has_minimum](
            x, rounded, w, panel_bytes, y.unsafe_offset(begin), outputs, k, rows, begin, columns
        )
        comptime if adds:
            for row in range(rows):
                for at in range(row * outputs + begin, row * outputs + begin + columns):
                    y.unsafe_offset(at).unsafe_store(
                        y.unsafe_offset(at).unsafe_load()
                        + residual.unsafe_offset(at).unsafe_load()
                    )
        finish(counters, phase, span)
        span = take(counters, phase, groups, threads)
    wait(counters, phase, groups)
