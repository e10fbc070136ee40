"""Products with weights kept in blocks of 32 small integers that share a scale.

The blocks are GGUF's Q4_0, Q4_1 and Q8_0, laid out anew (``models/storage.py``): a panel has 16
outputs, and of each block of 32 inputs first the integers, four inputs of every output side by
side, as the processor multiplies them; then the outputs' scales, then what their integers begin at,
where the format says that. So a product reads a matrix from its beginning to its end, in one stream
that the processor fetches ahead. Activations are rounded to 8 bits in blocks of 32.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import Array, List
from std.memory import bitcast
from std.sys import num_physical_cores
from std.sys.info import CompilationTarget
from std.sys.intrinsics import llvm_intrinsic

from .phases import counters, finish, take, wait
from .tile import F32, PARALLEL_FROM

comptime I32 = DType.int32
comptime U8 = DType.uint8
# Inputs of a block, and outputs of a panel.
comptime BLOCK = 32
comptime LANES = 16
# Four inputs are multiplied at once: a group.
comptime GROUPS = BLOCK // 4
# Bytes of a group of every output, and of their scales.
comptime GROUP_BYTES = 4 * LANES
comptime SCALE_BYTES = 2 * LANES
# Of a rounded block: its integers, its scale, their sum, and the product of these two.
comptime BLOCK_WORDS = GROUPS + 3
# Rows of a tile: each keeps a register of integers and one of results.
comptime ROWS = 8


def integer_bytes[bits: Int]() -> Int:
    """Bytes of the integers of one block of every output of a panel."""
    return BLOCK * LANES * bits // 8


def block_bytes[bits: Int, has_minimum: Bool]() -> Int:
    """The same, with their scales and minima."""
    return integer_bytes[bits]() + (2 if has_minimum else 1) * SCALE_BYTES


@extensibility.register("rolecall_quantized_matmul")
struct QuantizedMatmul:
    """Computes y[m, n] = x[m, k] times the transpose of the packed w[n, k]."""

    @staticmethod
    def execute[
        bits: Int,
        offset: Int,
        has_minimum: Bool,
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
        var panels = w.dim_size(0)
        var panel_bytes = w.dim_size(1)
        var xp = x.unsafe_ptr()
        var wp = w.unsafe_ptr()
        var yp = y.unsafe_ptr()
        var threads = 1 if m * n * k < PARALLEL_FROM else num_physical_cores()
        var words = rounded_words(k)
        var all_rounded = List[Int32](length=m * words, fill=0)
        var rounded = all_rounded.unsafe_ptr()
        var counts = counters(2)
        var shared = counts.unsafe_ptr()

        def work(thread: Int) {imm}:
            var span = take(shared, 0, m, threads)
            while span.count() > 0:
                for row in range(span.begin, span.end):
                    round_row(xp.unsafe_offset(row * k), k, rounded.unsafe_offset(row * words))
                finish(shared, 0, span)
                span = take(shared, 0, m, threads)
            wait(shared, 0, m)
            span = take(shared, 1, panels, threads)
            while span.count() > 0:
                var begin = span.begin * LANES
                quantized_products[bits, offset, has_minimum](
                    rounded,
                    wp.unsafe_offset(span.begin * panel_bytes),
                    panel_bytes,
                    yp.unsafe_offset(begin),
                    n,
                    k,
                    m,
                    min(n, span.end * LANES) - begin,
                )
                span = take(shared, 1, panels, threads)

        sync_parallelize(work, threads)
        _ = all_rounded^
        _ = counts^


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
                var scale = _halves(own.unsafe_offset(BYTES))[lane]
                var least = -scale * Scalar[F32](offset)
                comptime if has_minimum:
                    least = _halves(own.unsafe_offset(BYTES + SCALE_BYTES))[lane]
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
    for begin in range(0, columns, LANES):
        var panel = w.unsafe_offset(begin // LANES * panel_bytes)
        var row = 0
        # A tile unpacks the weights once for all its rows.
        comptime for most in [ROWS, 4, 1]:
            while row + most <= rows:
                _tile[most, bits, offset, has_minimum](
                    rounded.unsafe_offset(row * words),
                    panel,
                    k // BLOCK,
                    y.unsafe_offset(row * y_stride + begin),
                    y_stride,
                    min(LANES, columns - begin),
                )
                row += most


@always_inline
def _tile[
    dtype: DType, //, rows: Int, bits: Int, offset: Int, has_minimum: Bool
](
    rounded: Pointer[Int32, _],
    panel: Pointer[Scalar[dtype], _],
    blocks: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    width: Int,
):
    """Writes y[rows, width], the products of some rounded rows with a panel."""
    comptime BYTES = integer_bytes[bits]()
    var results = Array[SIMD[F32, LANES], rows](fill=0)
    for block in range(blocks):
        var codes = panel.unsafe_offset(block * block_bytes[bits, has_minimum]())
        var integers = Array[SIMD[I32, LANES], rows](fill=0)
        comptime if offset != 0:
            comptime for r in range(rows):
                var own = rounded.unsafe_offset((r * blocks + block) * BLOCK_WORDS)
                var sum = own.unsafe_offset(GROUPS + 1).unsafe_load()
                integers[r] = SIMD[I32, LANES](Int32(-offset) * sum)
        comptime for group in range(BYTES // GROUP_BYTES):
            var weights = _bytes[GROUP_BYTES](codes.unsafe_offset(group * GROUP_BYTES))
            comptime for r in range(rows):
                var own = rounded.unsafe_offset((r * blocks + block) * BLOCK_WORDS + group)
                comptime if bits == 4:
                    integers[r] = _dot4(integers[r], weights & 15, own.unsafe_load())
                    integers[r] = _dot4(
                        integers[r], weights >> 4, own.unsafe_offset(GROUPS // 2).unsafe_load()
                    )
                else:
                    integers[r] = _dot4(integers[r], weights, own.unsafe_load())
        var scale = _halves(codes.unsafe_offset(BYTES))
        comptime for r in range(rows):
            var own = rounded.unsafe_offset((r * blocks + block) * BLOCK_WORDS + GROUPS)
            results[r] = (scale * _same(own)).fma(integers[r].cast[F32](), results[r])
        comptime if has_minimum:
            var least = _halves(codes.unsafe_offset(BYTES + SCALE_BYTES))
            comptime for r in range(rows):
                var own = rounded.unsafe_offset((r * blocks + block) * BLOCK_WORDS + GROUPS + 2)
                results[r] = least.fma(_same(own), results[r])
    comptime for r in range(rows):
        var out = y.unsafe_offset(r * y_stride)
        if width == LANES:
            out.unsafe_store(results[r])
        else:
            for lane in range(width):
                out.unsafe_offset(lane).unsafe_store(results[r][lane])


@always_inline
def _same(word: Pointer[Int32, _]) -> SIMD[F32, LANES]:
    """A float32 in every lane; split as an integer it comes from memory at once."""
    return bitcast[F32, LANES](SIMD[I32, LANES](word.unsafe_load()))


@always_inline
def _bytes[dtype: DType, //, count: Int](values: Pointer[Scalar[dtype], _]) -> SIMD[U8, count]:
    """Consecutive bytes."""
    return rebind[SIMD[U8, count]](values.unsafe_load[width=count]())


@always_inline
def _halves[dtype: DType, //](values: Pointer[Scalar[dtype], _]) -> SIMD[F32, LANES]:
    """Sixteen float16."""
    return bitcast[DType.float16, LANES](_bytes[SCALE_BYTES](values)).cast[F32]()


@always_inline
def _dot4(
    sums: SIMD[I32, LANES], weights: SIMD[U8, GROUP_BYTES], group: Int32
) -> SIMD[I32, LANES]:
    """Adds to each output the products of its four weights with the group's four integers."""
    var inputs = SIMD[I32, LANES](group)
    comptime if CompilationTarget.has_vnni() and CompilationTarget.has_avx512f():
        return llvm_intrinsic[
            "llvm.x86.avx512.vpdpbusd.512", SIMD[I32, LANES], has_side_effect=False
        ](sums, weights, bitcast[DType.int8, GROUP_BYTES](inputs))
    else:
        var lanes = bitcast[I32, LANES](weights)
        var total = sums
        comptime for byte in range(4):
            var signed = (inputs << Int32(24 - 8 * byte)) >> 24
            total += ((lanes >> Int32(8 * byte)) & 255) * signed
        return total
