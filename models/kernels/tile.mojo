"""Products of a few rows, and sums of rows: what our matrix products and attention are made of."""

from std.collections import Array
from std.sys import simd_width_of

comptime F32 = DType.float32
comptime WIDTH = simd_width_of[F32]()
# A tile of 4 by 4 outputs: 16 accumulators, and 8 loads for 16 multiply-adds.
comptime TILE = 4
# Below this many multiply-adds a second thread costs more than it brings.
comptime PARALLEL_FROM = 1 << 17


@always_inline
def load_wide[dtype: DType, //](row: Pointer[Scalar[dtype], _], at: Int) -> SIMD[F32, WIDTH]:
    """A register of consecutive elements, in float32."""
    return row.unsafe_offset(at).unsafe_load[width=WIDTH]().cast[F32]()


@always_inline
def tile[
    dtype: DType, //, rows: Int, columns: Int
](
    x: Pointer[Scalar[F32], _],
    x_at: Array[Int, rows],
    w: Pointer[Scalar[dtype], _],
    w_stride: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_at: Array[Int, rows],
    k: Int,
):
    """Writes rows of y, at offsets of their own: rows of x, likewise, times consecutive rows of w.

    Each sum goes over k elements; w's rows are w_stride apart.
    """
    var sums = Array[SIMD[F32, WIDTH], rows * columns](fill=0)
    var whole = k - k % WIDTH
    for at in range(0, whole, WIDTH):
        var weights = Array[SIMD[F32, WIDTH], columns](fill=0)
        comptime for c in range(columns):
            weights[c] = load_wide(w, c * w_stride + at)
        comptime for r in range(rows):
            var values = x.unsafe_offset(x_at[r] + at).unsafe_load[width=WIDTH]()
            comptime for c in range(columns):
                sums[r * columns + c] = values.fma(weights[c], sums[r * columns + c])
    comptime for r in range(rows):
        var totals = SIMD[F32, columns](0)
        comptime if columns == 4:
            # The sums of four registers at once take a third of the shuffles of one by one.
            comptime at = r * columns
            var evens = sums[at].interleave(sums[at + 2])
            var odds = sums[at + 1].interleave(sums[at + 3])
            totals = evens.interleave(odds).reduce_add[columns]()
        else:
            comptime for c in range(columns):
                totals[c] = sums[r * columns + c].reduce_add()
        if whole < k:
            comptime for c in range(columns):
                for at in range(whole, k):
                    totals[c] += (
                        x.unsafe_offset(x_at[r] + at).unsafe_load()
                        * w.unsafe_offset(c * w_stride + at).unsafe_load().cast[F32]()
                    )
        y.unsafe_offset(y_at[r]).unsafe_store(totals)


@always_inline
def products[
    dtype: DType, //
](
    x: Pointer[Scalar[F32], _],
    x_at: Pointer[Int, _],
    w: Pointer[Scalar[dtype], _],
    w_stride: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_at: Pointer[Int, _],
    k: Int,
    rows: Int,
    columns: Int,
):
    """The same of any number of rows and columns, in tiles."""
    var column = 0
    while column < columns:
        var weights = w.unsafe_offset(column * w_stride)
        var out = y.unsafe_offset(column)
        var row = 0
        if column + TILE <= columns:
            comptime for most in [TILE, 3, 2, 1]:
                while row + most <= rows:
                    tile[most, TILE](
                        x,
                        _take[most](x_at, row),
                        weights,
                        w_stride,
                        out,
                        _take[most](y_at, row),
                        k,
                    )
                    row += most
            column += TILE
        else:
            while row < rows:
                tile[1, 1](
                    x, _take[1](x_at, row), weights, w_stride, out, _take[1](y_at, row), k
                )
                row += 1
            column += 1


@always_inline
def row_products[
    dtype: DType, //
](
    x: Pointer[Scalar[F32], _],
    w: Pointer[Scalar[dtype], _],
    w_stride: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    k: Int,
    columns: Int,
):
    """The same of one row."""
    var at = Array[Int, 1](fill=0)
    var column = 0
    while column + TILE <= columns:
        tile[1, TILE](
            x, at, w.unsafe_offset(column * w_stride), w_stride, y.unsafe_offset(column), at, k
        )
        column += TILE
    while column < columns:
        tile[1, 1](
            x, at, w.unsafe_offset(column * w_stride), w_stride, y.unsafe_offset(column), at, k
        )
        column += 1


@always_inline
def weighted_rows(
    y: Pointer[mut=True, Scalar[F32], _],
    weights: Pointer[Scalar[F32], _],
    rows: Pointer[Scalar[F32], _],
    stride: Int,
    width: Int,
    count: Int,
    factor: Scalar[F32],
):
    """Writes factor times the sum of count rows of some width, each times its weight."""
    comptime BLOCK = 4 * WIDTH
    var column = 0
    while column + BLOCK <= width:
        var sums = Array[SIMD[F32, WIDTH], 4](fill=0)
        for row in range(count):
            var weight = SIMD[F32, WIDTH](weights.unsafe_offset(row).unsafe_load())
            var at = rows.unsafe_offset(row * stride + column)
            comptime for part in range(4):
                sums[part] = at.unsafe_offset(part * WIDTH).unsafe_load[width=WIDTH]().fma(
                    weight, sums[part]
                )
        comptime for part in range(4):
            y.unsafe_offset(column + part * WIDTH).unsafe_store(sums[part] * factor)
        column += BLOCK
    while column < width:
        var sum = Scalar[F32](0)
        for row in range(count):
            sum += (
                weights.unsafe_offset(row).unsafe_load()
                * rows.unsafe_offset(row * stride + column).unsafe_load()
            )
        y.unsafe_offset(column).unsafe_store(sum * factor)
        column += 1


@always_inline
def _take[count: Int](offsets: Pointer[Int, _], first: Int) -> Array[Int, count]:
    var taken = Array[Int, count](fill=0)
    comptime for i in range(count):
        taken[i] = offsets.unsafe_offset(first + i).unsafe_load()
    return taken^
