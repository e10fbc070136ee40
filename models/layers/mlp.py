"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from max.graph import TensorValue, ops
from max.nn.layer import Module

from models.collectives import Collectives
from models.config import DecoderConfig
from models.kernels import GROUP, feed_forward
from models.layers.activations import ACTIVATIONS
from models.layers.linear import Linear
from models.layers.norm import RMSNorm
from models.layers.shards import Sharded
from models.lora import AdapterSlot
from models.weights import Piece, columns_of, rows_of


class MLP(Sharded):
    """``down(act(gate(x)) * up(x))`` (arXiv 2002.05202), or ``down(act(up(x)))`` without a gate.

    Each device computes its inner columns, and the results are summed.

    Args:
        config: The decoder's configuration.
        prefix: The checkpoint's name of the layer.
        size: Its inner columns.
        layer: The layer's index in the model, where adapters may add to it.
    """

    def __init__(
        self, config: DecoderConfig, prefix: str, size: int, layer: int | None = None
    ) -> None:
        super().__init__(config, partial(MLPShard, config, prefix, size, layer))

    def __call__(self, xs: Sequence[TensorValue], collectives: Collectives) -> list[TensorValue]:
        """Per device [tokens, hidden] to [tokens, hidden]."""
        return collectives.sum_in_replicas(self.parts(xs))

    @property
    def is_plain(self) -> bool:
        """Whether each device's part is what one kernel computes on the host."""
        return all(shard.is_plain for shard in self.shards)

    def with_norm(self, xs: Sequence[TensorValue], norms: Sequence[RMSNorm]) -> list[TensorValue]:
        """The same of the norm, added to the value itself, where it is plain."""
        parts = zip(self.shards, xs, norms, strict=True)
        return [shard.with_norm(x, norm) for shard, x, norm in parts]

    def parts(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Per device, its part of the sum."""
        return [shard(x) for shard, x in zip(self.shards, xs, strict=True)]


class MLPShard(Module):
    """One device's inner columns of one layer.

    Args:
        config: The decoder's configuration.
        prefix: The checkpoint's name of the layer.
        size: Inner columns of all devices.
        layer: The layer's index in the model, where adapters may add to it.
        holder: The position of the device that holds it.
    """

    def __init__(
        self, config: DecoderConfig, prefix: str, size: int, layer: int | None, holder: int
    ) -> None:
        super().__init__()

        def slot(target: str) -> AdapterSlot | None:
            return None if layer is None else config.adapter_slot(holder, layer, target)

        settings, placement = config.settings, config.placement
        inner = placement.inner_columns(size, holder)
        self.inner = len(inner)
        self.activation = ACTIVATIONS[settings.hidden_act]
        self.is_silu = settings.hidden_act == "silu"
        self.gated = settings.mlp_gated
        names = ("gate", "up") if self.gated else ("up",)
        weights, biases = (
            tuple(
                rows_of(f"{prefix}.{name}_proj.{kind}", inner, transposed=transposed)
                for name in names
            )
            for kind, transposed in (("weight", settings.transposed), ("bias", False))
        )
        self.gate_up_proj = Linear(
            config,
            holder,
            weights,
            settings.hidden_size,
            len(names) * self.inner,
            biases if settings.mlp_bias else None,
            [(self.inner, slot(f"{name}_proj")) for name in names],
        )
        # The results of a replica's devices are summed, so one of them adds the bias.
        adds_bias = settings.mlp_bias and placement.rank(holder) == 0
        self.down_proj = Linear(
            config,
            holder,
            (columns_of(f"{prefix}.down_proj.weight", inner, transposed=settings.transposed),),
            self.inner,
            settings.hidden_size,
            (Piece(f"{prefix}.down_proj.bias"),) if adds_bias else None,
            [(settings.hidden_size, slot("down_proj"))],
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """[tokens, hidden] to this device's part of [tokens, hidden]."""
        if not self.gated:
            return self.down_proj(self.activation(self.gate_up_proj(x)))
        gate, up = ops.split(self.gate_up_proj(x), [self.inner, self.inner], axis=1)
        return self.down_proj(self.activation(gate) * up)

    @property
    def is_plain(self) -> bool:
        """Whether it is what one kernel computes on the host."""
        products = (self.gate_up_proj, self.down_proj)
        whole = self.inner % GROUP == 0
        return self.gated and self.is_silu and whole and all(p.alone for p in products)

    def with_norm(self, x: TensorValue, norm: RMSNorm) -> TensorValue:
        """[tokens, hidden] and what the feed-forward of its norm adds, on the host."""
        gate_up, down = self.gate_up_proj.alone, self.down_proj.alone
        assert gate_up is not None
        assert down is not None
        return feed_forward(x, norm.weight, gate_up, down, eps=norm.eps, offset=norm.offset)
