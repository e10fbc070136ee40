"""Products of many rows with a panel: some weights' rows side by side, in float32."""

from std.collections import Array
from std.sys import simd_width_of

from .tile import F32, WIDTH, load_wide

# Outputs of a panel: two registers' worth.
comptime PANEL = 2 * WIDTH
# Rows of a tile, which with two registers of outputs each leave some for the operands: of 32 and 16.
comptime ROWS = 8 if WIDTH >= 16 else 6


@always_inline
def fill_panel[
    dtype: DType
](
    panel: Pointer[mut=True, Scalar[F32], _],
    w: Pointer[Scalar[dtype], _],
    k: Int,
    width: Int,
):
    """Transposes some rows of w, [width, k], into [k, PANEL]; further columns keep what they have.
    """
    var whole = k - k % WIDTH
    var row = 0
    while row + 4 <= width:
        for at in range(0, whole, WIDTH):
            var a = load_wide(w, row * k + at)
            var b = load_wide(w, (row + 1) * k + at)
            var c = load_wide(w, (row + 2) * k + at)
            var d = load_wide(w, (row + 3) * k + at)
            var four = a.interleave(c).interleave(b.interleave(d))
            comptime for i in range(WIDTH):
                panel.unsafe_offset((at + i) * PANEL + row).unsafe_store(
                    four.slice[4, offset = 4 * i]()
                )
        row += 4
    for column in range(width):
        var begin = whole if column < row else 0
        for at in range(begin, k):
            panel.unsafe_offset(at * PANEL + column).unsafe_store(
                w.unsafe_offset(column * k + at).unsafe_load().cast[F32]()
            )


@always_inline
def panel_products[
    accumulates: Bool = False
](
    x: Pointer[Scalar[F32], _],
    x_stride: Int,
    panel: Pointer[Scalar[F32], _],
    panel_stride: Int,
    k: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    rows: Int,
    width: Int,
):
    """Writes y[rows, width] = x[rows, k] times panel[k, width], or adds that to y.

    A panel's rows have PANEL elements or more.
    """
    var row = 0
    comptime for most in [ROWS, 2, 1]:
        while row + most <= rows:
            _tile[most, accumulates](
                x.unsafe_offset(row * x_stride),
                x_stride,
                panel,
                panel_stride,
                k,
                y.unsafe_offset(row * y_stride),
                y_stride,
                width,
            )
            row += most


@always_inline
def _tile[
    rows: Int, accumulates: Bool
](
    x: Pointer[Scalar[F32], _],
    x_stride: Int,
    panel: Pointer[Scalar[F32], _],
    panel_stride: Int,
    k: Int,
    y: Pointer[mut=True, Scalar[F32], _],
    y_stride: Int,
    width: Int,
):
    var sums = Array[SIMD[F32, WIDTH], 2 * rows](fill=0)
    for at in range(k):
        var weights = panel.unsafe_offset(at * panel_stride)
        var first = weights.unsafe_load[width=WIDTH]()
        var second = weights.unsafe_offset(WIDTH).unsafe_load[width=WIDTH]()
        comptime for r in range(rows):
            var value = SIMD[F32, WIDTH](x.unsafe_offset(r * x_stride + at).unsafe_load())
            sums[2 * r] = value.fma(first, sums[2 * r])
            sums[2 * r + 1] = value.fma(second, sums[2 * r + 1])
    comptime for r in range(rows):
        var out = y.unsafe_offset(r * y_stride)
        if width == PANEL:
            comptime if accumulates:
                sums[2 * r] += out.unsafe_load[width=WIDTH]()
                sums[2 * r + 1] += out.unsafe_offset(WIDTH).unsafe_load[width=WIDTH]()
            out.unsafe_store(sums[2 * r])
            out.unsafe_offset(WIDTH).unsafe_store(sums[2 * r + 1])
        else:
            for column in range(width):
                var part = sums[2 * r] if column < WIDTH else sums[2 * r + 1]
                var value = part[column % WIDTH]
                comptime if accumulates:
                    value += out.unsafe_offset(column).unsafe_load()
                out.unsafe_offset(column).unsafe_store(value)
