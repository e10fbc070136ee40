"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn import kernels
from max.nn.attention import MHAMaskVariant
from max.nn.layer import LayerList, Module

from models.collectives import Collectives
from models.config import DecoderConfig
from models.kernels import attention, attention_layer, rotate_and_store
from models.layers.linear import Linear
from models.layers.norm import DividedRMSNorm, RMSNorm
from models.layers.rope import rotate_first
from models.layers.shards import Sharded
from models.layers.step import Step
from models.weights import Piece, columns_of, rows_of


class Attention(Sharded):
    """Self-attention of one layer: each device attends with its heads, and the results are summed.

    Args:
        config: The decoder's configuration.
        layer: The layer's index in the model.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, partial(AttentionShard, config, layer))
        self.norms_projections = config.settings.qk_norm == "projection"

    def __call__(
        self, xs: Sequence[TensorValue], steps: Sequence[Step], collectives: Collectives
    ) -> list[TensorValue]:
        """Per device [tokens, hidden] to [tokens, hidden]."""
        projected = [shard.qkv_proj(x) for shard, x in zip(self.shards, xs, strict=True)]
        if self.norms_projections:
            # The norm is over all devices' heads.
            squares = collectives.sum_in_replicas(
                [shard.squares(qkv) for shard, qkv in zip(self.shards, projected, strict=True)]
            )
            projected = [
                shard.normalise(qkv, sums)
                for shard, qkv, sums in zip(self.shards, projected, squares, strict=True)
            ]
        return collectives.sum_in_replicas(
            [
                shard(qkv, step)
                for shard, qkv, step in zip(self.shards, projected, steps, strict=True)
            ]
        )

    @property
    def is_plain(self) -> bool:
        """Whether each device's part is what one kernel computes on the host."""
        return not self.norms_projections and all(shard.is_plain for shard in self.shards)

    def with_norm(
        self, xs: Sequence[TensorValue], norms: Sequence[RMSNorm], steps: Sequence[Step]
    ) -> list[TensorValue]:
        """The same of the norm, added to the value itself, where it is plain."""
        parts = zip(self.shards, xs, norms, steps, strict=True)
        return [shard.with_norm(x, norm, step) for shard, x, norm, step in parts]


class AttentionShard(Module):
    """One device's heads of one layer.

    Args:
        config: The decoder's configuration.
        layer: The layer's index in the model.
        holder: The position of the device that holds it.
    """

    def __init__(self, config: DecoderConfig, layer: int, holder: int) -> None:
        super().__init__()
        settings, placement = config.settings, config.placement
        prefix = f"layers.{layer}.self_attn"
        heads = placement.heads(settings, holder)
        kv_heads = placement.kv_heads(settings, holder)
        self.head_dim = settings.head_dim
        self.num_heads, self.num_kv_heads = len(heads), len(kv_heads)
        self.kv_layer = config.kv_layer(layer)
        assert config.kv_params is not None
        self.kv_params = config.kv_params
        self.max_seq_len = config.max_seq_len
        self.window = _effective_window(settings.windows[layer], config.max_seq_len)
        q_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.gated = settings.attention_gate
        self.rotates_whole = settings.rope is not None and settings.rotary_dim == self.head_dim
        self.scale = self.head_dim**-0.5

        def stacked(kind: str) -> tuple[Piece, ...]:
            transposed = settings.transposed and kind == "weight"
            parts = {"q": heads, "k": kv_heads, "v": kv_heads}
            if settings.qkv_fused:
                # One tensor has all query heads, then all key heads, then all value heads.
                behind = {"q": 0, "k": settings.num_heads}
                behind["v"] = settings.num_heads + settings.num_kv_heads
                rows = [
                    range(part.start + behind[name], part.stop + behind[name])
                    for name, part in parts.items()
                ]
                name = f"{prefix}.qkv_proj.{kind}"
                return tuple(rows_of(name, part, self.head_dim, transposed) for part in rows)
            if self.gated:
                queries, gates = (
                    [
                        Piece(f"{prefix}.q_proj.{kind}", rows=(at, at + self.head_dim))
                        for head in heads
                        for at in [(2 * head + behind_query) * self.head_dim]
                    ]
                    for behind_query in (0, 1)
                )
                keys, values = (
                    rows_of(f"{prefix}.{name}_proj.{kind}", kv_heads, self.head_dim)
                    for name in ("k", "v")
                )
                return (*queries, keys, values, *gates)
            return tuple(
                rows_of(f"{prefix}.{name}_proj.{kind}", part, self.head_dim, transposed)
                for name, part in parts.items()
            )

        self.qkv_proj = Linear(
            config,
            holder,
            stacked("weight"),
            settings.hidden_size,
            q_dim + 2 * kv_dim + (q_dim if self.gated else 0),
            stacked("bias") if settings.qkv_bias else None,
            [
                (width, config.adapter_slot(holder, layer, f"{name}_proj"))
                for name, width in (("q", q_dim), ("k", kv_dim), ("v", kv_dim))
            ],
        )
        # The results of a replica's devices are summed, so one of them adds the bias.
        adds_bias = settings.o_bias and placement.rank(holder) == 0
        self.o_proj = Linear(
            config,
            holder,
            (columns_of(f"{prefix}.o_proj.weight", heads, self.head_dim, settings.transposed),),
            q_dim,
            settings.hidden_size,
            (Piece(f"{prefix}.o_proj.bias"),) if adds_bias else None,
            [(settings.hidden_size, config.adapter_slot(holder, layer, "o_proj"))],
        )
        self.clip = settings.qkv_clip
        self.widths = [q_dim, kv_dim, kv_dim]
        self.q_norm, self.k_norm = (
            RMSNorm(config, holder, f"{prefix}.{name}.weight", self.head_dim)
            if settings.qk_norm == "head"
            else None
            for name in ("q_norm", "k_norm")
        )
        if settings.qk_norm == "projection":
            self.projection_norms = LayerList(
                [
                    DividedRMSNorm(config, holder, f"{prefix}.{name}.weight", rows, self.head_dim)
                    for name, rows in (("q_norm", heads), ("k_norm", kv_heads))
                ]
            )

    def squares(self, qkv: TensorValue) -> TensorValue:
        """What the norms of queries and keys need of other devices, [tokens, 2]."""
        *parts, _ = ops.split(qkv, self.widths, axis=1)
        norms = zip(self.projection_norms, parts, strict=True)
        return ops.concat([norm.squares(x) for norm, x in norms], axis=1)

    def normalise(self, qkv: TensorValue, squares: TensorValue) -> TensorValue:
        """Normalises queries and keys over all devices' heads.

        Args:
            qkv: [tokens, queries + keys + values] of this device.
            squares: [tokens, 2]: the sum of all devices' ``squares``.
        """
        *parts, values = ops.split(qkv, self.widths, axis=1)
        sums = ops.split(squares, [1, 1], axis=1)
        norms = zip(self.projection_norms, parts, sums, strict=True)
        return ops.concat([*(norm(x, total) for norm, x, total in norms), values], axis=1)

    def __call__(self, qkv: TensorValue, step: Step) -> TensorValue:
        """Queries, keys and values of this device to its part of [tokens, hidden].

        Where heads are gated, the gates are behind the values.
        """
        assert step.kv is not None
        gates = None
        if self.gated:
            *parts, gates = ops.split(qkv, [*self.widths, self.widths[0]], axis=1)
            qkv = ops.concat(parts, axis=1)
        layer = ops.constant(self.kv_layer, DType.uint32, DeviceRef.CPU())
        if self.clip is not None:
            # Two constants: what is computed with one is compiled and run to compile the graph.
            least, most = (
                ops.constant(bound, qkv.dtype, qkv.device) for bound in (-self.clip, self.clip)
            )
            qkv = ops.max(ops.min(qkv, most), least)
        fused = self.q_norm is None and self.rotates_whole
        queries = (
            self._rotate_and_store(qkv, step, layer)
            if fused
            else self._store_step_by_step(qkv, step, layer)
        )
        attended = self._attend(queries, step, layer)
        if gates is not None:
            attended = attended.rebind(gates.shape) * ops.sigmoid(gates)
        return self.o_proj(attended)

    @property
    def is_plain(self) -> bool:
        """Whether it is what one kernel computes on the host."""
        products = (self.qkv_proj, self.o_proj)
        changed = self.gated or self.clip is not None or self.q_norm is not None
        return self.rotates_whole and not changed and all(p.alone for p in products)

    def with_norm(self, x: TensorValue, norm: RMSNorm, step: Step) -> TensorValue:
        """[tokens, hidden] and what the attention of its norm adds, on the host."""
        qkv, o = self.qkv_proj.alone, self.o_proj.alone
        assert qkv is not None
        assert o is not None
        assert step.kv is not None
        assert step.rope is not None
        return attention_layer(
            x,
            norm.weight,
            qkv,
            o,
            step.kv,
            step.row_offsets,
            step.rope,
            self.kv_layer,
            eps=norm.eps,
            offset=norm.offset,
            window=self._window_on_host,
            scale=self.scale,
        )

    @property
    def _window_on_host(self) -> int:
        return self.max_seq_len if self.window is None else self.window

    def _attend(self, queries: TensorValue, step: Step, layer: TensorValue) -> TensorValue:
        """[tokens, heads, head_dim], or with the last two as one, to [tokens, heads * head_dim]."""
        assert step.kv is not None
        width = self.num_heads * self.head_dim
        if queries.device.is_cpu():
            return attention(
                queries if queries.rank == 2 else queries.reshape((-1, width)),
                step.kv,
                step.row_offsets,
                self.kv_layer,
                window=self._window_on_host,
                scale=self.scale,
            )
        attended = kernels.flash_attention_ragged(
            self.kv_params,
            queries,
            step.row_offsets,
            step.kv,
            layer,
            MHAMaskVariant.CAUSAL_MASK
            if self.window is None
            else MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK,
            scale=self.scale,
            local_window_size=-1 if self.window is None else self.window,
        )
        return attended.reshape((-1, width))

    def _rotate_and_store(self, qkv: TensorValue, step: Step, layer: TensorValue) -> TensorValue:
        assert step.rope is not None
        assert step.kv is not None
        if qkv.device.is_cpu():
            return rotate_and_store(
                qkv, step.kv, step.row_offsets, step.rope, self.kv_layer, self.widths[0]
            )
        queries = kernels.rope_split_store_ragged(
            self.kv_params,
            qkv,
            step.row_offsets,
            ops.cast(step.rope, qkv.dtype),
            step.kv,
            layer,
            self.num_heads,
            interleaved=False,
        )
        return queries.reshape((-1, self.num_heads, self.head_dim))

    def _store_step_by_step(self, qkv: TensorValue, step: Step, layer: TensorValue) -> TensorValue:
        # MAX's kernel that norms, rotates and stores at once is for accelerators only.
        assert step.kv is not None
        queries, keys, values = ops.split(qkv, self.widths, axis=1)
        queries = queries.reshape((-1, self.num_heads, self.head_dim))
        keys, values = (x.reshape((-1, self.num_kv_heads, self.head_dim)) for x in (keys, values))
        if self.q_norm is not None:
            assert self.k_norm is not None
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        rope = step.rope
        if rope is not None:
            queries, keys = (
                rotate_first(heads, step.row_offsets, step.kv.cache_lengths, rope)
                for heads in (queries, keys)
            )
        kernels.store_k_cache_ragged(step.kv, keys, step.row_offsets, layer)
        kernels.store_v_cache_ragged(step.kv, values, step.row_offsets, layer)
        return queries


def _effective_window(window: int | None, max_seq_len: int) -> int | None:
    # A window that no sequence outgrows is full attention.
    return None if window is None or window >= max_seq_len else window
