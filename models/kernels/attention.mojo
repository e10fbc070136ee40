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
from std.sys import num_physical_cores

from .attend_part import combine
from .cache import U32, cache_of
from .phases import counters, take
from .tile import F32
from .units import Units, attend_phase, block_tokens


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
        var tokens = queries.dim_size(0)
        if tokens == 0:
            return
        var kv = cache_of(
            pages,
            Int(page_stride.unsafe_ptr().unsafe_load()),
            Int(sizes.unsafe_ptr().unsafe_load()),
        )
        var window = Int(sizes.unsafe_ptr().unsafe_offset(1).unsafe_load())
        var factor = scale.unsafe_ptr().unsafe_load()
        var width = queries.dim_size(1)
        var heads = width // kv.dim
        var threads = num_physical_cores()
        var yp = y.unsafe_ptr()
        var qp = queries.unsafe_ptr()
        var kp = pages.unsafe_ptr()
        var tables = lookup_table.unsafe_ptr()
        var max_pages = lookup_table.dim_size(1)
        var cached = cache_lengths.unsafe_ptr()
        var offsets = row_offsets.unsafe_ptr()
        var units = Units(
            offsets,
            cached,
            cache_lengths.dim_size(0),
            Int(max_prompt_length.unsafe_ptr().unsafe_load()),
            Int(max_cache_length.unsafe_ptr().unsafe_load()),
            block_tokens(heads // kv.heads),
            window,
            threads,
        )
        var num_units = units.count()
        var longest = units.longest
        var each = units.each.unsafe_ptr()
        var parts = units.parts.unsafe_ptr()
        # Per part and head: the largest score, the sum of weights, then the weighted values.
        var part_size = heads * (kv.dim + 2)
        var partials = List[Scalar[F32]](length=units.num_parts * part_size, fill=0)
        var pp = partials.unsafe_ptr()
        var counts = counters(2)
        var shared = counts.unsafe_ptr()

        def work(thread: Int) {imm}:
            attend_phase(
                shared,
                0,
                each,
                num_units,
                longest,
                yp,
                pp,
                qp,
                width,
                kp,
                tables,
                max_pages,
                offsets,
                cached,
                kv,
                window,
                factor,
            )
            var span = take(shared, 1, tokens, threads)
            while span.count() > 0:
                for token in range(span.begin, span.end):
                    var own = parts.unsafe_offset(2 * token)
                    combine(
                        yp.unsafe_offset(token * width),
                        pp.unsafe_offset(own.unsafe_load() * part_size),
                        own.unsafe_offset(1).unsafe_load(),
                        heads,
                        kv.dim,
                    )
                span = take(shared, 1, tokens, threads)

        sync_parallelize(work, threads)
        _ = units^
        _ = partials^
        _ = counts^
