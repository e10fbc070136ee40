"""Products of activations in float32 with blocks of integers, which are widened on the way.

An integer times a float16 scale has 19 bits at most, so that a weight in float32 is what the block
stands for, or where the format has a minimum the nearest to it.
"""

from std.collections import Array, List
from std.memory import bitcast

from .blocks import (
    BLOCK,
    GROUP_BYTES,
    LANES,
    SCALE_BYTES,
    block_bytes,
    integer_bytes,
    load_bytes,
    load_halves,
    store_first,
)
from .bytes import I32
from .matmul import PANELS_FROM
from .panel import PANEL, panel_products
from .tile import F32, WIDTH

# Rows of a tile; with 16 registers more would not stay in them.
comptime ROWS = 8 if WIDTH >= 16 else 4
# Sums of one row that do not wait for each other.
comptime CHAINS = 4
# Outputs of a float panel: whole ones of both kinds.
comptime WIDE = max(PANEL, LANES)


@no_inline
def widened_products[
    dtype: DType, //, bits: Int, offset: Int, has_minimum: Bool
](
    x: Pointer[Scalar[F32], _],
    w: Pointer[Scalar[dtype], _],
    panel_bytes: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    k: Int,
    rows: Int,
    columns: Int,
):
    """Writes y[rows, columns], the products of x[rows, k] with the panels from w on."""
    if rows >= PANELS_FROM:
        _panel_products[bits, offset, has_minimum](
            x, w, panel_bytes, y, y_stride, k, rows, columns
        )
        return
    for begin in range(0, columns, LANES):
        var panel = w.unsafe_offset(begin // LANES * panel_bytes)
        var row = 0
        # A tile widens the weights once for all its rows.
        comptime for most in [ROWS, 4, 2, 1]:
            while row + most <= rows:
                _tile[most, bits, offset, has_minimum](
                    x.unsafe_offset(row * k),
                    panel,
                    k,
                    y.unsafe_offset(row * y_stride + begin),
                    y_stride,
                    min(LANES, columns - begin),
                )
                row += most


@always_inline
def _panel_products[
    dtype: DType, //, bits: Int, offset: Int, has_minimum: Bool
](
    x: Pointer[Scalar[F32], _],
    w: Pointer[Scalar[dtype], _],
    panel_bytes: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    k: Int,
    rows: Int,
    columns: Int,
):
    """The same of many rows: the weights are widened once."""
    var wide = List[Scalar[F32]](length=WIDE * k, fill=0)
    for begin in range(0, columns, WIDE):
        for part in range(0, min(WIDE, columns - begin), LANES):
            _widen[bits, offset, has_minimum](
                wide.unsafe_ptr().unsafe_offset(part),
                w.unsafe_offset((begin + part) // LANES * panel_bytes),
                k // BLOCK,
            )
        for part in range(0, min(WIDE, columns - begin), PANEL):
            panel_products(
                x,
                k,
                wide.unsafe_ptr().unsafe_offset(part),
                WIDE,
                k,
                y.unsafe_offset(begin + part),
                y_stride,
                rows,
                min(PANEL, columns - begin - part),
            )
    _ = wide^


@always_inline
def _widen[
    dtype: DType, //, bits: Int, offset: Int, has_minimum: Bool
](
    wide: Pointer[mut=True, Scalar[F32], _],
    panel: Pointer[Scalar[dtype], _],
    blocks: Int,
):
    """Writes LANES columns of wide[k, WIDE]: the weights of a panel."""
    for block in range(blocks):
        var own = panel.unsafe_offset(block * block_bytes[bits, has_minimum]())
        var scale = load_halves[LANES](own.unsafe_offset(integer_bytes[bits]()))
        var least = _least[bits, offset, has_minimum](own, scale)
        comptime for group in range(integer_bytes[bits]() // GROUP_BYTES):
            var words = _words(own, group)
            comptime for byte in range(4):
                comptime for part in range(8 // bits):
                    var at = block * BLOCK + part * (BLOCK // 2) + 4 * group + byte
                    wide.unsafe_offset(at * WIDE).unsafe_store(
                        _weights[bits, 8 * byte + 4 * part](words, scale, least)
                    )


@always_inline
def _tile[
    dtype: DType, //, rows: Int, bits: Int, offset: Int, has_minimum: Bool
](
    x: Pointer[Scalar[F32], _],
    panel: Pointer[Scalar[dtype], _],
    k: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    width: Int,
):
    """Writes y[rows, width], the products of some rows of x[rows, k] with a panel."""
    comptime chains = max(1, CHAINS // rows)
    var sums = Array[SIMD[F32, LANES], rows * chains](fill=0)
    for block in range(k // BLOCK):
        var own = panel.unsafe_offset(block * block_bytes[bits, has_minimum]())
        var scale = load_halves[LANES](own.unsafe_offset(integer_bytes[bits]()))
        var least = _least[bits, offset, has_minimum](own, scale)
        comptime for group in range(integer_bytes[bits]() // GROUP_BYTES):
            var words = _words(own, group)
            comptime for byte in range(4):
                comptime for part in range(8 // bits):
                    comptime at = part * (BLOCK // 2) + 4 * group + byte
                    var weights = _weights[bits, 8 * byte + 4 * part](words, scale, least)
                    comptime for r in range(rows):
                        var value = x.unsafe_offset(r * k + block * BLOCK + at).unsafe_load()
                        comptime sum = r * chains + at % chains
                        sums[sum] = SIMD[F32, LANES](value).fma(weights, sums[sum])
    comptime for r in range(rows):
        comptime for chain in range(1, chains):
            sums[r * chains] += sums[r * chains + chain]
        store_first[LANES](y.unsafe_offset(r * y_stride), sums[r * chains], width)


@always_inline
def _least[
    dtype: DType, //, bits: Int, offset: Int, has_minimum: Bool
](block: Pointer[Scalar[dtype], _], scale: SIMD[F32, LANES]) -> SIMD[F32, LANES]:
    """What a block's integers begin at."""
    comptime if has_minimum:
        return load_halves[LANES](block.unsafe_offset(integer_bytes[bits]() + SCALE_BYTES))
    else:
        return -scale * SIMD[F32, LANES](offset)


@always_inline
def _words[dtype: DType, //](block: Pointer[Scalar[dtype], _], group: Int) -> SIMD[I32, LANES]:
    """The integers of a group, those of an output in a word."""
    return bitcast[I32, LANES](load_bytes[GROUP_BYTES](block.unsafe_offset(group * GROUP_BYTES)))


@always_inline
def _weights[
    bits: Int, shift: Int
](words: SIMD[I32, LANES], scale: SIMD[F32, LANES], least: SIMD[F32, LANES]) -> SIMD[F32, LANES]:
    """One input's weights of every output: the bits of a group's words from a shift on."""
    return ((words >> Int32(shift)) & Int32((1 << bits) - 1)).cast[F32]().fma(scale, least)
