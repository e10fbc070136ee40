"""The gated delta rule on the CPU, for which MAX 26.7 has no kernel."""

import extensibility
from extensibility import InputTensor, OutputTensor, _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.collections import List
from std.math import ceildiv, exp, rsqrt
from std.sys import num_physical_cores

from .rows import zero_row
from .tile import F32, WIDTH

comptime U32 = DType.uint32
# What is added to the squares of a key or query before the root.
comptime EPS = Scalar[F32](1e-6)


@extensibility.register("rolecall_gated_delta")
struct GatedDelta:
    """Updates each head's memory token by token, and reads it with the token's query.

    A head's memory is a matrix of pool[slots, heads, key, value]. For each token it is multiplied
    with exp(decay), then what it says of the token's key is brought nearer to the value by beta,
    and the result is what it says of the query. qkv[tokens, 2 * key_heads * key + heads * value]
    has queries, keys and values side by side; both decay and beta are [tokens, heads].
    """

    @staticmethod
    def execute[
        target: StaticString,
    ](
        y: OutputTensor[dtype=F32, rank=2, ...],
        pool: MutableInputTensor[dtype=F32, rank=4, ...],
        qkv: InputTensor[dtype=F32, rank=2, ...],
        decay: InputTensor[dtype=F32, rank=2, ...],
        beta: InputTensor[dtype=F32, rank=2, ...],
        row_offsets: InputTensor[dtype=U32, rank=1, ...],
        slots: InputTensor[dtype=U32, rank=1, ...],
        started: InputTensor[dtype=DType.bool, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var heads = pool.dim_size(1)
        var key = pool.dim_size(2)
        var value = pool.dim_size(3)
        var stride = qkv.dim_size(1)
        var key_heads = (stride - heads * value) // (2 * key)
        var count = slots.dim_size(0) * heads
        if count == 0:
            return
        var threads = num_physical_cores()
        var share = ceildiv(count, threads)
        var yp = y.unsafe_ptr()
        var memories = pool.unsafe_ptr()
        var source = qkv.unsafe_ptr()
        var decays = decay.unsafe_ptr()
        var betas = beta.unsafe_ptr()
        var offsets = row_offsets.unsafe_ptr()
        var slots_at = slots.unsafe_ptr()
        var started_at = started.unsafe_ptr()

        def work(thread: Int) {imm}:
            var delta = List[Scalar[F32]](length=value, fill=0)
            for item in range(thread * share, min(count, (thread + 1) * share)):
                var sequence = item // heads
                var head = item % heads
                var slot = Int(slots_at.unsafe_offset(sequence).unsafe_load())
                var memory = memories.unsafe_offset((slot * heads + head) * key * value)
                if not started_at.unsafe_offset(sequence).unsafe_load():
                    zero_row(memory, key * value)
                var query_at = head * key_heads // heads * key
                var first = Int(offsets.unsafe_offset(sequence).unsafe_load())
                var stop = Int(offsets.unsafe_offset(sequence + 1).unsafe_load())
                for token in range(first, stop):
                    var own = source.unsafe_offset(token * stride)
                    var gate = token * heads + head
                    _step(
                        yp.unsafe_offset(gate * value),
                        memory,
                        delta.unsafe_ptr(),
                        own.unsafe_offset(query_at),
                        own.unsafe_offset(key_heads * key + query_at),
                        own.unsafe_offset(2 * key_heads * key + head * value),
                        exp(decays.unsafe_offset(gate).unsafe_load()),
                        betas.unsafe_offset(gate).unsafe_load(),
                        key,
                        value,
                    )

        sync_parallelize(work, threads)


@always_inline
def _step(
    y: Pointer[mut=True, Scalar[F32], _],
    memory: Pointer[mut=True, Scalar[F32], _],
    delta: Pointer[mut=True, Scalar[F32], _],
    query: Pointer[Scalar[F32], _],
    keys: Pointer[Scalar[F32], _],
    values: Pointer[Scalar[F32], _],
    kept: Scalar[F32],
    beta: Scalar[F32],
    key: Int,
    value: Int,
):
    """One token of one head."""
    var query_squares = Scalar[F32](0)
    var key_squares = Scalar[F32](0)
    for i in range(key):
        var q = query.unsafe_offset(i).unsafe_load()
        var k = keys.unsafe_offset(i).unsafe_load()
        query_squares += q * q
        key_squares += k * k
    # Both are normalised; scores are divided by the root of the dimensions.
    var query_scale = rsqrt(query_squares + EPS) * rsqrt(Scalar[F32](key))
    var key_scale = rsqrt(key_squares + EPS)
    var whole = value - value % WIDTH
    zero_row(delta, value)
    for i in range(key):
        var row = memory.unsafe_offset(i * value)
        var k = keys.unsafe_offset(i).unsafe_load() * key_scale
        for at in range(0, whole, WIDTH):
            var faded = row.unsafe_offset(at).unsafe_load[width=WIDTH]() * kept
            row.unsafe_offset(at).unsafe_store(faded)
            var sum = delta.unsafe_offset(at).unsafe_load[width=WIDTH]()
            delta.unsafe_offset(at).unsafe_store(faded.fma(SIMD[F32, WIDTH](k), sum))
        for at in range(whole, value):
            var faded = row.unsafe_offset(at).unsafe_load() * kept
            row.unsafe_offset(at).unsafe_store(faded)
            delta.unsafe_offset(at).unsafe_store(
                delta.unsafe_offset(at).unsafe_load() + faded * k
            )
    for at in range(value):
        var missing = values.unsafe_offset(at).unsafe_load() - delta.unsafe_offset(at).unsafe_load()
        delta.unsafe_offset(at).unsafe_store(missing * beta)
    zero_row(y, value)
    for i in range(key):
        var row = memory.unsafe_offset(i * value)
        var q = query.unsafe_offset(i).unsafe_load() * query_scale
        var k = keys.unsafe_offset(i).unsafe_load() * key_scale
        for at in range(0, whole, WIDTH):
            var changed = delta.unsafe_offset(at).unsafe_load[width=WIDTH]().fma(
                SIMD[F32, WIDTH](k), row.unsafe_offset(at).unsafe_load[width=WIDTH]()
            )
            row.unsafe_offset(at).unsafe_store(changed)
            var sum = y.unsafe_offset(at).unsafe_load[width=WIDTH]()
            y.unsafe_offset(at).unsafe_store(changed.fma(SIMD[F32, WIDTH](q), sum))
        for at in range(whole, value):
            var changed = (
                row.unsafe_offset(at).unsafe_load() + delta.unsafe_offset(at).unsafe_load() * k
            )
            row.unsafe_offset(at).unsafe_store(changed)
            y.unsafe_offset(at).unsafe_store(
                y.unsafe_offset(at).unsafe_load() + changed * q
            )
