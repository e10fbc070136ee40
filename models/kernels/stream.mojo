"""Products of a few rows, which take as long as reading the weights does."""

from std.collections import Array

from .tile import F32, WIDTH, load_wide

# Sums of one row that do not wait for each other.
comptime CHAINS = 4


@always_inline
def stream_products[
    dtype: DType, //
](
    x: Pointer[Scalar[F32], _],
    w: Pointer[Scalar[dtype], _],
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    k: Int,
    rows: Int,
    columns: Int,
):
    """Writes y[rows, columns] = x[rows, k] times the transpose of w[columns, k].

    It reads w from its beginning to its end: one stream is fetched ahead at a higher rate than the
    four of a tile.
    """
    for column in range(columns):
        for row in range(rows):
            y.unsafe_offset(row * y_stride + column).unsafe_store(
                _dot(x.unsafe_offset(row * k), w.unsafe_offset(column * k), k)
            )


@always_inline
def _dot[
    dtype: DType, //
](x: Pointer[Scalar[F32], _], w: Pointer[Scalar[dtype], _], k: Int) -> Scalar[F32]:
    var sums = Array[SIMD[F32, WIDTH], CHAINS](fill=0)
    var at = 0
    while at + CHAINS * WIDTH <= k:
        comptime for chain in range(CHAINS):
            sums[chain] = load_wide(x, at + chain * WIDTH).fma(
                load_wide(w, at + chain * WIDTH), sums[chain]
            )
        at += CHAINS * WIDTH
    while at + WIDTH <= k:
        sums[0] = load_wide(x, at).fma(load_wide(w, at), sums[0])
        at += WIDTH
    comptime for chain in range(1, CHAINS):
        sums[0] += sums[chain]
    var total = sums[0].reduce_add()
    for last in range(at, k):
        total += (
            x.unsafe_offset(last).unsafe_load()
            * w.unsafe_offset(last).unsafe_load().cast[F32]()
        )
    return total
