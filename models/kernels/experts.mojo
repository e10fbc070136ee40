"""Products of rows with the weights of the experts that each row chose."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import List
from std.math import ceildiv
from std.sys import num_physical_cores

from .rows import zero_row
from .tile import F32, PARALLEL_FROM, TILE, products

# Rows that are multiplied with an expert's weights before the next: they stay in the second cache.
comptime BLOCK = 32


@extensibility.register("rolecall_experts")
struct Experts:
    """Computes y[a, n] = x[row of a, k] times the transpose of w[expert of a], for each choice a.

    ids[tokens, choices] names experts; a choice below zero is another device's, and gives zeros.
    x has one row per token, or one per choice. w[experts * n, k] has the experts one below the
    other; those that nothing chose are not read.
    """

    @staticmethod
    def execute[
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        ids: InputTensor[dtype=DType.int32, rank=2, ...],
        w: InputTensor[dtype=F32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var tokens = ids.dim_size(0)
        var choices = tokens * ids.dim_size(1)
        if choices == 0:
            return
        var k = x.dim_size(1)
        var n = y.dim_size(1)
        var num_experts = w.dim_size(0) // n
        var per_row = choices // x.dim_size(0)
        var xp = x.unsafe_ptr()
        var wp = w.unsafe_ptr()
        var yp = y.unsafe_ptr()
        var chosen = ids.unsafe_ptr()
        # The choices, sorted by expert.
        var first = List[Int](length=num_experts + 1, fill=0)
        for a in range(choices):
            var expert = Int(chosen.unsafe_offset(a).unsafe_load())
            if expert >= num_experts:
                raise Error("expert ", expert, " of ", num_experts, " is chosen")
            if expert < 0:
                zero_row(yp.unsafe_offset(a * n), n)
            else:
                first[expert + 1] += 1
        for expert in range(num_experts):
            first[expert + 1] += first[expert]
        var held = first[num_experts]
        if held == 0:
            return
        var x_at = List[Int](length=held, fill=0)
        var y_at = List[Int](length=held, fill=0)
        var next = first.copy()
        for a in range(choices):
            var expert = Int(chosen.unsafe_offset(a).unsafe_load())
            if expert >= 0:
                x_at[next[expert]] = a // per_row * k
                y_at[next[expert]] = a * n
                next[expert] += 1
        var x_rows = x_at.unsafe_ptr()
        var y_rows = y_at.unsafe_ptr()
        var firsts = first.unsafe_ptr()
        var threads = 1 if held * n * k < PARALLEL_FROM else num_physical_cores()
        var share = ceildiv(ceildiv(n, threads), TILE) * TILE

        def work(thread: Int) {imm}:
            var begin = thread * share
            var end = min(n, begin + share)
            for expert in range(num_experts):
                var row = firsts.unsafe_offset(expert).unsafe_load()
                var stop = firsts.unsafe_offset(expert + 1).unsafe_load()
                while row < stop:
                    products(
                        xp,
                        x_rows.unsafe_offset(row),
                        wp.unsafe_offset((expert * n + begin) * k),
                        k,
                        yp.unsafe_offset(begin),
                        y_rows.unsafe_offset(row),
                        k,
                        min(BLOCK, stop - row),
                        end - begin,
                    )
                    row += BLOCK

        sync_parallelize(work, threads)
        _ = x_at^
        _ = y_at^
        _ = first^
