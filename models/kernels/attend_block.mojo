"""Attention of a block of new tokens of a sequence, over its context in chunks."""

from std.collections import Array, List
from std.math import ceildiv, exp

from .cache import U32, Cache
from .panel import PANEL, panel_products
from .rows import add_row, copy_row, zero_row
from .scores import LOWEST, largest_of, weigh
from .tile import F32, WIDTH

# Keys of a chunk: with their values they stay in the first cache.
comptime CHUNK = 64


@always_inline
def _padded(dim: Int) -> Int:
    """A row's elements, so that products have whole panels."""
    return ceildiv(dim, PANEL) * PANEL


@no_inline
def attend_block(
    y: Pointer[mut=True, Scalar[F32], _],
    queries: Pointer[Scalar[F32], _],
    pages: Pointer[Scalar[F32], _],
    table: Pointer[Scalar[U32], _],
    kv: Cache,
    group: Int,
    tokens: Int,
    first: Int,
    window: Int,
    factor: Scalar[F32],
):
    """Attention of consecutive tokens, the first of which is at the position first."""
    var dim = kv.dim
    var padded = _padded(dim)
    var rows = tokens * group
    var width = kv.heads * group * dim
    var all_queries = List[Scalar[F32]](length=rows * dim, fill=0)
    var all_results = List[Scalar[F32]](length=rows * padded, fill=0)
    var all_scores = List[Scalar[F32]](length=rows * CHUNK, fill=0)
    var all_keys = List[Scalar[F32]](length=CHUNK * dim, fill=0)
    var all_values = List[Scalar[F32]](length=CHUNK * padded, fill=0)
    var largest = List[Scalar[F32]](length=rows, fill=0)
    var totals = List[Scalar[F32]](length=rows, fill=0)
    var q = all_queries.unsafe_ptr()
    var results = all_results.unsafe_ptr()
    var scores = all_scores.unsafe_ptr()
    var keys = all_keys.unsafe_ptr()
    var values = all_values.unsafe_ptr()
    for head in range(kv.heads):
        for token in range(tokens):
            copy_row(
                q.unsafe_offset(token * group * dim),
                queries.unsafe_offset(token * width + head * group * dim),
                group * dim,
            )
        zero_row(results, rows * padded)
        for row in range(rows):
            largest[row] = LOWEST
            totals[row] = 0
        var begin = max(0, first + 1 - window)
        var end = first + tokens
        for chunk in range(begin, end, CHUNK):
            var count = min(CHUNK, end - chunk)
            _gather_chunk(keys, values, pages, table, kv, head, chunk, count, padded)
            for at in range(0, ceildiv(count, PANEL) * PANEL, PANEL):
                panel_products(
                    q,
                    dim,
                    keys.unsafe_offset(at),
                    CHUNK,
                    dim,
                    scores.unsafe_offset(at),
                    CHUNK,
                    rows,
                    PANEL,
                )
            for row in range(rows):
                # The row's own keys of the chunk.
                var position = first + row // group
                var stop = min(count, position + 1 - chunk)
                var start = max(0, position + 1 - window - chunk)
                var own = scores.unsafe_offset(row * CHUNK)
                if stop <= start:
                    zero_row(own, count)
                    continue
                zero_row(own.unsafe_offset(stop), max(0, count - stop))
                var before = largest[row]
                var now = max(before, largest_of(own.unsafe_offset(start), stop - start))
                var kept = exp((before - now) * factor)
                var total = weigh(own.unsafe_offset(start), stop - start, now, factor)
                zero_row(own, start)
                largest[row] = now
                totals[row] = totals[row] * kept + total
                if before != now:
                    var result = results.unsafe_offset(row * padded)
                    for at in range(0, padded, WIDTH):
                        var here = result.unsafe_offset(at)
                        here.unsafe_store(here.unsafe_load[width=WIDTH]() * kept)
            for at in range(0, padded, PANEL):
                panel_products[True](
                    scores,
                    CHUNK,
                    values.unsafe_offset(at),
                    padded,
                    count,
                    results.unsafe_offset(at),
                    padded,
                    rows,
                    PANEL,
                )
        for row in range(rows):
            var token = row // group
            var out = y.unsafe_offset(token * width + (head * group + row % group) * dim)
            zero_row(out, dim)
            add_row(out, results.unsafe_offset(row * padded), 1 / totals[row], dim)
    _ = all_queries^
    _ = all_results^
    _ = all_scores^
    _ = all_keys^
    _ = all_values^


@always_inline
def _gather_chunk(
    keys: Pointer[mut=True, Scalar[F32], _],
    values: Pointer[mut=True, Scalar[F32], _],
    pages: Pointer[Scalar[F32], _],
    table: Pointer[Scalar[U32], _],
    kv: Cache,
    head: Int,
    begin: Int,
    count: Int,
    padded: Int,
):
    """A chunk's keys of a head as [dim, CHUNK], and its values as [count, padded]."""
    var dim = kv.dim
    var whole = dim - dim % WIDTH
    var at = Array[Int, 4](fill=0)
    for token in range(0, count, 4):
        comptime for i in range(4):
            # Behind the last its keys again, which no row sees.
            at[i] = kv.at(table, begin + min(token + i, count - 1)) + head * dim
        for column in range(0, whole, WIDTH):
            var a = pages.unsafe_offset(at[0] + column).unsafe_load[width=WIDTH]()
            var b = pages.unsafe_offset(at[1] + column).unsafe_load[width=WIDTH]()
            var c = pages.unsafe_offset(at[2] + column).unsafe_load[width=WIDTH]()
            var d = pages.unsafe_offset(at[3] + column).unsafe_load[width=WIDTH]()
            var four = a.interleave(c).interleave(b.interleave(d))
            comptime for i in range(WIDTH):
                keys.unsafe_offset((column + i) * CHUNK + token).unsafe_store(
                    four.slice[4, offset = 4 * i]()
                )
        for column in range(whole, dim):
            comptime for i in range(4):
                keys.unsafe_offset(column * CHUNK + token + i).unsafe_store(
                    pages.unsafe_offset(at[i] + column).unsafe_load()
                )
        comptime for i in range(4):
            if token + i < count:
                copy_row(
                    values.unsafe_offset((token + i) * padded),
                    pages.unsafe_offset(at[i] + kv.value_offset),
                    dim,
                )
