"""Rotates queries and keys, and stores keys and values in the paged cache, on the CPU."""

import extensibility
from extensibility import InputTensor, OutputTensor, _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import num_physical_cores

from .cache import U32, Cache, cache_of
from .rows import copy_row
from .tile import F32, WIDTH

# Fewer tokens are done in less time than a thread takes to begin.
comptime PARALLEL_FROM = 32


@extensibility.register("rolecall_rotate_and_store")
struct RotateAndStore:
    """Splits qkv[tokens, heads * dim]: queries are rotated into y, keys into the cache.

    The two halves of a head are rotated together, by table[position, dim] of (cos, sin) pairs;
    values are stored as they are. layer holds the layer's position in the cache.
    """

    @staticmethod
    def execute[
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        qkv: InputTensor[dtype=F32, rank=2, ...],
        pages: MutableInputTensor[dtype=F32, rank=6, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        lookup_table: InputTensor[dtype=U32, rank=2, ...],
        cache_lengths: InputTensor[dtype=U32, rank=1, ...],
        row_offsets: InputTensor[dtype=U32, rank=1, ...],
        table: InputTensor[dtype=F32, rank=2, ...],
        layer: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var tokens = qkv.dim_size(0)
        if tokens == 0:
            return
        var kv = cache_of(
            pages,
            Int(page_stride.unsafe_ptr().unsafe_load()),
            Int(layer.unsafe_ptr().unsafe_load()),
        )
        var width = qkv.dim_size(1)
        var query_width = y.dim_size(1)
        var threads = 1 if tokens < PARALLEL_FROM else num_physical_cores()
        var yp = y.unsafe_ptr()
        var source = qkv.unsafe_ptr()
        var kp = pages.unsafe_ptr()
        var tables = lookup_table.unsafe_ptr()
        var max_pages = lookup_table.dim_size(1)
        var lengths = cache_lengths.unsafe_ptr()
        var offsets = row_offsets.unsafe_ptr()
        var angles = table.unsafe_ptr()
        var sequences = cache_lengths.dim_size(0)

        def work(thread: Int) {imm}:
            var share = ceildiv(tokens, threads)
            var sequence = 0
            for token in range(thread * share, min(tokens, (thread + 1) * share)):
                sequence = sequence_of(offsets, sequences, sequence, token)
                rotate_and_store(
                    yp.unsafe_offset(token * query_width),
                    source.unsafe_offset(token * width),
                    query_width,
                    kp,
                    tables.unsafe_offset(sequence * max_pages),
                    kv,
                    Int(lengths.unsafe_offset(sequence).unsafe_load())
                    + token
                    - Int(offsets.unsafe_offset(sequence).unsafe_load()),
                    angles,
                )

        sync_parallelize(work, threads)


@always_inline
def sequence_of(
    row_offsets: Pointer[Scalar[U32], _], sequences: Int, least: Int, token: Int
) -> Int:
    """The sequence of a token, which is not before the sequence least."""
    var sequence = least
    while (
        sequence + 1 < sequences
        and Int(row_offsets.unsafe_offset(sequence + 1).unsafe_load()) <= token
    ):
        sequence += 1
    return sequence


@no_inline
def rotate_and_store(
    y: Pointer[mut=True, Scalar[F32], _],
    qkv: Pointer[Scalar[F32], _],
    query_width: Int,
    pages: Pointer[mut=True, Scalar[F32], _],
    table: Pointer[Scalar[U32], _],
    kv: Cache,
    position: Int,
    angles: Pointer[Scalar[F32], _],
):
    """Rotates a token's queries into y, and puts its keys and values where the position is."""
    var pairs = angles.unsafe_offset(position * kv.dim)
    var keys = pages.unsafe_offset(kv.at(table, position))
    for at in range(0, query_width, kv.dim):
        _rotate(y.unsafe_offset(at), qkv.unsafe_offset(at), pairs, kv.dim)
    for at in range(0, kv.stride(), kv.dim):
        _rotate(keys.unsafe_offset(at), qkv.unsafe_offset(query_width + at), pairs, kv.dim)
    copy_row(
        keys.unsafe_offset(kv.value_offset),
        qkv.unsafe_offset(query_width + kv.stride()),
        kv.stride(),
    )


@always_inline
def _rotate(
    result: Pointer[mut=True, Scalar[F32], _],
    head: Pointer[Scalar[F32], _],
    pairs: Pointer[Scalar[F32], _],
    dim: Int,
):
    """Rotates a head's two halves by pairs of (cos, sin)."""
    var half = dim // 2
    var whole = half - half % WIDTH
    for at in range(0, whole, WIDTH):
        var both = pairs.unsafe_offset(2 * at).unsafe_load[width=2 * WIDTH]().deinterleave()
        var first = head.unsafe_offset(at).unsafe_load[width=WIDTH]()
        var second = head.unsafe_offset(half + at).unsafe_load[width=WIDTH]()
        var cosines = rebind[SIMD[F32, WIDTH]](both[0])
        var sines = rebind[SIMD[F32, WIDTH]](both[1])
        result.unsafe_offset(at).unsafe_store(first * cosines - second * sines)
        result.unsafe_offset(half + at).unsafe_store(second * cosines + first * sines)
    for at in range(whole, half):
        var cosine = pairs.unsafe_offset(2 * at).unsafe_load()
        var sine = pairs.unsafe_offset(2 * at + 1).unsafe_load()
        var first = head.unsafe_offset(at).unsafe_load()
        var second = head.unsafe_offset(half + at).unsafe_load()
        result.unsafe_offset(at).unsafe_store(first * cosine - second * sine)
        result.unsafe_offset(half + at).unsafe_store(second * cosine + first * sine)
