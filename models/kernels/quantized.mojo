"""Products of activations that are rounded to 8 bits, in blocks of 32, with blocks of integers."""

from std.collections import Array

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
from .bytes import HAS_DOT2, I16, I32, SUMS, add_pairs, dot2, dot4
from .rounded import BLOCK_WORDS, GROUPS, rounded_words, same
from .tile import F32
from .unpacked import MANY_ROWS, unpacked_products

# Rows of a tile: each keeps a register of integers and one of results.
comptime ROWS = 8
# Rows that are multiplied with all panels before the next: they stay in the second cache.
comptime BLOCK_ROWS = 64


@no_inline
def quantized_products[
    dtype: DType, //, bits: Int, offset: Int, has_minimum: Bool
](
    rounded: Pointer[Int32, _],
    w: Pointer[Scalar[dtype], _],
    panel_bytes: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    k: Int,
    rows: Int,
    columns: Int,
):
    """Writes y[rows, columns], the products of rounded rows with the panels from w on."""
    var words = rounded_words(k)
    for first in range(0, rows, BLOCK_ROWS):
        var end = min(rows, first + BLOCK_ROWS)
        for begin in range(0, columns, LANES):
            var panel = w.unsafe_offset(begin // LANES * panel_bytes)
            var row = first
            comptime if bits == 4 and HAS_DOT2:
                if end - first >= MANY_ROWS and columns - begin >= LANES:
                    row += unpacked_products[offset, has_minimum](
                        rounded.unsafe_offset(first * words),
                        panel,
                        k // BLOCK,
                        y.unsafe_offset(first * y_stride + begin),
                        y_stride,
                        end - first,
                    )
            # A tile unpacks the weights once for all its rows.
            comptime for most in [ROWS, 4, 1]:
                while row + most <= end:
                    comptime for lane in range(0, LANES, SUMS):
                        _tile[most, bits, offset, has_minimum, lane](
                            rounded.unsafe_offset(row * words),
                            panel,
                            k // BLOCK,
                            y.unsafe_offset(row * y_stride + begin + lane),
                            y_stride,
                            min(SUMS, columns - begin - lane),
                        )
                    row += most


@always_inline
def _tile[
    dtype: DType, //, rows: Int, bits: Int, offset: Int, has_minimum: Bool, lane: Int
](
    rounded: Pointer[Int32, _],
    panel: Pointer[Scalar[dtype], _],
    blocks: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    width: Int,
):
    """Writes y[rows, width], the products of some rounded rows with a panel's outputs from a lane on.
    """
    comptime BYTES = integer_bytes[bits]()
    var results = Array[SIMD[F32, SUMS], rows](fill=0)
    for block in range(blocks):
        var own = panel.unsafe_offset(block * block_bytes[bits, has_minimum]())
        var inputs = rounded.unsafe_offset(block * BLOCK_WORDS)
        var integers = _block[rows, bits, offset, lane](inputs, blocks * BLOCK_WORDS, own)
        var scale = load_halves[SUMS](own.unsafe_offset(BYTES + 2 * lane))
        comptime for r in range(rows):
            var at = inputs.unsafe_offset(r * blocks * BLOCK_WORDS + GROUPS)
            results[r] = (scale * same[SUMS](at)).fma(integers[r].cast[F32](), results[r])
        comptime if has_minimum:
            var least = load_halves[SUMS](own.unsafe_offset(BYTES + SCALE_BYTES + 2 * lane))
            comptime for r in range(rows):
                var at = inputs.unsafe_offset(r * blocks * BLOCK_WORDS + GROUPS + 2)
                results[r] = least.fma(same[SUMS](at), results[r])
    comptime for r in range(rows):
        store_first[SUMS](y.unsafe_offset(r * y_stride), results[r], width)


@always_inline
def _block[
    dtype: DType, //, rows: Int, bits: Int, offset: Int, lane: Int
](
    rounded: Pointer[Int32, _], stride: Int, block: Pointer[Scalar[dtype], _]
) -> Array[SIMD[I32, SUMS], rows]:
    """The products of some rows' integers, stride words apart, with those of a block."""
    var sums = Array[SIMD[I32, SUMS], rows](fill=0)
    var pairs = Array[SIMD[I16, 2 * SUMS], rows](fill=0)
    comptime if offset != 0:
        comptime for r in range(rows):
            var sum = rounded.unsafe_offset(r * stride + GROUPS + 1).unsafe_load()
            sums[r] = SIMD[I32, SUMS](Int32(-offset) * sum)
    comptime for group in range(integer_bytes[bits]() // GROUP_BYTES):
        var codes = load_bytes[4 * SUMS](block.unsafe_offset(group * GROUP_BYTES + 4 * lane))
        comptime for r in range(rows):
            var inputs = rounded.unsafe_offset(r * stride + group)
            comptime if bits == 4:
                var low = inputs.unsafe_load()
                var high = inputs.unsafe_offset(GROUPS // 2).unsafe_load()
                comptime if HAS_DOT2:
                    # 16 bits hold a block's: 16 products of at most 15 and 127.
                    pairs[r] += dot2(codes & 15, low)
                    pairs[r] += dot2(codes >> 4, high)
                else:
                    sums[r] = dot4(dot4(sums[r], codes & 15, low), codes >> 4, high)
            else:
                sums[r] = dot4(sums[r], codes, inputs.unsafe_load())
    comptime if bits == 4 and HAS_DOT2:
        comptime for r in range(rows):
            sums[r] += add_pairs(pairs[r], 1)
    return sums^
