"""Rows of attention scores, and the weights that become of them."""

from std.math import exp
from std.utils.numerics import min_or_neg_inf

from .tile import F32, WIDTH

comptime LOWEST = min_or_neg_inf[F32]()


@always_inline
def largest_of(row: Pointer[Scalar[F32], _], count: Int) -> Scalar[F32]:
    var found = SIMD[F32, WIDTH](LOWEST)
    var whole = count - count % WIDTH
    for at in range(0, whole, WIDTH):
        found = max(found, row.unsafe_offset(at).unsafe_load[width=WIDTH]())
    var largest = found.reduce_max()
    for at in range(whole, count):
        largest = max(largest, row.unsafe_offset(at).unsafe_load())
    return largest


@always_inline
def weigh(
    row: Pointer[mut=True, Scalar[F32], _], count: Int, largest: Scalar[F32], factor: Scalar[F32]
) -> Scalar[F32]:
    """Makes weights of scores, exp((score - largest) * factor), and returns their sum."""
    var sums = SIMD[F32, WIDTH](0)
    var whole = count - count % WIDTH
    for at in range(0, whole, WIDTH):
        var here = row.unsafe_offset(at)
        var weights = exp((here.unsafe_load[width=WIDTH]() - largest) * factor)
        here.unsafe_store(weights)
        sums += weights
    var total = sums.reduce_add()
    for at in range(whole, count):
        var here = row.unsafe_offset(at)
        var weight = exp((here.unsafe_load() - largest) * factor)
        here.unsafe_store(weight)
        total += weight
    return total
