"""One new token's attention to parts of its context, and how these are put together."""

from std.collections import Array, List
from std.math import exp

from .cache import U32, Cache
from .rows import add_row, zero_row
from .scores import LOWEST, largest_of, weigh
from .tile import F32, WIDTH, products

# Tokens of a context that all heads attend to before the next.
comptime SPAN = 16


@always_inline
def _span(kv: Cache, position: Int, end: Int) -> Int:
    """Tokens from a position on that lie one behind the other."""
    return min(min(SPAN, end - position), kv.page_size - position % kv.page_size)


@always_inline
def _pull(source: Pointer[Scalar[F32], _], count: Int):
    """Reads elements one after the other, which the processor fetches ahead.

    Heads are then read from its cache, at a stride that it does not foresee. To prefetch them by
    instruction takes as long as the memory does, and half as long again.
    """
    for at in range(0, count - WIDTH + 1, WIDTH):
        _ = source.unsafe_offset(at).unsafe_load[width=WIDTH, volatile=True]()


@no_inline
def attend_part(
    partial: Pointer[mut=True, Scalar[F32], _],
    query: Pointer[Scalar[F32], _],
    pages: Pointer[Scalar[F32], _],
    table: Pointer[Scalar[U32], _],
    kv: Cache,
    group: Int,
    begin: Int,
    end: Int,
    factor: Scalar[F32],
    scores: Pointer[mut=True, Scalar[F32], _],
):
    """One token's attention to positions begin to end: per head what combine takes."""
    var heads = kv.heads * group
    var count = end - begin
    var query_at = List[Int](length=heads, fill=0)
    var score_at = List[Int](length=heads, fill=0)
    for head in range(heads):
        query_at[head] = head * kv.dim
        score_at[head] = head * count
    var position = begin
    while position < end:
        var here = _span(kv, position, end)
        var keys = pages.unsafe_offset(kv.at(table, position))
        _pull(keys, here * kv.stride())
        for head in range(kv.heads):
            products(
                query,
                query_at.unsafe_ptr().unsafe_offset(head * group),
                keys.unsafe_offset(head * kv.dim),
                kv.stride(),
                scores.unsafe_offset(position - begin),
                score_at.unsafe_ptr().unsafe_offset(head * group),
                kv.dim,
                group,
                here,
            )
        position += here
    for head in range(heads):
        var own = partial.unsafe_offset(head * (kv.dim + 2))
        var row = scores.unsafe_offset(head * count)
        var largest = largest_of(row, count)
        own.unsafe_store(largest * factor)
        own.unsafe_offset(1).unsafe_store(weigh(row, count, largest, factor))
        zero_row(own.unsafe_offset(2), kv.dim)
    position = begin
    while position < end:
        var here = _span(kv, position, end)
        var values = pages.unsafe_offset(kv.at(table, position) + kv.value_offset)
        _pull(values, here * kv.stride())
        for head in range(kv.heads):
            var row = 0
            comptime for most in [3, 2, 1]:
                while row + most <= group:
                    var own = head * group + row
                    _add_values[most](
                        partial.unsafe_offset(own * (kv.dim + 2) + 2),
                        scores.unsafe_offset(own * count + position - begin),
                        count,
                        values.unsafe_offset(head * kv.dim),
                        kv,
                        here,
                    )
                    row += most
        position += here
    _ = query_at^
    _ = score_at^


@always_inline
def _add_values[
    rows: Int
](
    results: Pointer[mut=True, Scalar[F32], _],
    weights: Pointer[Scalar[F32], _],
    weight_stride: Int,
    values: Pointer[Scalar[F32], _],
    kv: Cache,
    count: Int,
):
    """Adds count tokens' values of a key head, each times its weight, to some query heads'."""
    comptime PARTS = 4
    var column = 0
    while column + PARTS * WIDTH <= kv.dim:
        var sums = Array[SIMD[F32, WIDTH], rows * PARTS](fill=0)
        for token in range(count):
            var source = values.unsafe_offset(token * kv.stride() + column)
            var parts = Array[SIMD[F32, WIDTH], PARTS](fill=0)
            comptime for part in range(PARTS):
                parts[part] = source.unsafe_offset(part * WIDTH).unsafe_load[width=WIDTH]()
            comptime for r in range(rows):
                var weight = SIMD[F32, WIDTH](
                    weights.unsafe_offset(r * weight_stride + token).unsafe_load()
                )
                comptime for part in range(PARTS):
                    sums[r * PARTS + part] = weight.fma(parts[part], sums[r * PARTS + part])
        comptime for r in range(rows):
            comptime for part in range(PARTS):
                var at = results.unsafe_offset(r * (kv.dim + 2) + column + part * WIDTH)
                at.unsafe_store(at.unsafe_load[width=WIDTH]() + sums[r * PARTS + part])
        column += PARTS * WIDTH
    while column < kv.dim:
        comptime for r in range(rows):
            var sum = Scalar[F32](0)
            for token in range(count):
                sum += (
                    weights.unsafe_offset(r * weight_stride + token).unsafe_load()
                    * values.unsafe_offset(token * kv.stride() + column).unsafe_load()
                )
            var at = results.unsafe_offset(r * (kv.dim + 2) + column)
            at.unsafe_store(at.unsafe_load() + sum)
        column += 1


@no_inline
def combine(
    y: Pointer[mut=True, Scalar[F32], _],
    partial: Pointer[mut=True, Scalar[F32], _],
    parts: Int,
    heads: Int,
    dim: Int,
):
    """Puts the parts of one token's attention together; where it has none, y stays as it is."""
    if parts == 0:
        return
    var width = dim + 2
    for head in range(heads):
        var largest = LOWEST
        for part in range(parts):
            var own = partial.unsafe_offset((part * heads + head) * width)
            largest = max(largest, own.unsafe_load())
        var total = Scalar[F32](0)
        for part in range(parts):
            var own = partial.unsafe_offset((part * heads + head) * width)
            var weight = exp(own.unsafe_load() - largest)
            own.unsafe_store(weight)
            total += weight * own.unsafe_offset(1).unsafe_load()
        var out = y.unsafe_offset(head * dim)
        zero_row(out, dim)
        for part in range(parts):
            var own = partial.unsafe_offset((part * heads + head) * width)
            add_row(out, own.unsafe_offset(2), own.unsafe_load() / total, dim)
