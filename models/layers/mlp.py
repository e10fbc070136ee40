"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from max.graph import TensorValue, ops
from max.nn.layer import LayerList, Module

from models.collectives import Collectives
from models.config import DecoderConfig
from models.layers.linear import Linear
from models.weights import Piece, columns_of, rows_of

_ACTIVATIONS: dict[str, Callable[[TensorValue], TensorValue]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_pytorch_tanh": lambda x: ops.gelu(x, approximate="tanh"),
    "relu": ops.relu,
}


class MLP(Module):
    """``down(act(gate(x)) * up(x))`` (arXiv 2002.05202).

    Each device computes its inner columns, and the results are summed.

    Args:
        config: The decoder's configuration.
        layer: The layer's index in the model.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.shards = LayerList(
            [MLPShard(config, layer, holder) for holder in range(len(config.placement.devices))]
        )

    def __call__(self, xs: Sequence[TensorValue], collectives: Collectives) -> list[TensorValue]:
        """Per device [tokens, hidden] to [tokens, hidden]."""
        return collectives.sum_in_replicas(
            [shard(x) for shard, x in zip(self.shards, xs, strict=True)]
        )


class MLPShard(Module):
    """One device's inner columns of one layer.

    Args:
        config: The decoder's configuration.
        layer: The layer's index in the model.
        holder: The position of the device that holds it.
    """

    def __init__(self, config: DecoderConfig, layer: int, holder: int) -> None:
        super().__init__()
        settings, placement = config.settings, config.placement
        prefix = f"layers.{layer}.mlp"
        inner = placement.inner_columns(settings, holder)
        self.inner = len(inner)
        self.activation = _ACTIVATIONS[settings.hidden_act]

        def stacked(kind: str) -> tuple[Piece, ...]:
            return tuple(rows_of(f"{prefix}.{name}_proj.{kind}", inner) for name in ("gate", "up"))

        self.gate_up_proj = Linear(
            config,
            holder,
            stacked("weight"),
            settings.hidden_size,
            2 * self.inner,
            stacked("bias") if settings.mlp_bias else None,
        )
        # The results of a replica's devices are summed, so one of them adds the bias.
        adds_bias = settings.mlp_bias and placement.rank(holder) == 0
        self.down_proj = Linear(
            config,
            holder,
            (columns_of(f"{prefix}.down_proj.weight", inner),),
            self.inner,
            settings.hidden_size,
            (Piece(f"{prefix}.down_proj.bias"),) if adds_bias else None,
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """[tokens, hidden] to this device's part of [tokens, hidden]."""
        gate, up = ops.split(self.gate_up_proj(x), [self.inner, self.inner], axis=1)
        return self.down_proj(self.activation(gate) * up)
