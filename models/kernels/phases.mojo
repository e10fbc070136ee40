"""Parts of a kernel that its threads do one after the other, without ending in between.

Threads take spans of a phase's items as they come, and go on when all are done. One that begins late
finds less to do, and one that never begins is not waited for: only what was taken is. To end a
parallel region and begin another takes 6 us, to go on to the next phase a tenth of that.
"""

from std.atomic import Atomic
from std.collections import List
from std.math import ceildiv

# A counter has a line of the cache for itself.
comptime LINE = 8
# From so many rows on products take longer to compute than their weights to read.
comptime MANY_ROWS = 32


@fieldwise_init
struct Span(ImplicitlyCopyable, Movable):
    """Consecutive items of a phase."""

    var begin: Int
    var end: Int

    @always_inline
    def count(self) -> Int:
        """How many."""
        return self.end - self.begin


def counters(phases: Int) -> List[Int64]:
    """What the threads of a kernel count with: of each phase what was taken, and what is done."""
    return List[Int64](length=2 * phases * LINE, fill=0)


@always_inline
def product_spans(rows: Int, threads: Int) -> Int:
    """The spans that products' outputs are divided into.

    Where memory is read there are as many as threads: each then reads one long stream. Where rows
    are many there are more, so that a thread that is held up leaves some to the others.
    """
    return threads if rows < MANY_ROWS else 4 * threads


@always_inline
def take(counters: Pointer[mut=True, Int64, _], phase: Int, items: Int, spans: Int) -> Span:
    """The next of so many equal spans of a phase's items; an empty one when all were taken."""
    var turn = Int(Atomic[Int64].fetch_add(counters.unsafe_offset(2 * phase * LINE), Int64(1)))
    var share = ceildiv(items, spans)
    return Span(min(turn * share, items), min((turn + 1) * share, items))


@always_inline
def finish(counters: Pointer[mut=True, Int64, _], phase: Int, span: Span):
    """Says that items are done."""
    var at = counters.unsafe_offset((2 * phase + 1) * LINE)
    _ = Atomic[Int64].fetch_add(at, Int64(span.count()))


@always_inline
def wait(counters: Pointer[mut=True, Int64, _], phase: Int, items: Int):
    """Waits until all items of a phase are done."""
    var at = counters.unsafe_offset((2 * phase + 1) * LINE)
    while Int(Atomic[Int64].load(at)) < items:
        pass
