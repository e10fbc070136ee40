"""Products with a matrix of weights however it is kept, for kernels that compute more than one.

A matrix's type says how it is kept: bytes are blocks of integers (``quantized``), which rounded
rows are multiplied with, and anything else are floats.
"""

from .matmul import float_products
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
def add_columns(
    y: Pointer[mut=True, Scalar[F32], _],
    x: Pointer[Scalar[F32], _],
    stride: Int,
    rows: Int,
    columns: Int,
):
    """Adds columns of x to those of y, both of which have rows at some stride."""
    for row in range(rows):
        for column in range(columns):
            var at = row * stride + column
            y.unsafe_offset(at).unsafe_store(
                y.unsafe_offset(at).unsafe_load() + x.unsafe_offset(at).unsafe_load()
            )
