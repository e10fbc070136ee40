"""Products of many rounded rows with a panel of 4 bit integers, which are unpacked to bytes first.

For processors with instructions that add two products in 16 bits (``bytes.dot2``). Their registers
are few: where a tile unpacks as it goes, they hold one half of a panel's outputs. Here they hold
both, so that each word of inputs is read once for 16 outputs, and results stay in memory. That
takes a seventh fewer instructions, which are what limits such a product.
"""

from std.collections import Array
from std.memory import stack_allocation

from .blocks import (
    BLOCK,
    GROUP_BYTES,
    LANES,
    SCALE_BYTES,
    block_bytes,
    integer_bytes,
    load_bytes,
    load_halves,
)
from .bytes import I16, I32, SUMS, U8, add_pairs, dot2
from .rounded import BLOCK_WORDS, GROUPS, same
from .rows import zero_row
from .tile import F32

# Rows of a tile, which has two registers of outputs.
comptime ROWS = 4
# From so many rows on unpacking a panel saves more than it takes; of 8 it is as much.
comptime MANY_ROWS = 12
# Blocks that are unpacked at once: with a tile's inputs they take half of the first cache, as
# threads of a core share it.
comptime CHUNK = 18
# Of an unpacked block: its bytes, and its scales and minima as float32.
comptime BYTES = BLOCK * LANES
comptime SCALES = 2 * LANES


@always_inline
def unpacked_products[
    dtype: DType, //, offset: Int, has_minimum: Bool
](
    rounded: Pointer[Int32, _],
    panel: Pointer[Scalar[dtype], _],
    blocks: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    rows: Int,
) -> Int:
    """Writes y[rows, LANES], the products of rounded rows with a panel, as far as tiles go.

    Returns the rows that it wrote: the others are fewer than ROWS.
    """
    var whole = rows - rows % ROWS
    var codes = stack_allocation[CHUNK * BYTES, Scalar[U8], alignment=64]()
    var scales = stack_allocation[CHUNK * SCALES, Scalar[F32], alignment=64]()
    for row in range(whole):
        zero_row(y.unsafe_offset(row * y_stride), LANES)
    for begin in range(0, blocks, CHUNK):
        var count = min(CHUNK, blocks - begin)
        _unpack[has_minimum](
            panel.unsafe_offset(begin * block_bytes[4, has_minimum]()), count, codes, scales
        )
        for row in range(0, whole, ROWS):
            _tile[offset, has_minimum](
                rounded.unsafe_offset((row * blocks + begin) * BLOCK_WORDS),
                blocks * BLOCK_WORDS,
                codes,
                scales,
                count,
                y.unsafe_offset(row * y_stride),
                y_stride,
            )
    return whole


@always_inline
def _unpack[
    dtype: DType, //, has_minimum: Bool
](
    packed: Pointer[Scalar[dtype], _],
    blocks: Int,
    codes: Pointer[mut=True, Scalar[U8], _],
    scales: Pointer[mut=True, Scalar[F32], _],
):
    """Writes the integers of blocks as [blocks, GROUPS, GROUP_BYTES], and their scales."""
    comptime PACKED = integer_bytes[4]()
    for block in range(blocks):
        var own = packed.unsafe_offset(block * block_bytes[4, has_minimum]())
        var low = codes.unsafe_offset(block * BYTES)
        var high = low.unsafe_offset(PACKED)
        comptime for at in range(0, PACKED, GROUP_BYTES):
            var both = load_bytes[GROUP_BYTES](own.unsafe_offset(at))
            low.unsafe_offset(at).unsafe_store(both & 15)
            high.unsafe_offset(at).unsafe_store(both >> 4)
        var to = scales.unsafe_offset(block * SCALES)
        to.unsafe_store(load_halves[LANES](own.unsafe_offset(PACKED)))
        comptime if has_minimum:
            var least = own.unsafe_offset(PACKED + SCALE_BYTES)
            to.unsafe_offset(LANES).unsafe_store(load_halves[LANES](least))


@always_inline
def _tile[
    offset: Int, has_minimum: Bool
](
    rounded: Pointer[Int32, _],
    stride: Int,
    codes: Pointer[Scalar[U8], _],
    scales: Pointer[Scalar[F32], _],
    blocks: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
):
    """Adds to y[ROWS, LANES] the products of rows, stride words apart, with unpacked blocks."""
    for block in range(blocks):
        var inputs = rounded.unsafe_offset(block * BLOCK_WORDS)
        var own = codes.unsafe_offset(block * BYTES)
        # 16 bits hold a block's: 16 products of at most 15 and 127.
        var pairs = Array[SIMD[I16, 2 * SUMS], 2 * ROWS](fill=0)
        comptime for group in range(GROUPS):
            var bytes = own.unsafe_offset(group * GROUP_BYTES)
            var first = bytes.unsafe_load[width = 4 * SUMS]()
            var second = bytes.unsafe_offset(4 * SUMS).unsafe_load[width = 4 * SUMS]()
            comptime for r in range(ROWS):
                var four = inputs.unsafe_offset(r * stride + group).unsafe_load()
                pairs[2 * r] += dot2(first, four)
                pairs[2 * r + 1] += dot2(second, four)
        var factors = scales.unsafe_offset(block * SCALES)
        var scale = factors.unsafe_load[width=LANES]()
        var least = factors.unsafe_offset(LANES).unsafe_load[width=LANES]()
        comptime for r in range(ROWS):
            var words = inputs.unsafe_offset(r * stride + GROUPS)
            var low = add_pairs(pairs[2 * r], 1)
            var sums = rebind[SIMD[I32, LANES]](low.join(add_pairs(pairs[2 * r + 1], 1)))
            comptime if offset != 0:
                sums += Int32(-offset) * words.unsafe_offset(1).unsafe_load()
            var out = y.unsafe_offset(r * y_stride)
            var factor = scale * same[LANES](words)
            var result = factor.fma(sums.cast[F32](), out.unsafe_load[width=LANES]())
            comptime if has_minimum:
                result = least.fma(same[LANES](words.unsafe_offset(2)), result)
            out.unsafe_store(result)
