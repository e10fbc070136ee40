"""Copies into and out of the buffers that simulated devices exchange tokens through."""

import extensibility
from extensibility import InputTensor, OutputTensor, _MutableInputTensor as MutableInputTensor
from max.gpu.host import DeviceContext

from .rows import copy_row
from .tile import F32

comptime I32 = DType.int32
comptime I64 = DType.int64


@extensibility.register("rolecall_dispatch")
struct Dispatch:
    """Sends a device's tokens to another: those that chose an expert it holds.

    Token i goes into row first_row + i of tokens. The same row of experts says which experts it is
    for, by their position among held (the first and how many), or -1.
    """

    @staticmethod
    def execute[
        target: StaticString,
    ](
        tokens: MutableInputTensor[dtype=F32, rank=2, ...],
        experts: MutableInputTensor[dtype=I32, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        chosen: InputTensor[dtype=I32, rank=2, ...],
        first_row: InputTensor[dtype=I64, rank=1, ...],
        held: InputTensor[dtype=I64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var rows = chosen.dim_size(0)
        var choices = chosen.dim_size(1)
        var width = x.dim_size(1)
        var first = Int(first_row.unsafe_ptr().unsafe_load())
        if first + rows > tokens.dim_size(0):
            raise Error(
                first + rows, " tokens do not fit the ", tokens.dim_size(0),
                " rows of the exchange's buffer",
            )
        for row in range(rows):
            var wanted = False
            for choice in range(choices):
                var position = _position(chosen, held, row * choices + choice)
                experts.unsafe_ptr().unsafe_offset((first + row) * choices + choice).unsafe_store(
                    Int32(position)
                )
                wanted = wanted or position >= 0
            if wanted:
                copy_row(
                    tokens.unsafe_ptr().unsafe_offset((first + row) * width),
                    x.unsafe_ptr().unsafe_offset(row * width),
                    width,
                )


@extensibility.register("rolecall_return")
struct Return:
    """Sends the results of held experts back to the device of the tokens that chose them.

    Choice j of token i is row i * choices + j of results; in values its token is first_row + i.
    """

    @staticmethod
    def execute[
        target: StaticString,
    ](
        results: MutableInputTensor[dtype=F32, rank=2, ...],
        values: InputTensor[dtype=F32, rank=2, ...],
        chosen: InputTensor[dtype=I32, rank=2, ...],
        first_row: InputTensor[dtype=I64, rank=1, ...],
        held: InputTensor[dtype=I64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var choices = chosen.dim_size(1)
        var count = chosen.dim_size(0) * choices
        var width = values.dim_size(1)
        var first = Int(first_row.unsafe_ptr().unsafe_load()) * choices
        if count > results.dim_size(0):
            raise Error(
                count, " results do not fit the ", results.dim_size(0),
                " rows of the exchange's buffer",
            )
        for choice in range(count):
            if _position(chosen, held, choice) >= 0:
                copy_row(
                    results.unsafe_ptr().unsafe_offset(choice * width),
                    values.unsafe_ptr().unsafe_offset((first + choice) * width),
                    width,
                )


@extensibility.register("rolecall_read_rows")
struct ReadRows:
    """Copies the first rows of buffer."""

    @staticmethod
    def execute[
        dtype: DType,
        target: StaticString,
    ](
        rows: OutputTensor[dtype=dtype, rank=2, ...],
        buffer: MutableInputTensor[dtype=dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        copy_row(rows.unsafe_ptr(), buffer.unsafe_ptr(), rows.dim_size(0) * rows.dim_size(1))


@always_inline
def _position(
    chosen: InputTensor[dtype=I32, rank=2, ...], held: InputTensor[dtype=I64, rank=1, ...], at: Int
) -> Int:
    """An expert's position among those held, or -1."""
    var position = (
        Int(chosen.unsafe_ptr().unsafe_offset(at).unsafe_load())
        - Int(held.unsafe_ptr().unsafe_load())
    )
    var count = Int(held.unsafe_ptr().unsafe_offset(1).unsafe_load())
    return position if position >= 0 and position < count else -1


@extensibility.register("rolecall_shares")
struct Shares:
    """Divides the rows of x into parts that differ by one row at most: edges has one more."""

    @staticmethod
    def execute[
        target: StaticString,
    ](
        edges: OutputTensor[dtype=I64, rank=1, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var parts = edges.dim_size(0) - 1
        for part in range(parts + 1):
            edges.unsafe_ptr().unsafe_offset(part).unsafe_store(
                Int64(part * x.dim_size(0) // parts)
            )
