"""Copies and zeros of consecutive elements; the library of this Mojo has none for its pointers."""

from std.sys import simd_width_of


@always_inline
def copy_row[
    dtype: DType
](to: Pointer[mut=True, Scalar[dtype], _], source: Pointer[Scalar[dtype], _], count: Int):
    """Copies count elements."""
    comptime width = simd_width_of[dtype]()
    var whole = count - count % width
    for at in range(0, whole, width):
        to.unsafe_offset(at).unsafe_store(source.unsafe_offset(at).unsafe_load[width=width]())
    for at in range(whole, count):
        to.unsafe_offset(at).unsafe_store(source.unsafe_offset(at).unsafe_load())


@always_inline
def zero_row[dtype: DType](to: Pointer[mut=True, Scalar[dtype], _], count: Int):
    """Zeros count elements."""
    comptime width = simd_width_of[dtype]()
    var whole = count - count % width
    for at in range(0, whole, width):
        to.unsafe_offset(at).unsafe_store(SIMD[dtype, width](0))
    for at in range(whole, count):
        to.unsafe_offset(at).unsafe_store(Scalar[dtype](0))


@always_inline
def add_row[
    dtype: DType
](
    to: Pointer[mut=True, Scalar[dtype], _],
    source: Pointer[Scalar[dtype], _],
    factor: Scalar[dtype],
    count: Int,
):
    """Adds count elements, each times a factor."""
    comptime width = simd_width_of[dtype]()
    var whole = count - count % width
    for at in range(0, whole, width):
        var here = to.unsafe_offset(at)
        var sum = source.unsafe_offset(at).unsafe_load[width=width]().fma(
            SIMD[dtype, width](factor), here.unsafe_load[width=width]()
        )
        here.unsafe_store(sum)
    for at in range(whole, count):
        var here = to.unsafe_offset(at)
        here.unsafe_store(source.unsafe_offset(at).unsafe_load().fma(factor, here.unsafe_load()))
