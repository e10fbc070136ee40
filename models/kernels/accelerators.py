"""MAX's kernels for accelerators, in the terms of our layers.

What they compute is what the host's kernels beside them do; MAX 26.7 has these for accelerators
only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn import kernels
from max.nn.attention import MHAMaskVariant
from max.nn.comm.ep.ep_kernels import fused_silu
from max.nn.kv_cache import KVCacheParams, PagedCacheValues

from models.lora import Routing
from models.settings import LatentSettings

_CPU = DeviceRef.CPU()


@dataclass(frozen=True)
class ExpertGroups:
    """Rows that are grouped by the expert they are for, as MAX's grouped products take them."""

    starts: TensorValue
    """uint32 ``[groups + 1]``: each group's first row, and the end of the last."""

    experts: TensorValue
    """int32 ``[groups]``: each group's expert, by its position on the device."""

    usage: TensorValue
    """uint32 ``[2]`` on the CPU: the most rows of a group, and the number of groups."""


def grouped_experts(
    rows: TensorValue, groups: ExpertGroups, gate_up: TensorValue, down: TensorValue
) -> TensorValue:
    """Each row through its expert: ``down(silu(gate(x)) * up(x))``.

    Args:
        rows: [rows, hidden], grouped by expert; those behind the last group are left as they are.
        groups: The groups.
        gate_up: [experts, 2 * inner, hidden].
        down: [experts, hidden, inner].

    Returns:
        [rows, hidden].
    """
    order = (groups.starts, groups.experts, groups.usage)
    inner = fused_silu(kernels.grouped_matmul_ragged(rows, gate_up, *order), groups.starts)
    return kernels.grouped_matmul_ragged(inner, down, *order)


def routed_experts(
    x: TensorValue,
    chosen: TensorValue,
    weights: TensorValue,
    gate_up: TensorValue,
    down: TensorValue,
) -> TensorValue:
    """The weighted sum of each token's chosen experts, all of which the device has.

    Args:
        x: [tokens, hidden].
        chosen: int32 [tokens, choices].
        weights: float32 [tokens, choices].
        gate_up: [experts, 2 * inner, hidden].
        down: [experts, hidden, inner].

    Returns:
        [tokens, hidden].
    """
    choices = int(chosen.shape[1])
    order, starts, restore, experts, usage = kernels.moe_create_indices(
        chosen.reshape((-1,)), int(gate_up.shape[0])
    )
    rows = ops.gather(x, ops.cast(order // choices, DType.int32), axis=0)
    results = grouped_experts(rows, ExpertGroups(starts, experts, usage), gate_up, down)
    return kernels.moe_finalize(results, restore, weights, x.dtype)


@dataclass(frozen=True)
class LatentPrefill:
    """Where latent attention unpacks each sequence's latents, the same in every layer of a step."""

    buffer_row_offsets: TensorValue
    """uint32 ``[1, sequences + 1]``."""

    cache_offsets: TensorValue
    """uint32 ``[1, sequences + 1]``."""


def plan_latent_prefill(
    params: KVCacheParams, row_offsets: TensorValue, kv: PagedCacheValues, max_context: int
) -> LatentPrefill:
    """Places the latents of a step's sequences.

    Args:
        params: The cache's parameters.
        row_offsets: uint32 [sequences + 1].
        kv: The paged cache of latents.
        max_context: The most tokens that the sequences' pages hold.
    """
    layer = ops.constant(0, DType.uint32, _CPU)
    rows, caches, _ = kernels.flare_mla_prefill_plan(
        params, row_offsets, kv, layer, max_context, max_chunks=1
    )
    return LatentPrefill(rows, caches)


def latent_attention(
    queries: TensorValue,
    compressed: TensorValue,
    norm: TensorValue,
    weight: TensorValue,
    rope: TensorValue,
    row_offsets: TensorValue,
    kv: PagedCacheValues,
    *,
    params: KVCacheParams,
    layer: int,
    latent: LatentSettings,
    prefill: LatentPrefill,
    context_length: TensorValue,
) -> TensorValue:
    """Norms, rotates and stores the latents, rotates the queries, and attends.

    A step with more than one token of a sequence makes keys and values of the latents; a step of
    single tokens attends to the latents themselves.

    Args:
        queries: [tokens, heads, nope_dim + rope_dim], not rotated.
        compressed: [tokens, kv_rank + rope_dim], neither normed nor rotated.
        norm: [kv_rank]: the norm's weight.
        weight: [heads * (nope_dim + value_dim), kv_rank]: ``kv_b_proj``.
        rope: float32 [positions, rope_dim] of (cos, sin) pairs of neighbouring dimensions.
        row_offsets: uint32 [sequences + 1].
        kv: The paged cache of latents.
        params: The cache's parameters.
        layer: The layer's position in the cache.
        latent: The model's latent attention.
        prefill: Where latents are unpacked.
        context_length: int32 [1] on the CPU: the sum of the page-aligned lengths.

    Returns:
        [tokens, heads, value_dim].
    """
    w_k, w_uk, w_uv = latent_weights(weight, int(queries.shape[1]), latent)
    assert kv.attention_dispatch_metadata is not None, "an accelerator's cache says how to divide"
    assert kv.mla_num_partitions is not None
    return kernels.mla_prefill_decode_graph(
        q=queries,
        kv=compressed,
        input_row_offsets=row_offsets,
        freqs_cis=ops.cast(rope, queries.dtype),
        kv_norm_gamma=norm,
        buffer_row_offsets=prefill.buffer_row_offsets,
        cache_offsets=prefill.cache_offsets,
        buffer_length=context_length,
        w_k=w_k,
        w_uk=w_uk,
        w_uv=w_uv,
        kv_params=params,
        kv_collection=kv,
        layer_idx=ops.constant(layer, DType.uint32, _CPU),
        mask_variant=MHAMaskVariant.CAUSAL_MASK,
        scale=latent.scale,
        epsilon=latent.norm_eps,
        v_head_dim=latent.value_dim,
        scalar_args=kv.attention_dispatch_metadata,
        num_partitions_scalar=kv.mla_num_partitions,
    )


def latent_weights(
    weight: TensorValue, count: int, latent: LatentSettings
) -> tuple[TensorValue, TensorValue, TensorValue]:
    """The rows of ``kv_b_proj`` as the kernel takes them.

    Args:
        weight: [heads * (nope_dim + value_dim), kv_rank].
        count: Heads.
        latent: The model's latent attention.

    Returns:
        [heads * nope_dim, kv_rank] and [heads, kv_rank, nope_dim], which make keys of latents and
        latents of queries; and [heads, value_dim, kv_rank], which makes values.
    """
    rank = int(weight.shape[1])
    by_head = weight.reshape((count, latent.nope_dim + latent.value_dim, rank))
    keys, values = ops.split(by_head, [latent.nope_dim, latent.value_dim], axis=1)
    return keys.reshape((count * latent.nope_dim, rank)), ops.transpose(keys, 1, 2), values


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
    starts, adapted = own_groups(x, routing, first_row)
    # The kernel's argument for ranks is one that it does not read.
    ids = ranks = routing.ids
    low = kernels.sgmv_kernel(x, a, ids, ranks, starts, max_tokens)
    added = kernels.sgmv_kernel(low, b, ids, ranks, starts, max_tokens)
    # What the kernel leaves of other rows is nothing.
    return ops.where(adapted, added, ops.constant(0, x.dtype, x.device))


def own_groups(
    x: TensorValue, routing: Routing[TensorValue], first_row: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """Which of a device's rows have which adapter.

    Args:
        x: [rows, width].
        routing: Which tokens of the batch have which adapter.
        first_row: int64 [1] on the CPU: where the rows begin in the batch.

    Returns:
        Where each group begins among the rows, and the end of the last, uint32 [groups + 1]; and
        whether a row has an adapter, bool [rows, 1].
    """
    device, count = x.device, x.shape[0]
    begin, length, end = (
        ops.cast(edge.to(device), DType.int64)
        for edge in (first_row, ops.shape_to_tensor(x.shape)[:1], routing.end)
    )
    # Groups behind the last with an adapter are left empty, and those of other devices.
    batch = ops.min(ops.cast(routing.offsets, DType.int64), end)
    zero = ops.constant(0, DType.int64, device)
    offsets = ops.max(ops.min(batch - begin, length), zero)
    row = ops.range(0, count, 1, out_dim=count, dtype=DType.int64, device=device)
    # A row's group is the number of groups that end at or before it; behind the last is none.
    ended = ops.cast(ops.unsqueeze(offsets[1:], 0) <= ops.unsqueeze(row, 1), DType.int32)
    group = ops.sum(ended, axis=1).reshape((count,))
    none = ops.constant(np.array([-1], np.int32), device=device)
    chosen = ops.gather(ops.concat([routing.ids, none], axis=0), group, axis=0)
    return ops.cast(offsets, DType.uint32), ops.unsqueeze(chosen >= 0, 1)


def shares(x: TensorValue, parts: int) -> list[TensorValue]:
    """The edges of parts of the rows of ``x`` that differ by one row at most, int64 [] each."""
    rows = ops.shape_to_tensor(x.shape)[0]
    return [rows * part // parts for part in range(parts + 1)]
