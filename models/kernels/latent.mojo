"""Latent attention on the CPU, for which MAX 26.7 has no kernel."""

import extensibility
from extensibility import InputTensor, OutputTensor, _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import List
from std.math import ceildiv, exp
from std.sys import num_physical_cores

from .rows import copy_row
from .tile import F32, row_products, weighted_rows

comptime U32 = DType.uint32


@extensibility.register("rolecall_latent_context")
struct LatentContext:
    """Gathers each sequence's cached latents into context, each from a page-aligned row on.

    total is the sum of the sequences' page-aligned lengths: the rows of context that are filled.
    """

    @staticmethod
    def execute[
        target: StaticString,
    ](
        context: MutableInputTensor[dtype=F32, rank=2, ...],
        pages: MutableInputTensor[dtype=F32, rank=6, ...],
        lookup_table: InputTensor[dtype=U32, rank=2, ...],
        cache_lengths: InputTensor[dtype=U32, rank=1, ...],
        row_offsets: InputTensor[dtype=U32, rank=1, ...],
        layer: InputTensor[dtype=U32, rank=1, ...],
        total: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var num_layers = pages.dim_size(2)
        var page_rows = pages.dim_size(3)
        var page_size = page_rows * pages.dim_size(5)
        var at_layer = Int(layer.unsafe_ptr().unsafe_load())
        var sources = List[Int]()
        for sequence in range(cache_lengths.dim_size(0)):
            var length = _length(cache_lengths, row_offsets, sequence)
            for page in range(ceildiv(length, page_rows)):
                var entry = sequence * lookup_table.dim_size(1) + page
                var number = Int(lookup_table.unsafe_ptr().unsafe_offset(entry).unsafe_load())
                sources.append((number * num_layers + at_layer) * page_size)
        var rows = len(sources) * page_rows
        if rows != Int(total.unsafe_ptr().unsafe_load()):
            raise Error(
                "the batch's context lengths say ", total.unsafe_ptr().unsafe_load(),
                " tokens, its pages hold ", rows,
            )
        if rows > context.dim_size(0):
            raise Error(rows, " tokens of context for a workspace of ", context.dim_size(0))
        var count = len(sources)
        var threads = num_physical_cores()
        var share = ceildiv(count, threads)
        var to = context.unsafe_ptr()
        var source = pages.unsafe_ptr()
        var at = sources.unsafe_ptr()

        def work(thread: Int) {imm}:
            for page in range(thread * share, min(count, (thread + 1) * share)):
                copy_row(
                    to.unsafe_offset(page * page_size),
                    source.unsafe_offset(at.unsafe_offset(page).unsafe_load()),
                    page_size,
                )

        if count > 0:
            sync_parallelize(work, threads)
        _ = sources^


@extensibility.register("rolecall_latent_attention")
struct LatentAttention:
    """Attends causally with queries that are brought into the latents' space.

    A head's query of nope + rope dimensions becomes one of rank + rope: the first part times the
    head's key rows of w. The result, of rank dimensions, times the head's value rows of w is y.
    w[heads * (nope + value), rank] is the checkpoint's kv_b_proj; context is what
    rolecall_latent_context filled, rank + rope wide; heads holds their number and the pages' rows.
    """

    @staticmethod
    def execute[
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        queries: InputTensor[dtype=F32, rank=2, ...],
        w: InputTensor[dtype=F32, rank=2, ...],
        context: MutableInputTensor[dtype=F32, rank=2, ...],
        cache_lengths: InputTensor[dtype=U32, rank=1, ...],
        row_offsets: InputTensor[dtype=U32, rank=1, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        heads: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var tokens = queries.dim_size(0)
        if tokens == 0:
            return
        var num_heads = Int(heads.unsafe_ptr().unsafe_load())
        var page_rows = Int(heads.unsafe_ptr().unsafe_offset(1).unsafe_load())
        var rank = w.dim_size(1)
        var cached = context.dim_size(1)
        var rope = cached - rank
        var query = queries.dim_size(1) // num_heads
        var nope = query - rope
        var value = y.dim_size(1) // num_heads
        var factor = scale.unsafe_ptr().unsafe_load()
        # Per token, where its sequence's latents begin, and how many it sees.
        var begins = List[Int](length=tokens, fill=0)
        var seen = List[Int](length=tokens, fill=0)
        var begin = 0
        var longest = 1
        for sequence in range(cache_lengths.dim_size(0)):
            var length = _length(cache_lengths, row_offsets, sequence)
            var start = Int(row_offsets.unsafe_ptr().unsafe_offset(sequence).unsafe_load())
            var stop = Int(row_offsets.unsafe_ptr().unsafe_offset(sequence + 1).unsafe_load())
            for token in range(start, stop):
                begins[token] = begin
                seen[token] = length - (stop - 1 - token)
            begin += ceildiv(length, page_rows) * page_rows
            longest = max(longest, length)
        var threads = num_physical_cores()
        # Heads are the slower index: a thread's share reads few heads' weights.
        var share = ceildiv(num_heads * tokens, threads)
        var latents = context.unsafe_ptr()
        var qp = queries.unsafe_ptr()
        var wp = w.unsafe_ptr()
        var yp = y.unsafe_ptr()
        var begins_at = begins.unsafe_ptr()
        var seen_at = seen.unsafe_ptr()

        def work(thread: Int) {imm}:
            var absorbed = List[Scalar[F32]](length=cached, fill=0)
            var sums = List[Scalar[F32]](length=rank, fill=0)
            var scores = List[Scalar[F32]](length=longest, fill=0)
            for pair in range(thread * share, min(num_heads * tokens, (thread + 1) * share)):
                var head = pair // tokens
                var token = pair % tokens
                var keys = wp.unsafe_offset(head * (nope + value) * rank)
                var own = qp.unsafe_offset((token * num_heads + head) * query)
                var rows = latents.unsafe_offset(
                    begins_at.unsafe_offset(token).unsafe_load() * cached
                )
                var count = seen_at.unsafe_offset(token).unsafe_load()
                weighted_rows(absorbed.unsafe_ptr(), own, keys, rank, rank, nope, factor)
                for i in range(rope):
                    absorbed[rank + i] = own.unsafe_offset(nope + i).unsafe_load() * factor
                row_products(
                    absorbed.unsafe_ptr(), rows, cached, scores.unsafe_ptr(), cached, count
                )
                var largest = scores[0]
                for s in range(1, count):
                    largest = max(largest, scores[s])
                var total = Scalar[F32](0)
                for s in range(count):
                    scores[s] = exp(scores[s] - largest)
                    total += scores[s]
                weighted_rows(
                    sums.unsafe_ptr(), scores.unsafe_ptr(), rows, cached, rank, count, 1 / total
                )
                row_products(
                    sums.unsafe_ptr(),
                    keys.unsafe_offset(nope * rank),
                    rank,
                    yp.unsafe_offset((token * num_heads + head) * value),
                    rank,
                    value,
                )

        sync_parallelize(work, threads)
        _ = begins^
        _ = seen^


@always_inline
def _length(
    cache_lengths: InputTensor[dtype=U32, rank=1, ...],
    row_offsets: InputTensor[dtype=U32, rank=1, ...],
    sequence: Int,
) -> Int:
    """The tokens of a sequence, those of this step included."""
    var offsets = row_offsets.unsafe_ptr().unsafe_offset(sequence)
    var now = offsets.unsafe_offset(1).unsafe_load() - offsets.unsafe_load()
    return Int(cache_lengths.unsafe_ptr().unsafe_offset(sequence).unsafe_load() + now)
