"""Attention over paged caches and over images, in kernels of our own on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import BufferValue, TensorType, TensorValue, Value, ops
from max.nn.kv_cache import PagedCacheValues

from models.kernels.constants import constant


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
        constant([layer], np.int64),
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
        *batch_of(kv, row_offsets),
        constant([scale], np.float32),
        constant([layer, window], np.int64),
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
            constant([layer], np.uint32),
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
            constant([scale], np.float32),
            constant([num_heads, page_size], np.int64),
        ],
        [result],
    )[0].tensor


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
    sizes, factor = constant([num_heads, length], np.int64), constant([scale], np.float32)
    values = [qkv, sizes, factor]
    return ops.custom("rolecall_patch_attention", qkv.device, values, [result])[0].tensor


def batch_of(kv: PagedCacheValues, row_offsets: TensorValue) -> list[Value[Any]]:
    """What kernels that attend take of a batch, in their order.

    Args:
        kv: The paged cache.
        row_offsets: uint32 [sequences + 1].
    """
    return [
        kv.kv_blocks,
        kv.page_stride,
        kv.lookup_table,
        kv.cache_lengths,
        kv.max_prompt_length,
        kv.max_cache_length,
        row_offsets,
    ]
