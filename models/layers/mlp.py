"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from max.graph import DeviceRef, TensorValue, ops
from max.nn.layer import LayerList, Module

from models.config import DecoderConfig
from models.layers.linear import Linear
from models.weights import Piece

_ACTIVATIONS: dict[str, Callable[[TensorValue], TensorValue]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_pytorch_tanh": lambda x: ops.gelu(x, approximate="tanh"),
    "relu": ops.relu,
}


class MLP(Module):
    """``down(act(gate(x)) * up(x))`` (arXiv 2002.05202), on every device of the stage.

    Args:
        config: The decoder's configuration.
        layer: The layer's index in the model.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.shards = LayerList(
            [MLPShard(config, layer, device) for device in config.placement.devices]
        )

    def __call__(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Per device [tokens, hidden] to [tokens, hidden]."""
        return [shard(x) for shard, x in zip(self.shards, xs, strict=True)]


class MLPShard(Module):
    """One device's columns and rows of one layer.

    Args:
        config: The decoder's configuration.
        layer: The layer's index in the model.
        device: Where the shard resides.
    """

    def __init__(self, config: DecoderConfig, layer: int, device: DeviceRef) -> None:
        super().__init__()
        settings = config.settings
        prefix = f"layers.{layer}.mlp"
        self.inner = settings.intermediate_size
        self.activation = _ACTIVATIONS[settings.hidden_act]

        def bias(*names: str) -> tuple[Piece, ...] | None:
            if not settings.mlp_bias:
                return None
            return tuple(Piece(f"{prefix}.{name}_proj.bias") for name in names)

        self.gate_up_proj = Linear(
            (Piece(f"{prefix}.gate_proj.weight"), Piece(f"{prefix}.up_proj.weight")),
            settings.hidden_size,
            2 * self.inner,
            config.dtype,
            device,
            bias("gate", "up"),
        )
        self.down_proj = Linear(
            (Piece(f"{prefix}.down_proj.weight"),),
            self.inner,
            settings.hidden_size,
            config.dtype,
            device,
            bias("down"),
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """[tokens, hidden] to [tokens, hidden]."""
        gate, up = ops.split(self.gate_up_proj(x), [self.inner, self.inner], axis=1)
        return self.down_proj(self.activation(gate) * up)
