"""Rows of activations that are rounded to 8 bits, in blocks of 32."""

from std.memory import bitcast

from .blocks import BLOCK
from .bytes import I32
from .tile import F32

# Four inputs are multiplied at once: a group.
comptime GROUPS = BLOCK // 4
# Of a rounded block: its integers, its scale, their sum, and the product of these two.
comptime BLOCK_WORDS = GROUPS + 3


@always_inline
def rounded_words(k: Int) -> Int:
    """The words that a rounded row of k elements takes."""
    return k // BLOCK * BLOCK_WORDS


@no_inline
def round_row(x: Pointer[Scalar[F32], _], k: Int, rounded: Pointer[mut=True, Int32, _]):
    """Rounds a row to 8 bits, in blocks of BLOCK_WORDS."""
    for block in range(k // BLOCK):
        var values = x.unsafe_offset(block * BLOCK).unsafe_load[width=BLOCK]()
        var largest = abs(values).reduce_max()
        var inverse = Scalar[F32](0) if largest == 0 else 127 / largest
        var codes = round(values * inverse).cast[I32]()
        # Zero, or NaN where any value is not finite: no integer would show it.
        var finite = (values - values).reduce_add()
        var own = rounded.unsafe_offset(block * BLOCK_WORDS)
        own.unsafe_store(bitcast[I32, GROUPS](codes.cast[DType.int8]()))
        var scale = largest / 127 + finite
        var sum = codes.reduce_add()
        own.unsafe_offset(GROUPS).unsafe_store(bitcast[I32](scale))
        own.unsafe_offset(GROUPS + 1).unsafe_store(sum)
        own.unsafe_offset(GROUPS + 2).unsafe_store(bitcast[I32](scale * sum.cast[F32]()))


@always_inline
def same[count: Int](word: Pointer[Int32, _]) -> SIMD[F32, count]:
    """A float32 in every lane; split as an integer it comes from memory at once."""
    return bitcast[F32, count](SIMD[I32, count](word.unsafe_load()))
