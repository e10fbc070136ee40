"""Attention over the paged KV cache on the CPU.

A sequence's one new token attends to parts of its context, each on some thread, and the results
are put together (flash decoding). Several new tokens attend in blocks, each over the context in
chunks (flash attention, arXiv 2205.14135): nothing of the size of tokens times context is kept.
"""

import extensibility
from extensibility import InputTensor, OutputTensor, _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import List
from std.math import ceildiv
from std.sys import num_physical_cores

from .attend_block import attend_block
from .attend_part import attend_part, combine
from .cache import U32, cache_of
from .tile import F32

# Rows of a block of queries: a token has one for each query head of a key head.
comptime BLOCK_ROWS = 96
# A part of a context has at least so many tokens.
comptime LEAST_PART = 64


@extensibility.register("rolecall_attention")
struct Attention:
    """Computes y[tokens, heads * dim] of rotated queries; their keys and values are in the cache.

    sizes holds the layer and how many tokens back a token sees, itself included. No sequence may
    have more new tokens than max_prompt_length, nor more in all than max_cache_length.
    """

    @staticmethod
    def execute[
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        queries: InputTensor[dtype=F32, rank=2, ...],
        pages: MutableInputTensor[dtype=F32, rank=6, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        lookup_table: InputTensor[dtype=U32, rank=2, ...],
        cache_lengths: InputTensor[dtype=U32, rank=1, ...],
        max_prompt_length: InputTensor[dtype=U32, rank=1, ...],
        max_cache_length: InputTensor[dtype=U32, rank=1, ...],
        row_offsets: InputTensor[dtype=U32, rank=1, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        sizes: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var sequences = cache_lengths.dim_size(0)
        if queries.dim_size(0) == 0:
            return
        var kv = cache_of(
            pages,
            Int(page_stride.unsafe_ptr().unsafe_load()),
            Int(sizes.unsafe_ptr().unsafe_load()),
        )
        var most_new = Int(max_prompt_length.unsafe_ptr().unsafe_load())
        var most = Int(max_cache_length.unsafe_ptr().unsafe_load())
        var window = Int(sizes.unsafe_ptr().unsafe_offset(1).unsafe_load())
        var factor = scale.unsafe_ptr().unsafe_load()
        var width = queries.dim_size(1)
        var heads = width // kv.dim
        var group = heads // kv.heads
        var block = max(1, BLOCK_ROWS // group)
        var threads = num_physical_cores()
        var yp = y.unsafe_ptr()
        var qp = queries.unsafe_ptr()
        var kp = pages.unsafe_ptr()
        var tables = lookup_table.unsafe_ptr()
        var max_pages = lookup_table.dim_size(1)

        # What threads take in turn: blocks of several new tokens, and parts of a single one's
        # context; of each its sequence, first token and end, or first position and end.
        var blocks = List[Int]()
        var parts = List[Int]()
        var singles = 0
        for sequence in range(sequences):
            if _count(row_offsets, sequence) == 1:
                singles += 1
        var parts_each = ceildiv(2 * threads, max(1, singles))
        var longest = 0
        for sequence in range(sequences):
            var count = _count(row_offsets, sequence)
            var cached = Int(cache_lengths.unsafe_ptr().unsafe_offset(sequence).unsafe_load())
            if count > most_new or cached + count > most:
                raise Error(
                    t"sequence {sequence} has {count} new tokens behind {cached}, and the batch "
                    t"{most_new} and {most} in all at most"
                )
            if count == 1:
                var begin = max(0, cached + 1 - window)
                var share = max(LEAST_PART, ceildiv(cached + 1 - begin, parts_each))
                longest = max(longest, share)
                for at in range(begin, cached + 1, share):
                    parts += [sequence, at, min(at + share, cached + 1)]
            else:
                for at in range(0, count, block):
                    blocks += [sequence, at, min(at + block, count)]
        var num_blocks = len(blocks) // 3
        var num_parts = len(parts) // 3
        # Per part and head: the largest score, the sum of weights, then the weighted values.
        var partial_width = kv.dim + 2
        var partials = List[Scalar[F32]](
            length=num_parts * heads * partial_width, fill=0
        )
        var pp = partials.unsafe_ptr()
        var bp = blocks.unsafe_ptr()
        var sp = parts.unsafe_ptr()
        var cached_tokens = cache_lengths.unsafe_ptr()
        var offsets = row_offsets.unsafe_ptr()

        def work(thread: Int) {imm}:
            var scores = List[Scalar[F32]](length=heads * longest, fill=0)
            for unit in range(thread, num_blocks + num_parts, threads):
                if unit < num_blocks:
                    var own = bp.unsafe_offset(3 * unit)
                    var sequence = own.unsafe_load()
                    var begin = own.unsafe_offset(1).unsafe_load()
                    var end = own.unsafe_offset(2).unsafe_load()
                    var start = Int(offsets.unsafe_offset(sequence).unsafe_load()) + begin
                    attend_block(
                        yp.unsafe_offset(start * width),
                        qp.unsafe_offset(start * width),
                        kp,
                        tables.unsafe_offset(sequence * max_pages),
                        kv,
                        group,
                        end - begin,
                        Int(cached_tokens.unsafe_offset(sequence).unsafe_load()) + begin,
                        window,
                        factor,
                    )
                else:
                    var own = sp.unsafe_offset(3 * (unit - num_blocks))
                    var sequence = own.unsafe_load()
                    var start = Int(offsets.unsafe_offset(sequence).unsafe_load())
                    attend_part(
                        pp.unsafe_offset((unit - num_blocks) * heads * partial_width),
                        qp.unsafe_offset(start * width),
                        kp,
                        tables.unsafe_offset(sequence * max_pages),
                        kv,
                        group,
                        own.unsafe_offset(1).unsafe_load(),
                        own.unsafe_offset(2).unsafe_load(),
                        factor,
                        scores.unsafe_ptr(),
                    )
            _ = scores^

        sync_parallelize(work, threads)
        var first = 0
        while first < num_parts:
            var last = first
            while last < num_parts and parts[3 * last] == parts[3 * first]:
                last += 1
            var start = Int(offsets.unsafe_offset(parts[3 * first]).unsafe_load())
            combine(
                yp.unsafe_offset(start * width),
                pp.unsafe_offset(first * heads * partial_width),
                last - first,
                heads,
                kv.dim,
            )
            first = last
        _ = blocks^
        _ = parts^
        _ = partials^


@always_inline
def _count(row_offsets: InputTensor[dtype=U32, rank=1, ...], sequence: Int) -> Int:
    """New tokens of a sequence."""
    var offsets = row_offsets.unsafe_ptr()
    return Int(
        offsets.unsafe_offset(sequence + 1).unsafe_load()
        - offsets.unsafe_offset(sequence).unsafe_load()
    )
