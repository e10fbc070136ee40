"""How the attention of a batch is divided: what threads take in turn."""

from std.collections import List
from std.math import ceildiv

from .attend_block import attend_block
from .attend_part import attend_part
from .cache import U32, Cache
from .phases import finish, take, wait
from .tile import F32

# Rows of a block of queries: a token has one for each query head of a key head.
comptime BLOCK_ROWS = 96
# A part of a context has at least so many tokens.
comptime LEAST_PART = 64
# A unit is its sequence, first new token and end, or first position and end, and which part it is;
# -1 where it is a block.
comptime UNIT = 4


struct Units(Movable):
    """A batch's blocks of several new tokens, and parts of the contexts of single ones."""

    var each: List[Int]
    """The units, UNIT numbers each."""

    var parts: List[Int]
    """Of each new token its first part and how many it has; none where it is in a block."""

    var num_parts: Int
    """Parts of all tokens."""

    var longest: Int
    """The most positions of a part."""

    def __init__(
        out self,
        row_offsets: Pointer[Scalar[U32], _],
        cache_lengths: Pointer[Scalar[U32], _],
        sequences: Int,
        most_new: Int,
        most: Int,
        block: Int,
        window: Int,
        threads: Int,
    ) raises:
        """Divides a batch whose sequences have so many new tokens, and tokens in all, at most."""
        self.each = List[Int]()
        self.parts = List[Int]()
        self.num_parts = 0
        self.longest = 0
        var singles = 0
        for sequence in range(sequences):
            if _count(row_offsets, sequence) == 1:
                singles += 1
        var parts_each = ceildiv(2 * threads, max(1, singles))
        for sequence in range(sequences):
            var count = _count(row_offsets, sequence)
            var cached = Int(cache_lengths.unsafe_offset(sequence).unsafe_load())
            if count > most_new or cached + count > most:
                raise Error(
                    t"sequence {sequence} has {count} new tokens behind {cached}, and the batch "
                    t"{most_new} and {most} in all at most"
                )
            if count == 1:
                var begin = max(0, cached + 1 - window)
                var share = max(LEAST_PART, ceildiv(cached + 1 - begin, parts_each))
                self.longest = max(self.longest, share)
                var first = self.num_parts
                for at in range(begin, cached + 1, share):
                    self.each.append(sequence)
                    self.each.append(at)
                    self.each.append(min(at + share, cached + 1))
                    self.each.append(self.num_parts)
                    self.num_parts += 1
                self.parts.append(first)
                self.parts.append(self.num_parts - first)
            else:
                for at in range(0, count, block):
                    self.each.append(sequence)
                    self.each.append(at)
                    self.each.append(min(at + block, count))
                    self.each.append(-1)
                for _ in range(2 * count):
                    self.parts.append(0)

    def count(self) -> Int:
        """How many units there are."""
        return len(self.each) // UNIT


@always_inline
def block_tokens(group: Int) -> Int:
    """Tokens of a block where a key head has a group of query heads."""
    return max(1, BLOCK_ROWS // group)


@always_inline
def attend_phase(
    counters: Pointer[mut=True, Int64, _],
    phase: Int,
    units: Pointer[Int, _],
    num_units: Int,
    longest: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    partials: Pointer[mut=True, Scalar[F32], _],
    queries: Pointer[Scalar[F32], _],
    width: Int,
    pages: Pointer[Scalar[F32], _],
    lookup_table: Pointer[Scalar[U32], _],
    max_pages: Int,
    row_offsets: Pointer[Scalar[U32], _],
    cache_lengths: Pointer[Scalar[U32], _],
    kv: Cache,
    window: Int,
    factor: Scalar[F32],
):
    """Computes all units: blocks' rows of y[tokens, width], and parts' of partials."""
    var scores = List[Scalar[F32]](length=width // kv.dim * longest, fill=0)
    var span = take(counters, phase, num_units, num_units)
    while span.count() > 0:
        _attend_unit(
            units.unsafe_offset(span.begin * UNIT),
            y,
            partials,
            queries,
            width,
            pages,
            lookup_table,
            max_pages,
            row_offsets,
            cache_lengths,
            kv,
            window,
            factor,
            scores.unsafe_ptr(),
        )
        finish(counters, phase, span)
        span = take(counters, phase, num_units, num_units)
    _ = scores^
    wait(counters, phase, num_units)


@always_inline
def _attend_unit(
    unit: Pointer[Int, _],
    y: Pointer[mut=True, Scalar[F32], _],
    partials: Pointer[mut=True, Scalar[F32], _],
    queries: Pointer[Scalar[F32], _],
    width: Int,
    pages: Pointer[Scalar[F32], _],
    lookup_table: Pointer[Scalar[U32], _],
    max_pages: Int,
    row_offsets: Pointer[Scalar[U32], _],
    cache_lengths: Pointer[Scalar[U32], _],
    kv: Cache,
    window: Int,
    factor: Scalar[F32],
    scores: Pointer[mut=True, Scalar[F32], _],
):
    """Computes a unit: a block's rows of y[tokens, width], or a part's of partials.

    scores has room for the longest part of every head.
    """
    var heads = width // kv.dim
    var group = heads // kv.heads
    var sequence = unit.unsafe_load()
    var begin = unit.unsafe_offset(1).unsafe_load()
    var end = unit.unsafe_offset(2).unsafe_load()
    var part = unit.unsafe_offset(3).unsafe_load()
    var table = lookup_table.unsafe_offset(sequence * max_pages)
    var start = Int(row_offsets.unsafe_offset(sequence).unsafe_load())
    if part >= 0:
        attend_part(
            partials.unsafe_offset(part * heads * (kv.dim + 2)),
            queries.unsafe_offset(start * width),
            pages,
            table,
            kv,
            group,
            begin,
            end,
            factor,
            scores,
        )
    else:
        start += begin
        attend_block(
            y.unsafe_offset(start * width),
            queries.unsafe_offset(start * width),
            pages,
            table,
            kv,
            group,
            end - begin,
            Int(cache_lengths.unsafe_offset(sequence).unsafe_load()) + begin,
            window,
            factor,
        )


@always_inline
def _count(row_offsets: Pointer[Scalar[U32], _], sequence: Int) -> Int:
    """New tokens of a sequence."""
    return Int(
        row_offsets.unsafe_offset(sequence + 1).unsafe_load()
        - row_offsets.unsafe_offset(sequence).unsafe_load()
    )
