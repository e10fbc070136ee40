"""The gated delta rule in place of attention.

Source: Gated DeltaNet (arXiv 2412.06464), as in Hugging Face's ``modeling_qwen3_next.py``.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.layer import Module
from max.nn.state_space import causal_conv1d_varlen_fwd

from models.config import DecoderConfig
from models.kernels import gated_delta
from models.layers.linear import Linear
from models.layers.norm import RMSNorm
from models.layers.shards import SummedMixer
from models.layers.step import Step
from models.settings import DeltaSettings
from models.state import first_pool
from models.weights import DeclaredWeight, FromCheckpoint, Piece, columns_of, rows_of


class GatedDelta(SummedMixer):
    """Each device remembers with its heads, and the results are summed.

    Args:
        config: The decoder's configuration.
        delta: The model's delta rule.
        layer: The layer's index in the model.
    """

    def __init__(self, config: DecoderConfig, delta: DeltaSettings, layer: int) -> None:
        super().__init__(config, partial(GatedDeltaShard, config, delta, layer))


class GatedDeltaShard(Module):
    """One device's heads of one layer.

    Args:
        config: The decoder's configuration.
        delta: The model's delta rule.
        layer: The layer's index in the model.
        holder: The position of the device that holds it.
    """

    def __init__(
        self, config: DecoderConfig, delta: DeltaSettings, layer: int, holder: int
    ) -> None:
        super().__init__()
        settings, placement = config.settings, config.placement
        prefix = f"layers.{layer}.linear_attn"
        key_heads, value_heads = (
            placement.inner_columns(heads, holder) for heads in (delta.key_heads, delta.value_heads)
        )
        self.delta, self.num_heads = delta, len(value_heads)
        self.pool = first_pool(settings, placement, layer)
        values = self.num_heads * delta.value_dim
        self.channels = delta.channels(len(key_heads))
        # Queries, keys and values; what gates the result; what brings a memory to a value; decay.
        self.widths = [self.channels, values, self.num_heads, self.num_heads]
        self.in_proj = Linear(
            config,
            holder,
            _projections(delta, prefix, key_heads),
            settings.hidden_size,
            sum(self.widths),
        )

        def declared(kind: str, pieces: tuple[Piece, ...], *sizes: int) -> DeclaredWeight:
            device = placement.devices[holder]
            return DeclaredWeight(kind, config.dtype, sizes, device, FromCheckpoint(pieces), holder)

        self.conv = declared(
            "conv", _channels(delta, prefix, key_heads, value_heads), self.channels, 1, delta.width
        )
        self.log_rate, self.bias = (
            declared(kind, (rows_of(f"{prefix}.{tensor}", value_heads),), self.num_heads)
            for kind, tensor in (("log_rate", "A_log"), ("bias", "dt_bias"))
        )
        self.norm = RMSNorm(config, holder, f"{prefix}.norm.weight", delta.value_dim, offset=0.0)
        self.out_proj = Linear(
            config,
            holder,
            (columns_of(f"{prefix}.out_proj.weight", value_heads, delta.value_dim),),
            values,
            settings.hidden_size,
        )

    def __call__(self, x: TensorValue, step: Step) -> TensorValue:
        """[tokens, hidden] to this device's part of [tokens, hidden]."""
        state, width = step.state, self.delta.width
        assert state is not None
        qkv, gates, nearness, decay = ops.split(self.in_proj(x), self.widths, axis=1)
        convolved = causal_conv1d_varlen_fwd(
            qkv,
            self.conv.reshape((self.channels, width)),
            ops.constant(np.zeros(0, np.float32), device=x.device),
            state.pools[self.pool],
            ops.cast(step.row_offsets, DType.int32),
            state.slots,
            state.started,
            activation="silu",
            channels_last=True,
        )
        read = gated_delta(
            state.pools[self.pool + 1],
            convolved.rebind(qkv.shape),
            -ops.exp(self.log_rate) * _softplus(decay + self.bias),
            ops.sigmoid(nearness),
            step.row_offsets,
            state.slots,
            state.started,
        )
        # Each head is normalised by itself.
        heads = self.norm(read.reshape((-1, self.delta.value_dim)))
        gated = heads * ops.silu(gates.reshape((-1, self.delta.value_dim)))
        return self.out_proj(gated.reshape((-1, self.num_heads * self.delta.value_dim)))


def _softplus(x: TensorValue) -> TensorValue:
    """``log(1 + exp(x))``, without overflow."""
    zero = ops.constant(0, x.dtype, x.device)
    return ops.max(x, zero) + ops.log1p(ops.exp(-ops.abs(x)))


def _projections(delta: DeltaSettings, prefix: str, key_heads: range) -> tuple[Piece, ...]:
    """The rows of a device's projections: all heads' queries, then their keys, and so on.

    The checkpoint has two tensors with the rows of one key head behind those of another: its query,
    its key, and the values and gates of the value heads that read it; and what brings these to a
    value, and their decay.
    """
    per_key = delta.value_heads // delta.key_heads
    values = per_key * delta.value_dim
    pieces = []
    for tensor, widths in (
        ("in_proj_qkvz", (delta.key_dim, delta.key_dim, values, values)),
        ("in_proj_ba", (per_key, per_key)),
    ):
        for number, width in enumerate(widths):
            for head in key_heads:
                at = head * sum(widths) + sum(widths[:number])
                pieces.append(Piece(f"{prefix}.{tensor}.weight", rows=(at, at + width)))
    return tuple(pieces)


def _channels(
    delta: DeltaSettings, prefix: str, key_heads: range, value_heads: range
) -> tuple[Piece, ...]:
    """The convolution's channels of a device: of its queries, keys and values."""
    keys = delta.key_heads * delta.key_dim
    return tuple(
        Piece(
            f"{prefix}.conv1d.weight",
            rows=(before + heads.start * width, before + heads.stop * width),
        )
        for before, heads, width in (
            (0, key_heads, delta.key_dim),
            (keys, key_heads, delta.key_dim),
            (2 * keys, value_heads, delta.value_dim),
        )
    )
