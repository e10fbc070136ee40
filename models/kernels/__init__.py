"""Kernels of our own for the host, in Mojo, and the choice between them and MAX's.

Each function here takes values of any device; those that have a host form only say so.
"""

from __future__ import annotations

import numpy as np
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, TensorType, TensorValue, ops

from models.kernels import accelerators
from models.kernels.constants import constant
from models.kernels.fused import GROUP, attention_layer, can_fuse, feed_forward
from models.kernels.host_attention import (
    attention,
    latent_attention,
    latent_context,
    patch_attention,
    rotate_and_store,
)
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
    values = [x, weight, constant([eps, offset], np.float32)]
    return ops.custom("rolecall_rms_norm", x.device, values, [x.type])[0].tensor


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
    return constant([held.start, len(held)], np.int64)
