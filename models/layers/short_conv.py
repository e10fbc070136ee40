"""Gated short convolutions in place of attention.

Source: LFM2, as in Hugging Face's ``modeling_lfm2.py`` (``Lfm2ShortConv``).
"""

from __future__ import annotations

from functools import partial

import numpy as np
from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.layer import Module
from max.nn.state_space import causal_conv1d_varlen_fwd

from models.config import DecoderConfig
from models.layers.linear import Linear
from models.layers.shards import SummedMixer
from models.layers.step import Step
from models.settings import ShortConvSettings
from models.state import first_pool
from models.weights import DeclaredWeight, Piece, columns_of, rows_of


class ShortConv(SummedMixer):
    """``out(c * conv(b * x))``: each device computes its channels, and the results are summed.

    Args:
        config: The decoder's configuration.
        conv: The model's short convolutions.
        layer: The layer's index in the model.
    """

    def __init__(self, config: DecoderConfig, conv: ShortConvSettings, layer: int) -> None:
        super().__init__(config, partial(ShortConvShard, config, conv, layer))


class ShortConvShard(Module):
    """One device's channels of one layer.

    Args:
        config: The decoder's configuration.
        conv: The model's short convolutions.
        layer: The layer's index in the model.
        holder: The position of the device that holds it.
    """

    def __init__(
        self, config: DecoderConfig, conv: ShortConvSettings, layer: int, holder: int
    ) -> None:
        super().__init__()
        settings, placement = config.settings, config.placement
        prefix, hidden = f"layers.{layer}.conv", settings.hidden_size
        channels = placement.inner_columns(hidden, holder)
        self.channels, self.width = len(channels), conv.width
        self.pool = first_pool(settings, placement, layer)
        # One tensor has the channels of b, of c and of x.
        parts = [range(channels.start + at, channels.stop + at) for at in (0, hidden, 2 * hidden)]
        weights, biases = (
            tuple(rows_of(f"{prefix}.in_proj.{kind}", part) for part in parts)
            for kind in ("weight", "bias")
        )
        self.in_proj = Linear(
            config, holder, weights, hidden, 3 * self.channels, biases if conv.bias else None
        )

        def declared(kind: str, *sizes: int) -> DeclaredWeight:
            return DeclaredWeight(
                kind,
                config.dtype,
                (self.channels, *sizes),
                placement.devices[holder],
                rows_of(f"{prefix}.conv.{kind}", channels).alone(),
                holder,
            )

        self.conv = declared("weight", 1, conv.width)
        self.conv_bias = declared("bias") if conv.bias else None
        # The results of a replica's devices are summed, so one of them adds the bias.
        adds_bias = conv.bias and placement.rank(holder) == 0
        self.out_proj = Linear(
            config,
            holder,
            (columns_of(f"{prefix}.out_proj.weight", channels),),
            self.channels,
            hidden,
            (Piece(f"{prefix}.out_proj.bias"),) if adds_bias else None,
        )

    def __call__(self, x: TensorValue, step: Step) -> TensorValue:
        """[tokens, hidden] to this device's part of [tokens, hidden]."""
        state = step.state
        assert state is not None
        b, c, inner = ops.split(self.in_proj(x), [self.channels] * 3, axis=1)
        bias = self.conv_bias
        convolved = causal_conv1d_varlen_fwd(
            b * inner,
            self.conv.reshape((self.channels, self.width)),
            ops.constant(np.zeros(0, np.float32), device=x.device) if bias is None else bias,
            state.pools[self.pool],
            ops.cast(step.row_offsets, DType.int32),
            state.slots,
            state.started,
            activation="none",
            channels_last=True,
        )
        return self.out_proj(c * convolved)
