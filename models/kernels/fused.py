"""A layer's halves as one kernel each, on the host.

A kernel of MAX takes 2 us to begin and 6 more to divide its work among threads, which a decode
step of a small model is made of; docs/performance.md has the figures. The halves compute what the
kernels that they are composed of do.
"""

from __future__ import annotations

import numpy as np
from max.dtype import DType
from max.graph import TensorType, TensorValue, ops
from max.nn.kv_cache import PagedCacheValues

from models.kernels.constants import constant
from models.kernels.host_attention import batch_of
from models.kernels.matrix import Matrix
from models.storage import Blocks, Halves

GROUP = 32
"""What the inner columns of a feed-forward have to be a multiple of (``kernels/product.mojo``)."""

_ROUNDED_WORDS = 11
"""Words of a rounded block of 32 values (``kernels/rounded.mojo``)."""


def can_fuse(matrix: Matrix) -> bool:
    """Whether the halves take a matrix that is kept as this one.

    Args:
        matrix: A matrix on the CPU.
    """
    return matrix.storage is None or isinstance(matrix.storage, Blocks | Halves)


def feed_forward(
    x: TensorValue,
    norm: TensorValue,
    gate_up: Matrix,
    down: Matrix,
    *,
    eps: float,
    offset: float,
) -> TensorValue:
    """``x + down(silu(gate(n)) * up(n))``, where ``n`` is the RMS norm of ``x``.

    Args:
        x: float32 [tokens, hidden].
        norm: float32 [hidden]: the norm's weight.
        gate_up: The gate's outputs, then as many of ``up``.
        down: From these to ``hidden``; its columns are a multiple of ``GROUP``.
        eps: Added to the mean of the norm's squares.
        offset: Added to the norm's weight.

    Returns:
        float32 [tokens, hidden].
    """
    assert down.columns % GROUP == 0, "inner columns are whole groups"
    tokens, inner = x.shape[0], down.columns
    # What is behind the first is scratch.
    results = [
        x.type,
        x.type,
        _rounded(gate_up, x),
        TensorType(DType.float32, [tokens, inner], x.device),
        TensorType(DType.float32, [tokens, inner], x.device),
        _rounded(down, x),
    ]
    values = [x, norm, gate_up.values, down.values, constant([eps, offset], np.float32)]
    parameters = _parameters("gate_up", gate_up) | _parameters("down", down)
    name = "rolecall_feed_forward"
    return ops.custom(name, x.device, values, results, parameters)[0].tensor


def attention_layer(
    x: TensorValue,
    norm: TensorValue,
    qkv: Matrix,
    o: Matrix,
    kv: PagedCacheValues,
    row_offsets: TensorValue,
    table: TensorValue,
    layer: int,
    *,
    eps: float,
    offset: float,
    window: int,
    scale: float,
) -> TensorValue:
    """``x + o(attention(qkv(n)))``, where ``n`` is the RMS norm of ``x``.

    Heads are rotated whole, in two halves.

    Args:
        x: float32 [tokens, hidden].
        norm: float32 [hidden]: the norm's weight.
        qkv: The outputs of queries, keys and values.
        o: From the heads' results to ``hidden``.
        kv: The paged cache.
        row_offsets: uint32 [sequences + 1].
        table: float32 [positions, head_dim] of (cos, sin) pairs.
        layer: The layer's position in the cache.
        eps: Added to the mean of the norm's squares.
        offset: Added to the norm's weight.
        window: How many tokens back a token sees, itself included.
        scale: What scores are multiplied with.

    Returns:
        float32 [tokens, hidden].
    """
    tokens = x.shape[0]
    # What is behind the first is scratch.
    results = [
        x.type,
        x.type,
        _rounded(qkv, x),
        TensorType(DType.float32, [tokens, qkv.rows], x.device),
        TensorType(DType.float32, [tokens, o.columns], x.device),
        TensorType(DType.float32, [tokens, o.columns], x.device),
        _rounded(o, x),
    ]
    values = [
        x,
        norm,
        qkv.values,
        o.values,
        *batch_of(kv, row_offsets),
        table,
        constant([eps, offset, scale], np.float32),
        constant([layer, window], np.int64),
    ]
    parameters = _parameters("qkv", qkv) | _parameters("o", o)
    name = "rolecall_attention_layer"
    return ops.inplace_custom(name, x.device, values, results, parameters)[0].tensor


def _rounded(matrix: Matrix, x: TensorValue) -> TensorType:
    """What rows are rounded into for products with a matrix; nothing where they are not."""
    blocks = 0
    if isinstance(matrix.storage, Blocks) and matrix.storage.rounds:
        blocks = matrix.columns // matrix.storage.block
    return TensorType(DType.int32, [x.shape[0], blocks * _ROUNDED_WORDS], x.device)


def _parameters(name: str, matrix: Matrix) -> dict[str, int | bool | str | DType]:
    """What the kernel is compiled for, by the name of its matrix."""
    parameters: dict[str, int | bool] = {
        "bits": 0,
        "offset": 0,
        "has_minimum": False,
        "rounds": False,
    }
    if isinstance(matrix.storage, Blocks):
        parameters = matrix.storage.parameters
    return {f"{name}_{key}": value for key, value in parameters.items()}
