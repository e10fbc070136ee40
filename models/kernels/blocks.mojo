"""Weights kept in blocks of 32 small integers that share a scale.

The blocks are GGUF's Q4_0, Q4_1 and Q8_0, laid out anew (``models/storage.py``): a panel has 16
outputs, and of each block of 32 inputs first the integers, four inputs of every output side by
side, as the processor multiplies them; then the outputs' scales, then what their integers begin at,
where the format says that. So a product reads a matrix from its beginning to its end, in one stream
that the processor fetches ahead.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from std.memory import bitcast

from .bytes import U8
from .tile import F32

# Inputs of a block, and outputs of a panel.
comptime BLOCK = 32
comptime LANES = 16
# Bytes of a group, which is four inputs of every output, and of their scales.
comptime GROUP_BYTES = 4 * LANES
comptime SCALE_BYTES = 2 * LANES


def integer_bytes[bits: Int]() -> Int:
    """Bytes of the integers of one block of every output of a panel."""
    return BLOCK * LANES * bits // 8


def block_bytes[bits: Int, has_minimum: Bool]() -> Int:
    """The same, with their scales and minima."""
    return integer_bytes[bits]() + (2 if has_minimum else 1) * SCALE_BYTES


@extensibility.register("rolecall_quantized_rows")
struct QuantizedRows:
    """Computes rows of the packed w[n, k] as float32, y[m, k]."""

    @staticmethod
    def execute[
        bits: Int,
        offset: Int,
        has_minimum: Bool,
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        w: InputTensor[dtype=U8, rank=2, ...],
        rows: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime BYTES = integer_bytes[bits]()
        comptime BYTES_OF_BLOCK = block_bytes[bits, has_minimum]()
        var k = y.dim_size(1)
        var blocks = k // BLOCK
        for index in range(y.dim_size(0)):
            var row = Int(rows.unsafe_ptr().unsafe_offset(index).unsafe_load())
            var panel = w.unsafe_ptr().unsafe_offset(row // LANES * w.dim_size(1))
            var lane = row % LANES
            var out = y.unsafe_ptr().unsafe_offset(index * k)
            for block in range(blocks):
                var own = panel.unsafe_offset(block * BYTES_OF_BLOCK)
                var scale = load_halves[LANES](own.unsafe_offset(BYTES))[lane]
                var least = -scale * Scalar[F32](offset)
                comptime if has_minimum:
                    least = load_halves[LANES](own.unsafe_offset(BYTES + SCALE_BYTES))[lane]
                var codes = own.unsafe_offset(4 * lane)
                comptime for group in range(BYTES // GROUP_BYTES):
                    var four = codes.unsafe_offset(group * GROUP_BYTES).unsafe_load[width=4]()
                    var at = out.unsafe_offset(block * BLOCK + 4 * group)
                    comptime if bits == 4:
                        at.unsafe_store((four & 15).cast[F32]().fma(scale, least))
                        at.unsafe_offset(BLOCK // 2).unsafe_store(
                            (four >> 4).cast[F32]().fma(scale, least)
                        )
                    else:
                        at.unsafe_store(four.cast[F32]().fma(scale, least))


@always_inline
def load_bytes[dtype: DType, //, count: Int](values: Pointer[Scalar[dtype], _]) -> SIMD[U8, count]:
    """Consecutive bytes."""
    return rebind[SIMD[U8, count]](values.unsafe_load[width=count]())


@always_inline
def store_first[
    count: Int
](to: Pointer[mut=True, Scalar[F32], _], values: SIMD[F32, count], width: Int):
    """Stores as many of some outputs as there are."""
    if width >= count:
        to.unsafe_store(values)
    else:
        for lane in range(width):
            to.unsafe_offset(lane).unsafe_store(values[lane])


@always_inline
def load_halves[
    dtype: DType, //, count: Int
](values: Pointer[Scalar[dtype], _]) -> SIMD[F32, count]:
    """Consecutive float16."""
    return bitcast[DType.float16, count](load_bytes[2 * count](values)).cast[F32]()
