"""Low-rank additions to a product, each sequence's from an adapter of its own."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import List
from std.math import ceildiv
from std.sys import num_physical_cores

from .rows import zero_row
from .tile import F32, PARALLEL_FROM, products

# Rows of one adapter that are multiplied together.
comptime BLOCK = 32


@extensibility.register("rolecall_lora")
struct Lora:
    """Computes y = x times the transposes of a and of b of each row's adapter, or zero.

    a[adapters, rank, k] and b[adapters, n, rank]. Group g has the batch's rows from offsets[g] to
    offsets[g + 1], and the adapter ids[g], below zero for none. x begins with the batch's row
    first; rows from end on have no adapter.
    """

    @staticmethod
    def execute[
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        a: InputTensor[dtype=F32, rank=3, ...],
        b: InputTensor[dtype=F32, rank=3, ...],
        ids: InputTensor[dtype=DType.int32, rank=1, ...],
        offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        end: InputTensor[dtype=DType.int64, rank=1, ...],
        first: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var rows = x.dim_size(0)
        var k = x.dim_size(1)
        var n = y.dim_size(1)
        var rank = a.dim_size(1)
        if rows == 0:
            return
        var begin = Int(first.unsafe_ptr().unsafe_load())
        var last = Int(end.unsafe_ptr().unsafe_load())
        var adapters = List[Int](length=rows, fill=-1)
        for group in range(ids.dim_size(0)):
            var adapter = Int(ids.unsafe_ptr().unsafe_offset(group).unsafe_load())
            if adapter >= a.dim_size(0):
                raise Error("adapter ", adapter, " of ", a.dim_size(0), " is asked for")
            var start = Int(offsets.unsafe_ptr().unsafe_offset(group).unsafe_load())
            var stop = min(
                last, Int(offsets.unsafe_ptr().unsafe_offset(group + 1).unsafe_load())
            )
            for row in range(max(0, start - begin), min(rows, stop - begin)):
                adapters[row] = adapter
        var x_at = List[Int](length=rows, fill=0)
        var h_at = List[Int](length=BLOCK, fill=0)
        var y_at = List[Int](length=rows, fill=0)
        for row in range(rows):
            x_at[row] = row * k
            y_at[row] = row * n
        for row in range(BLOCK):
            h_at[row] = row * rank
        var threads = 1 if rows * rank * (k + n) < PARALLEL_FROM else num_physical_cores()
        var share = ceildiv(rows, threads)
        var xp = x.unsafe_ptr()
        var yp = y.unsafe_ptr()
        var ap = a.unsafe_ptr()
        var bp = b.unsafe_ptr()
        var chosen = adapters.unsafe_ptr()
        var x_rows = x_at.unsafe_ptr()
        var h_rows = h_at.unsafe_ptr()
        var y_rows = y_at.unsafe_ptr()

        def work(thread: Int) {imm}:
            var h = List[Scalar[F32]](length=BLOCK * rank, fill=0)
            var row = thread * share
            var stop = min(rows, row + share)
            while row < stop:
                var adapter = chosen.unsafe_offset(row).unsafe_load()
                var count = 1
                while (
                    row + count < stop
                    and count < BLOCK
                    and chosen.unsafe_offset(row + count).unsafe_load() == adapter
                ):
                    count += 1
                if adapter < 0:
                    zero_row(yp.unsafe_offset(row * n), count * n)
                else:
                    products(
                        xp,
                        x_rows.unsafe_offset(row),
                        ap.unsafe_offset(adapter * rank * k),
                        k,
                        h.unsafe_ptr(),
                        h_rows,
                        k,
                        count,
                        rank,
                    )
                    products(
                        h.unsafe_ptr(),
                        h_rows,
                        bp.unsafe_offset(adapter * n * rank),
                        rank,
                        yp,
                        y_rows.unsafe_offset(row),
                        rank,
                        count,
                        n,
                    )
                row += count

        sync_parallelize(work, threads)
        _ = adapters^
        _ = x_at^
        _ = h_at^
        _ = y_at^
