"""RMS norms of rows on the CPU."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.math import ceildiv, sqrt
from std.sys import num_physical_cores

from .tile import F32, PARALLEL_FROM, WIDTH


@extensibility.register("rolecall_rms_norm")
struct RMSNorm:
    """Computes y[rows, width] = x / rms(x) * (weight + offset); numbers holds epsilon and offset."""

    @staticmethod
    def execute[
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        numbers: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var rows = x.dim_size(0)
        var width = x.dim_size(1)
        if rows == 0:
            return
        var epsilon = numbers.unsafe_ptr().unsafe_load()
        var offset = numbers.unsafe_ptr().unsafe_offset(1).unsafe_load()
        # A thread takes as long to begin as some rows do.
        var threads = 1 if rows * width < PARALLEL_FROM // 4 else num_physical_cores()
        var xp = x.unsafe_ptr()
        var yp = y.unsafe_ptr()
        var wp = weight.unsafe_ptr()

        def work(thread: Int) {imm}:
            var share = ceildiv(rows, threads)
            for row in range(thread * share, min(rows, (thread + 1) * share)):
                norm_row(
                    yp.unsafe_offset(row * width),
                    xp.unsafe_offset(row * width),
                    wp,
                    width,
                    epsilon,
                    offset,
                )

        sync_parallelize(work, threads)


@no_inline
def norm_row(
    result: Pointer[mut=True, Scalar[F32], _],
    source: Pointer[Scalar[F32], _],
    weight: Pointer[Scalar[F32], _],
    width: Int,
    epsilon: Scalar[F32],
    offset: Scalar[F32],
):
    """Writes source / rms(source) * (weight + offset)."""
    var whole = width - width % WIDTH
    var squares = SIMD[F32, WIDTH](0)
    for at in range(0, whole, WIDTH):
        var values = source.unsafe_offset(at).unsafe_load[width=WIDTH]()
        squares = values.fma(values, squares)
    var total = squares.reduce_add()
    for at in range(whole, width):
        var value = source.unsafe_offset(at).unsafe_load()
        total += value * value
    var factor = 1 / sqrt(total / Scalar[F32](width) + epsilon)
    for at in range(0, whole, WIDTH):
        var values = source.unsafe_offset(at).unsafe_load[width=WIDTH]()
        var weights = weight.unsafe_offset(at).unsafe_load[width=WIDTH]()
        result.unsafe_offset(at).unsafe_store(values * factor * (weights + offset))
    for at in range(whole, width):
        result.unsafe_offset(at).unsafe_store(
            source.unsafe_offset(at).unsafe_load()
            * factor
            * (weight.unsafe_offset(at).unsafe_load() + offset)
        )
