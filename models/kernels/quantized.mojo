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
from std.math import ceildiv
from std.memory import bitcast
from std.sys import num_physical_cores
from std.sys.info import CompilationTarget
from std.sys.intrinsics import llvm_intrinsic

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
        var panels = w.dim_size(0)
        var panel_bytes = w.dim_size(1)
        var blocks = k // BLOCK
        var xp = x.unsafe_ptr()
        var wp = w.unsafe_ptr()
        var yp = y.unsafe_ptr()
        if m == 0:
            return
        var threads = 1 if m * n * k < PARALLEL_FROM else num_physical_cores()
        var groups_of = List[Int32](length=m * blocks * GROUPS, fill=0)
        var scales_of = List[Scalar[F32]](length=m * blocks, fill=0)
        var sums_of = List[Int32](length=m * blocks, fill=0)
        var groups = groups_of.unsafe_ptr()
        var scales = scales_of.unsafe_ptr()
        var sums = sums_of.unsafe_ptr()

        def round_rows(thread: Int) {imm}:
            var share = ceildiv(m, threads)
            for row in range(thread * share, min(m, (thread + 1) * share)):
                _round_row(
                    xp.unsafe_offset(row * k),
                    blocks,
                    groups.unsafe_offset(row * blocks * GROUPS),
                    scales.unsafe_offset(row * blocks),
                    sums.unsafe_offset(row * blocks),
                )

        def multiply(thread: Int) {imm}:
            var share = ceildiv(panels, threads)
            for panel in range(thread * share, min(panels, (thread + 1) * share)):
                var weights = wp.unsafe_offset(panel * panel_bytes)
                var out = yp.unsafe_offset(panel * LANES)
                var width = min(LANES, n - panel * LANES)
                var row = 0
                # A tile unpacks the weights once for all its rows.
                comptime for rows in [ROWS, 4, 1]:
                    while row + rows <= m:
                        _tile[rows, bits, offset, has_minimum](
                            groups.unsafe_offset(row * blocks * GROUPS),
                            scales.unsafe_offset(row * blocks),
                            sums.unsafe_offset(row * blocks),
                            weights,
                            blocks,
                            out.unsafe_offset(row * n),
                            n,
                            width,
                        )
                        row += rows

        if m > ROWS:
            sync_parallelize(round_rows, threads)
        else:
            # Fewer are rounded in less time than a thread takes to begin.
            for thread in range(threads):
                round_rows(thread)
        sync_parallelize(multiply, threads)
        _ = groups_of^
        _ = scales_of^
        _ = sums_of^


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
def _round_row(
    x: Pointer[Scalar[F32], _],
    blocks: Int,
    groups: Pointer[mut=True, Int32, _],
    scales: Pointer[mut=True, Scalar[F32], _],
    sums: Pointer[mut=True, Int32, _],
):
    """Rounds a row to 8 bits: its groups of integers, and each block's scale and sum of integers."""
    for block in range(blocks):
        var values = x.unsafe_offset(block * BLOCK).unsafe_load[width=BLOCK]()
        var largest = abs(values).reduce_max()
        var inverse = Scalar[F32](0) if largest == 0 else 127 / largest
        var codes = round(values * inverse).cast[I32]()
        # Zero, or NaN where any value is not finite: no integer would show it.
        var finite = (values - values).reduce_add()
        scales.unsafe_offset(block).unsafe_store(largest / 127 + finite)
        sums.unsafe_offset(block).unsafe_store(codes.reduce_add())
        groups.unsafe_offset(block * GROUPS).unsafe_store(
            bitcast[I32, GROUPS](codes.cast[DType.int8]())
        )


@always_inline
def _tile[
    rows: Int, bits: Int, offset: Int, has_minimum: Bool
](
    groups: Pointer[Int32, _],
    scales: Pointer[Scalar[F32], _],
    sums: Pointer[Int32, _],
    panel: Pointer[UInt8, _],
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
                var sum = sums.unsafe_offset(r * blocks + block).unsafe_load()
                integers[r] = SIMD[I32, LANES](Int32(-offset) * sum)
        comptime for group in range(BYTES // GROUP_BYTES):
            var weights = codes.unsafe_offset(group * GROUP_BYTES).unsafe_load[width=GROUP_BYTES]()
            comptime for r in range(rows):
                var at = groups.unsafe_offset((r * blocks + block) * GROUPS + group)
                comptime if bits == 4:
                    integers[r] = _dot4(integers[r], weights & 15, at.unsafe_load())
                    integers[r] = _dot4(
                        integers[r], weights >> 4, at.unsafe_offset(GROUPS // 2).unsafe_load()
                    )
                else:
                    integers[r] = _dot4(integers[r], weights, at.unsafe_load())
        var scale = _halves(codes.unsafe_offset(BYTES))
        comptime for r in range(rows):
            var own = scales.unsafe_offset(r * blocks + block).unsafe_load()
            results[r] = (scale * own).fma(integers[r].cast[F32](), results[r])
        comptime if has_minimum:
            var least = _halves(codes.unsafe_offset(BYTES + SCALE_BYTES))
            comptime for r in range(rows):
                var at = r * blocks + block
                var sum = sums.unsafe_offset(at).unsafe_load().cast[F32]()
                var total = SIMD[F32, LANES](scales.unsafe_offset(at).unsafe_load() * sum)
                results[r] = least.fma(total, results[r])
    comptime for r in range(rows):
        var out = y.unsafe_offset(r * y_stride)
        if width == LANES:
            out.unsafe_store(results[r])
        else:
            for lane in range(width):
                out.unsafe_offset(lane).unsafe_store(results[r][lane])


@always_inline
def _halves(values: Pointer[UInt8, _]) -> SIMD[F32, LANES]:
    """Sixteen float16."""
    var bytes = values.unsafe_load[width=SCALE_BYTES]()
    return bitcast[DType.float16, LANES](bytes).cast[F32]()


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
