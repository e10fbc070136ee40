"""A mixture of experts in place of the feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn.layer import LayerList, Module

from models.collectives import Collectives
from models.config import DecoderConfig
from models.exchange import Exchange, Route, weighted_sum
from models.kernels import expert_products, shares
from models.kernels.accelerators import ExpertGroups, grouped_experts, routed_experts
from models.layers.activations import ACTIVATIONS
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.router import Router
from models.layers.shards import PerDevice, Sharded
from models.settings import ExpertSettings
from models.weights import DeclaredWeight, FromCheckpoint, Piece


class MixtureOfExperts(Sharded):
    """Each token's chosen experts, weighted and summed, beside the experts that all tokens take.

    Without expert parallelism each device computes its inner columns of every expert. With it,
    each device has experts of its own, and takes a share of its replica's tokens to dispatch.

    Args:
        config: The decoder's configuration.
        experts: The model's mixture of experts.
        layer: The layer's index in the model.
    """

    def __init__(self, config: DecoderConfig, experts: ExpertSettings, layer: int) -> None:
        super().__init__(config, partial(ExpertShard, config, experts, layer))
        self.placement = config.placement
        self.routers = LayerList(
            [
                Router(config, experts, layer, holder)
                for holder in range(len(self.placement.devices))
            ]
        )
        if experts.shared_size:
            prefix = f"layers.{layer}.mlp.shared_experts"
            self.shared = MLP(config, prefix, experts.shared_size)
        if experts.shared_gate:
            gate = f"layers.{layer}.mlp.shared_expert_gate.weight"
            self.shared_gates = PerDevice(
                config,
                lambda holder: Linear(
                    config, holder, (Piece(gate),), config.settings.hidden_size, 1
                ),
            )

    def __call__(
        self, xs: Sequence[TensorValue], collectives: Collectives, exchange: Exchange | None
    ) -> list[TensorValue]:
        """Per device [tokens, hidden] to [tokens, hidden]."""
        parts = self._shared_parts(xs) if hasattr(self, "shared") else None
        if exchange is None:
            routed = [
                shard(x, *route)
                for shard, x, route in zip(self.shards, xs, self._route(xs), strict=True)
            ]
            return collectives.sum_in_replicas(
                routed if parts is None else [r + p for r, p in zip(routed, parts, strict=True)]
            )
        routed = self._exchanged(xs, collectives, exchange)
        if parts is None:
            return routed
        shared = collectives.sum_in_replicas(parts)
        return [r + s for r, s in zip(routed, shared, strict=True)]

    def _shared_parts(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Per device, its part of the experts that every token takes."""
        parts = self.shared.parts(xs)
        if not hasattr(self, "shared_gates"):
            return parts
        gates = self.shared_gates(xs)
        return [part * ops.sigmoid(gate) for part, gate in zip(parts, gates, strict=True)]

    def _route(self, xs: Sequence[TensorValue]) -> list[Route]:
        return [router(x) for router, x in zip(self.routers, xs, strict=True)]

    def _exchanged(
        self, xs: Sequence[TensorValue], collectives: Collectives, exchange: Exchange
    ) -> list[TensorValue]:
        group = self.placement.group
        own = [_share(x, holder, group) for holder, x in enumerate(xs)]
        summed = exchange(own, self._route(own), list(self.shards))
        if group == 1:
            return summed
        whole = collectives.stack_in_replicas(summed)
        return [rows.rebind(x.shape) for rows, x in zip(whole, xs, strict=True)]


class ExpertShard(Module):
    """One device's experts of one layer, or its inner columns of every expert.

    Args:
        config: The decoder's configuration.
        experts: The model's mixture of experts.
        layer: The layer's index in the model.
        holder: The position of the device that holds it.
    """

    def __init__(
        self, config: DecoderConfig, experts: ExpertSettings, layer: int, holder: int
    ) -> None:
        super().__init__()
        settings, placement = config.settings, config.placement
        self.activation = ACTIVATIONS[settings.hidden_act]
        self.hidden = settings.hidden_size
        inner = placement.expert_columns(experts, holder)
        self.inner = len(inner)
        held = placement.experts(experts, holder)
        device = placement.devices[holder]

        def tensor(expert: int, name: str) -> str:
            return f"layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"

        def weight(name: str, rows: int, columns: int, pieces: list[Piece]) -> DeclaredWeight:
            shape = (len(held) * rows, columns)
            source = FromCheckpoint(tuple(pieces))
            return DeclaredWeight(name, config.dtype, shape, device, source, holder)

        columns = (inner.start, inner.stop)
        self.num_held = len(held)
        self.gate_up_proj = weight(
            "gate_up_proj",
            2 * self.inner,
            self.hidden,
            [Piece(tensor(e, name), rows=columns) for e in held for name in ("gate", "up")],
        )
        self.down_proj = weight(
            "down_proj",
            self.hidden,
            self.inner,
            [Piece(tensor(e, "down"), rows=(0, self.hidden), columns=columns) for e in held],
        )

    def __call__(self, x: TensorValue, chosen: TensorValue, weights: TensorValue) -> TensorValue:
        """The weighted sum of each token's choices, of a device that has every expert.

        Args:
            x: [tokens, hidden].
            chosen: int32 [tokens, k]: experts by their index in the model.
            weights: float32 [tokens, k].

        Returns:
            [tokens, hidden]; this device's part of it where it has inner columns only.
        """
        if x.device.is_cpu():
            return weighted_sum(self.choices(x, chosen), weights)
        return routed_experts(x, chosen, weights, *self._stacked())

    def grouped(self, rows: TensorValue, groups: ExpertGroups) -> TensorValue:
        """Each row through its expert, on an accelerator: [rows, hidden] to [rows, hidden]."""
        return grouped_experts(rows, groups, *self._stacked())

    def _stacked(self) -> tuple[TensorValue, TensorValue]:
        """[experts, 2 * inner, hidden] and [experts, hidden, inner]."""
        return (
            self.gate_up_proj.reshape((self.num_held, 2 * self.inner, self.hidden)),
            self.down_proj.reshape((self.num_held, self.hidden, self.inner)),
        )

    def choices(self, x: TensorValue, chosen: TensorValue) -> TensorValue:
        """Each choice's result, on the host.

        Args:
            x: [tokens, hidden].
            chosen: int32 [tokens, k]: experts by their position on this device, or -1.

        Returns:
            [tokens * k, hidden]; this device's part of it where it has inner columns only.
        """
        gate_up = expert_products(x, chosen, self.gate_up_proj, 2 * self.inner)
        gate, up = ops.split(gate_up, [self.inner, self.inner], axis=1)
        return expert_products(self.activation(gate) * up, chosen, self.down_proj, self.hidden)


def _share(x: TensorValue, holder: int, group: int) -> TensorValue:
    """The rows of a replica's tokens that one of its devices dispatches."""
    if group == 1:
        return x
    rank = holder % group
    edges = shares(x, group)
    own = ops.range(
        edges[rank],
        edges[rank + 1],
        1,
        out_dim=f"share_{holder}_seq_len",
        dtype=DType.int64,
        device=DeviceRef.CPU(),
    )
    # A slice whose bounds are values would take much longer to compile.
    return ops.gather(x, own.to(x.device), axis=0)
