"""Kernels of our own for the host, in Mojo, and the choice between them and MAX's.

Each function here takes values of any device; those that have a host form only say so.
"""

from __future__ import annotations

import numpy as np
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, TensorType, TensorValue, ops
from max.nn.kv_cache import PagedCacheValues

from models.kernels import accelerators
from models.kernels.fused import GROUP, attention_layer, can_fuse, feed_forward
from models.kernels.library import kernel_library, kernels_version
from models.kernels.matrix import Matrix, matmul
from models.lora import Routing

__all__ = [
    "GROUP",
    "Matrix",
    "attention",
    "attention_layer",
    "can_fuse",
    "dispatch_tokens",
    "expert_products",
    "feed_forward",
    "gated_delta",
    "kernel_library",
    "kernels_version",
    "latent_attention",
    "latent_context",
    "lora_products",
    "matmul",
    "patch_attention",
    "place_rows",
    "read_rows",
    "return_results",
    "rms_norm",
    "rotate_and_store",
    "shares",
]


def expert_products(
    x: TensorValue, experts: TensorValue, weight: TensorValue, out_dim: int
) -> TensorValue:
    """Each choice's row times the transpose of the chosen expert's weight, on the host.

    Reads the weights of chosen experts only, each once. MAX 26.7 has grouped products for
    accelerators only (``accelerators.routed_experts``).

    Args:
        x: float32 [tokens, in], or [tokens * choices, in].
        experts: int32 [tokens, choices]: the chosen experts; -1 is none, and gives zeros.
        weight: float32 [experts * out, in], the experts one below the other.
        out_dim: Rows of one expert's weight.

    Returns:
        float32 [tokens * choices, out].
    """
    rows = experts.shape[0] * experts.shape[1]
    result = TensorType(DType.float32, [rows, out_dim], x.device)
    return ops.custom("rolecall_experts", x.device, [x, experts, weight], [result])[0].tensor


def dispatch_tokens(
    tokens: BufferValue,
    experts: BufferValue,
    x: TensorValue,
    chosen: TensorValue,
    first_row: TensorValue,
    held: range,
) -> None:
    """Sends a device's tokens to another: those that chose an expert it holds.

    Args:
        tokens: float32 [capacity, hidden] of the receiver.
        experts: int32 [capacity, choices] of the receiver: which of its experts, or -1.
        x: float32 [rows, hidden] of the sender.
        chosen: int32 [rows, choices]: experts by their index in the model.
        first_row: int64 [1] on the CPU: the receiver's row of the first token.
        held: The receiver's experts.
    """
    values = [tokens, experts, x, chosen, first_row, _range(held)]
    ops.inplace_custom("rolecall_dispatch", tokens.device, values)


def shares(x: TensorValue, parts: int) -> list[TensorValue]:
    """The edges of parts of the rows of ``x`` that differ by one row at most.

    On the CPU the same of MAX's operations takes ten seconds more to compile for each device.

    Args:
        x: [rows, width].
        parts: How many.

    Returns:
        The first row of each part, and the end of the last, int64 [] on the CPU.
    """
    if not x.device.is_cpu():
        return accelerators.shares(x, parts)
    result = TensorType(DType.int64, [parts + 1], DeviceRef.CPU())
    edges = ops.custom("rolecall_shares", DeviceRef.CPU(), [x], [result])[0].tensor
    return [edges[part] for part in range(parts + 1)]


def return_results(
    results: BufferValue,
    values: TensorValue,
    chosen: TensorValue,
    first_row: TensorValue,
    held: range,
) -> None:
    """Sends the results of a device's experts back to the device of the tokens that chose them.

    Args:
        results: float32 [capacity, hidden] of the token's device.
        values: float32 [tokens of the batch * choices, hidden] of the experts' device.
        chosen: int32 [rows, choices]: what the tokens chose.
        first_row: int64 [1] on the CPU: the first of these tokens' position in the batch.
        held: The experts that the values are of.
    """
    inputs = [results, values, chosen, first_row, _range(held)]
    ops.inplace_custom("rolecall_return", results.device, inputs)


def read_rows(buffer: BufferValue, rows: Dim) -> TensorValue:
    """The first rows of a buffer, [rows, width].

    Args:
        buffer: [capacity, width].
        rows: How many.
    """
    result = TensorType(buffer.dtype, [rows, buffer.shape[1]], buffer.device)
    return ops.inplace_custom("rolecall_read_rows", buffer.device, [buffer], [result])[0].tensor


def rms_norm(x: TensorValue, weight: TensorValue, eps: float, offset: float) -> TensorValue:
    """``x / rms(x) * (weight + offset)`` over the last dimension.

    In float32 rows on the CPU it is our kernel, which takes one thread where the rows are few:
    MAX 26.7's takes as long to begin.

    Args:
        x: [..., width].
        weight: [width].
        eps: Added to the mean of the squares.
        offset: Added to the weight.
    """
    if not x.device.is_cpu() or x.dtype != DType.float32 or x.rank != 2:
        return ops.rms_norm(x, weight, eps, weight_offset=offset)
    values = [x, weight, _constant([eps, offset], np.float32)]
    return ops.custom("rolecall_rms_norm", x.device, values, [x.type])[0].tensor


def rotate_and_store(
    qkv: TensorValue,
    kv: PagedCacheValues,
    row_offsets: TensorValue,
    table: TensorValue,
    layer: int,
    query_width: int,
) -> TensorValue:
    """Rotates whole heads in two halves, and stores keys and values, on the host.

    Args:
        qkv: float32 [tokens, queries + keys + values].
        kv: The paged cache.
        row_offsets: uint32 [sequences + 1].
        table: float32 [positions, head_dim] of (cos, sin) pairs.
        layer: The layer's position in the cache.
        query_width: Columns of queries.

    Returns:
        float32 [tokens, query_width]: the queries.
    """
    values = [
        qkv,
        kv.kv_blocks,
        kv.page_stride,
        kv.lookup_table,
        kv.cache_lengths,
        row_offsets,
        table,
        _constant([layer], np.int64),
    ]
    result = TensorType(DType.float32, [qkv.shape[0], query_width], qkv.device)
    name = "rolecall_rotate_and_store"
    return ops.inplace_custom(name, qkv.device, values, [result])[0].tensor


def attention(
    queries: TensorValue,
    kv: PagedCacheValues,
    row_offsets: TensorValue,
    layer: int,
    *,
    window: int,
    scale: float,
) -> TensorValue:
    """Causal attention over the paged cache, on the host.

    MAX 26.7's own reads the cache at a fraction of the memory's rate; docs/performance.md has the
    figures.

    Args:
        queries: float32 [tokens, num_heads * head_dim], rotated.
        kv: The paged cache, with these tokens' keys and values.
        row_offsets: uint32 [sequences + 1].
        layer: The layer's position in the cache.
        window: How many tokens back a token sees, itself included.
        scale: What scores are multiplied with.

    Returns:
        float32 [tokens, num_heads * head_dim].
    """
    values = [
        queries,
        kv.kv_blocks,
        kv.page_stride,
        kv.lookup_table,
        kv.cache_lengths,
        kv.max_prompt_length,
        kv.max_cache_length,
        row_offsets,
        _constant([scale], np.float32),
        _constant([layer, window], np.int64),
    ]
    result = TensorType(DType.float32, queries.shape, queries.device)
    return ops.inplace_custom("rolecall_attention", queries.device, values, [result])[0].tensor


def latent_context(
    workspace: BufferValue,
    kv: PagedCacheValues,
    row_offsets: TensorValue,
    layer: int,
    context_length: TensorValue,
) -> None:
    """Gathers each sequence's latents from its pages, one sequence behind the other.

    Args:
        workspace: float32 [capacity, cached_dim]; each sequence begins at a page's edge.
        kv: The paged cache of latents.
        row_offsets: uint32 [sequences + 1].
        layer: The layer's position in the cache.
        context_length: int32 [1] on the CPU: the sum of the page-aligned lengths.
    """
    ops.inplace_custom(
        "rolecall_latent_context",
        workspace.device,
        [
            workspace,
            kv.kv_blocks,
            kv.lookup_table,
            kv.cache_lengths,
            row_offsets,
            _constant([layer], np.uint32),
            context_length,
        ],
    )


def latent_attention(
    queries: TensorValue,
    weight: TensorValue,
    workspace: BufferValue,
    kv: PagedCacheValues,
    row_offsets: TensorValue,
    *,
    num_heads: int,
    value_dim: int,
    page_size: int,
    scale: float,
) -> TensorValue:
    """Causal attention over latents, without making keys and values of them.

    A query is multiplied with its head's key rows instead, and the result with its value rows
    (arXiv 2405.04434, section 2.1.2, calls it absorbing). MAX 26.7 has latent attention for
    accelerators only.

    Args:
        queries: float32 [tokens, num_heads * (nope_dim + rope_dim)], rotated.
        weight: float32 [num_heads * (nope_dim + value_dim), kv_rank]: ``kv_b_proj``.
        workspace: What ``latent_context`` gathered.
        kv: The paged cache of latents.
        row_offsets: uint32 [sequences + 1].
        num_heads: Heads of this device.
        value_dim: Dimensions of a head's value.
        page_size: Tokens of a page.
        scale: What scores are multiplied with.

    Returns:
        float32 [tokens, num_heads * value_dim].
    """
    result = TensorType(DType.float32, [queries.shape[0], num_heads * value_dim], queries.device)
    return ops.inplace_custom(
        "rolecall_latent_attention",
        queries.device,
        [
            queries,
            weight,
            workspace,
            kv.cache_lengths,
            row_offsets,
            _constant([scale], np.float32),
            _constant([num_heads, page_size], np.int64),
        ],
        [result],
    )[0].tensor


def lora_products(
    x: TensorValue,
    a: TensorValue,
    b: TensorValue,
    routing: Routing[TensorValue],
    first_row: TensorValue,
    max_tokens: int,
) -> TensorValue:
    """What adapters add to a product: ``x @ A.T @ B.T`` with each token's own A and B.

    Args:
        x: [rows, in].
        a: [adapters, rank, in].
        b: [adapters, out, rank], the scale in it.
        routing: Which tokens of the batch have which adapter.
        first_row: int64 [1] on the CPU: where the rows begin in the batch.
        max_tokens: The most tokens of a step.

    Returns:
        [rows, out]; zero for tokens without an adapter.
    """
    if not x.device.is_cpu():
        return accelerators.lora_products(x, a, b, routing, first_row, max_tokens)
    values = [x, a, b, routing.ids, routing.offsets, routing.end, first_row]
    result = TensorType(DType.float32, [x.shape[0], b.shape[1]], x.device)
    return ops.custom("rolecall_lora", x.device, values, [result])[0].tensor


def patch_attention(qkv: TensorValue, num_heads: int, length: int, scale: float) -> TensorValue:
    """Attention from each patch to all patches of its image.

    MAX 26.7 has it without a KV cache for accelerators only.

    Args:
        qkv: float32 [images * length, 3 * num_heads * dim]: queries, keys and values.
        num_heads: Heads of this device.
        length: Patches of an image.
        scale: What scores are multiplied with.

    Returns:
        float32 [images * length, num_heads * dim].
    """
    result = TensorType(DType.float32, [qkv.shape[0], int(qkv.shape[1]) // 3], qkv.device)
    sizes, factor = _constant([num_heads, length], np.int64), _constant([scale], np.float32)
    values = [qkv, sizes, factor]
    return ops.custom("rolecall_patch_attention", qkv.device, values, [result])[0].tensor


def place_rows(x: TensorValue, rows: TensorValue, at: TensorValue) -> TensorValue:
    """``x`` with some rows in place of its own.

    Args:
        x: float32 [tokens, width].
        rows: float32 [count, width].
        at: int32 [count]: the row of ``x`` that each replaces; -1 is none.
    """
    return ops.custom("rolecall_place_rows", x.device, [x, rows, at], [x.type])[0].tensor


def gated_delta(
    pool: BufferValue,
    qkv: TensorValue,
    decay: TensorValue,
    beta: TensorValue,
    row_offsets: TensorValue,
    slots: TensorValue,
    started: TensorValue,
) -> TensorValue:
    """The gated delta rule (arXiv 2412.06464, section 3) over each sequence's tokens.

    Queries and keys are normalised to length one, and a query divided by the root of its
    dimensions. MAX 26.7 has this for accelerators only.

    Args:
        pool: float32 [slots, heads, key, value]: each head's memory, updated in place.
        qkv: float32 [tokens, 2 * key_heads * key + heads * value]: queries, keys and values.
        decay: float32 [tokens, heads]: the logarithm of what a memory keeps.
        beta: float32 [tokens, heads]: how far it is brought to a token's value.
        row_offsets: uint32 [sequences + 1].
        slots: uint32 [sequences]: where each sequence's memories are.
        started: bool [sequences]: whether it has any; otherwise they are zeroed first.

    Returns:
        float32 [tokens, heads * value].
    """
    width = int(pool.shape[1]) * int(pool.shape[3])
    result = TensorType(DType.float32, [qkv.shape[0], width], qkv.device)
    values = [pool, qkv, decay, beta, row_offsets, slots, started]
    return ops.inplace_custom("rolecall_gated_delta", pool.device, values, [result])[0].tensor


def _range(held: range) -> TensorValue:
    return _constant([held.start, len(held)], np.int64)


def _constant(values: list[int] | list[float], dtype: type[np.generic]) -> TensorValue:
    return ops.constant(np.array(values, dtype), device=DeviceRef.CPU())
