"""A layer's feed-forward on the CPU: its norm, both products and the residual in one kernel."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.math import exp
from std.sys import num_physical_cores

from .phases import counters, finish, product_spans, take, wait
from .product import GROUP, norm_phase, product, product_phase, round_phase
from .quantized import BLOCK_ROWS
from .tile import F32, PARALLEL_FROM, WIDTH


@extensibility.register("rolecall_feed_forward")
struct FeedForward:
    """Computes y = x + down(silu(gate(n)) * up(n)), where n is the RMS norm of x[m, hidden].

    gate_up has the outputs of both, [2 * inner, hidden], or what they are packed to; inner is a
    multiple of GROUP. numbers holds epsilon and the norm's offset. Results but y are scratch: the
    rounded ones have no columns where products take none.
    """

    @staticmethod
    def execute[
        gate_up_dtype: DType,
        down_dtype: DType,
        gate_up_bits: Int,
        gate_up_offset: Int,
        gate_up_has_minimum: Bool,
        gate_up_rounds: Bool,
        down_bits: Int,
        down_offset: Int,
        down_has_minimum: Bool,
        down_rounds: Bool,
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        normed: OutputTensor[dtype=F32, rank=2, ...],
        normed_rounded: OutputTensor[dtype=DType.int32, rank=2, ...],
        gate: OutputTensor[dtype=F32, rank=2, ...],
        up: OutputTensor[dtype=F32, rank=2, ...],
        gate_rounded: OutputTensor[dtype=DType.int32, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        gate_up: InputTensor[dtype=gate_up_dtype, rank=2, ...],
        down: InputTensor[dtype=down_dtype, rank=2, ...],
        numbers: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var rows = x.dim_size(0)
        if rows == 0:
            return
        var hidden = x.dim_size(1)
        var inner = gate.dim_size(1)
        var threads = 1 if rows * hidden * inner < PARALLEL_FROM else num_physical_cores()
        var epsilon = numbers.unsafe_ptr().unsafe_load()
        var offset = numbers.unsafe_ptr().unsafe_offset(1).unsafe_load()
        var yp = y.unsafe_ptr()
        var xp = x.unsafe_ptr()
        var wp = weight.unsafe_ptr()
        var np = normed.unsafe_ptr()
        var npr = normed_rounded.unsafe_ptr()
        var gp = gate.unsafe_ptr()
        var gpr = gate_rounded.unsafe_ptr()
        var up_values = up.unsafe_ptr()
        var first_weights = gate_up.unsafe_ptr()
        var first_stride = gate_up.dim_size(1)
        var second_weights = down.unsafe_ptr()
        var second_stride = down.dim_size(1)
        var inner_groups = inner // GROUP
        var spans = product_spans(rows, threads)
        var counts = counters(4)
        var shared = counts.unsafe_ptr()

        def work(thread: Int) {imm}:
            norm_phase[gate_up_rounds](
                shared, 0, threads, xp, wp, np, npr, rows, hidden, epsilon, offset
            )

            var span = take(shared, 1, inner_groups, spans)
            while span.count() > 0:
                var begin = span.begin * GROUP
                var columns = span.count() * GROUP
                # Widened weights are for all rows; otherwise what is gated is still in the cache.
                var step = BLOCK_ROWS if gate_up_rounds else rows
                for first in range(0, rows, step):
                    var count = min(step, rows - first)
                    var x_at = np.unsafe_offset(first * hidden)
                    var rounded = npr.unsafe_offset(first * normed_rounded.dim_size(1))
                    var at = first * inner + begin
                    product[gate_up_bits, gate_up_offset, gate_up_has_minimum, gate_up_rounds](
                        x_at,
                        rounded,
                        first_weights,
                        first_stride,
                        gp.unsafe_offset(at),
                        inner,
                        hidden,
                        count,
                        begin,
                        columns,
                    )
                    product[gate_up_bits, gate_up_offset, gate_up_has_minimum, gate_up_rounds](
                        x_at,
                        rounded,
                        first_weights,
                        first_stride,
                        up_values.unsafe_offset(at),
                        inner,
                        hidden,
                        count,
                        inner + begin,
                        columns,
                    )
                    for row in range(count):
                        var here = at + row * inner
                        _gate(gp.unsafe_offset(here), up_values.unsafe_offset(here), columns)
                finish(shared, 1, span)
                span = take(shared, 1, inner_groups, spans)
            wait(shared, 1, inner_groups)

            round_phase[down_rounds](shared, 2, threads, gp, gpr, rows, inner)
            product_phase[down_bits, down_offset, down_has_minimum, down_rounds, adds=True](
                shared,
                3,
                threads,
                gp,
                gpr,
                second_weights,
                second_stride,
                yp,
                inner,
                rows,
                hidden,
                xp,
            )

        sync_parallelize(work, threads)
        _ = counts^


@always_inline
def _gate(gate: Pointer[mut=True, Scalar[F32], _], up: Pointer[Scalar[F32], _], count: Int):
    """Writes silu(gate) * up over gate; count is a multiple of a register's width."""
    for at in range(0, count, WIDTH):
        var here = gate.unsafe_offset(at)
        var values = here.unsafe_load[width=WIDTH]()
        var others = up.unsafe_offset(at).unsafe_load[width=WIDTH]()
        here.unsafe_store(values / (1 + exp(-values)) * others)
