"""A layer's attention on the CPU: its norm, projections, cache and the residual in one kernel."""

import extensibility
from extensibility import InputTensor, OutputTensor, _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import List
from std.sys import num_physical_cores

from .attend_part import combine
from .cache import U32, cache_of
from .phases import counters, finish, take, wait
from .product import norm_phase, prepare_row, product_phase
from .rotate import rotate_and_store, sequence_of
from .tile import F32
from .units import Units, attend_phase, block_tokens


@extensibility.register("rolecall_attention_layer")
struct AttentionLayer:
    """Computes y = x + o(attention(qkv(n))), where n is the RMS norm of x[m, hidden].

    qkv has the outputs of queries, keys and values, whose heads are rotated whole, in two halves.
    numbers holds epsilon, the norm's offset and what scores are multiplied with; sizes the layer,
    and how many tokens back a token sees, itself included. Results but y are scratch: the rounded
    ones have no columns where products take none. The batch is held to its limits as in
    rolecall_attention.
    """

    @staticmethod
    def execute[
        qkv_dtype: DType,
        o_dtype: DType,
        qkv_bits: Int,
        qkv_offset: Int,
        qkv_has_minimum: Bool,
        qkv_rounds: Bool,
        o_bits: Int,
        o_offset: Int,
        o_has_minimum: Bool,
        o_rounds: Bool,
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        normed: OutputTensor[dtype=F32, rank=2, ...],
        normed_rounded: OutputTensor[dtype=DType.int32, rank=2, ...],
        projected: OutputTensor[dtype=F32, rank=2, ...],
        queries: OutputTensor[dtype=F32, rank=2, ...],
        attended: OutputTensor[dtype=F32, rank=2, ...],
        attended_rounded: OutputTensor[dtype=DType.int32, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        qkv: InputTensor[dtype=qkv_dtype, rank=2, ...],
        o: InputTensor[dtype=o_dtype, rank=2, ...],
        pages: MutableInputTensor[dtype=F32, rank=6, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        lookup_table: InputTensor[dtype=U32, rank=2, ...],
        cache_lengths: InputTensor[dtype=U32, rank=1, ...],
        max_prompt_length: InputTensor[dtype=U32, rank=1, ...],
        max_cache_length: InputTensor[dtype=U32, rank=1, ...],
        row_offsets: InputTensor[dtype=U32, rank=1, ...],
        table: InputTensor[dtype=F32, rank=2, ...],
        numbers: InputTensor[dtype=F32, rank=1, ...],
        sizes: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var rows = x.dim_size(0)
        if rows == 0:
            return
        var kv = cache_of(
            pages,
            Int(page_stride.unsafe_ptr().unsafe_load()),
            Int(sizes.unsafe_ptr().unsafe_load()),
        )
        var window = Int(sizes.unsafe_ptr().unsafe_offset(1).unsafe_load())
        var epsilon = numbers.unsafe_ptr().unsafe_load()
        var offset = numbers.unsafe_ptr().unsafe_offset(1).unsafe_load()
        var factor = numbers.unsafe_ptr().unsafe_offset(2).unsafe_load()
        var hidden = x.dim_size(1)
        var width = queries.dim_size(1)
        var qkv_width = projected.dim_size(1)
        var heads = width // kv.dim
        var threads = num_physical_cores()
        var yp = y.unsafe_ptr()
        var xp = x.unsafe_ptr()
        var wp = weight.unsafe_ptr()
        var np = normed.unsafe_ptr()
        var npr = normed_rounded.unsafe_ptr()
        var source = projected.unsafe_ptr()
        var qp = queries.unsafe_ptr()
        var ap = attended.unsafe_ptr()
        var apr = attended_rounded.unsafe_ptr()
        var first_weights = qkv.unsafe_ptr()
        var first_stride = qkv.dim_size(1)
        var second_weights = o.unsafe_ptr()
        var second_stride = o.dim_size(1)
        var kp = pages.unsafe_ptr()
        var tables = lookup_table.unsafe_ptr()
        var max_pages = lookup_table.dim_size(1)
        var sequences = cache_lengths.dim_size(0)
        var cached = cache_lengths.unsafe_ptr()
        var offsets = row_offsets.unsafe_ptr()
        var angles = table.unsafe_ptr()
        var units = Units(
            offsets,
            cached,
            sequences,
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
        var counts = counters(6)
        var shared = counts.unsafe_ptr()

        def work(thread: Int) {imm}:
            norm_phase[qkv_rounds](
                shared, 0, threads, xp, wp, np, npr, rows, hidden, epsilon, offset
            )
            product_phase[qkv_bits, qkv_offset, qkv_has_minimum, qkv_rounds](
                shared,
                1,
                threads,
                np,
                npr,
                first_weights,
                first_stride,
                source,
                hidden,
                rows,
                qkv_width,
                xp,
            )

            var span = take(shared, 2, rows, threads)
            while span.count() > 0:
                var sequence = 0
                for row in range(span.begin, span.end):
                    sequence = sequence_of(offsets, sequences, sequence, row)
                    rotate_and_store(
                        qp.unsafe_offset(row * width),
                        source.unsafe_offset(row * qkv_width),
                        width,
                        kp,
                        tables.unsafe_offset(sequence * max_pages),
                        kv,
                        Int(cached.unsafe_offset(sequence).unsafe_load())
                        + row
                        - Int(offsets.unsafe_offset(sequence).unsafe_load()),
                        angles,
                    )
                finish(shared, 2, span)
                span = take(shared, 2, rows, threads)
            wait(shared, 2, rows)

            attend_phase(
                shared,
                3,
                each,
                num_units,
                longest,
                ap,
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

            span = take(shared, 4, rows, threads)
            while span.count() > 0:
                for row in range(span.begin, span.end):
                    var own = parts.unsafe_offset(2 * row)
                    combine(
                        ap.unsafe_offset(row * width),
                        pp.unsafe_offset(own.unsafe_load() * part_size),
                        own.unsafe_offset(1).unsafe_load(),
                        heads,
                        kv.dim,
                    )
                    prepare_row[o_rounds](ap, width, apr, row)
                finish(shared, 4, span)
                span = take(shared, 4, rows, threads)
            wait(shared, 4, rows)

            product_phase[o_bits, o_offset, o_has_minimum, o_rounds, adds=True](
                shared,
                5,
                threads,
                ap,
                apr,
                second_weights,
                second_stride,
                yp,
                width,
                rows,
                hidden,
                xp,
            )

        sync_parallelize(work, threads)
        _ = units^
        _ = partials^
        _ = counts^
