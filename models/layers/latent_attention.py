"""Multi-head latent attention: one compressed latent per token is cached, for all heads.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; tensor names as in Hugging Face's
``modeling_deepseek_v3.py``.
"""

from __future__ import annotations

from functools import partial

from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorValue, ops
from max.nn import kernels
from max.nn.layer import Module

from models.config import DecoderConfig
from models.kernels import accelerators, latent_attention, latent_context
from models.layers.linear import Linear
from models.layers.norm import RMSNorm
from models.layers.rope import rotate_last
from models.layers.shards import SummedMixer
from models.layers.step import Step
from models.settings import LatentSettings
from models.weights import DeclaredWeight, FromCheckpoint, Piece, columns_of, rows_of


class LatentAttention(SummedMixer):
    """Latent attention of one layer: each device attends with its heads to the whole latents.

    Args:
        config: The decoder's configuration.
        latent: The model's latent attention.
        layer: The layer's index in the model.
    """

    def __init__(self, config: DecoderConfig, latent: LatentSettings, layer: int) -> None:
        super().__init__(config, partial(LatentAttentionShard, config, latent, layer))


class LatentAttentionShard(Module):
    """One device's heads of one layer.

    Args:
        config: The decoder's configuration.
        latent: The model's latent attention.
        layer: The layer's index in the model.
        holder: The position of the device that holds it.
    """

    def __init__(
        self, config: DecoderConfig, latent: LatentSettings, layer: int, holder: int
    ) -> None:
        super().__init__()
        settings, placement = config.settings, config.placement
        prefix = f"layers.{layer}.self_attn"
        heads = placement.heads(settings, holder)
        hidden = settings.hidden_size
        self.latent = latent
        self.num_heads = len(heads)
        self.kv_layer = config.kv_layer(layer)
        assert config.kv_params is not None
        self.kv_params = config.kv_params

        # The projections that compress, in one product.
        parts = [("kv_a_proj_with_mqa", latent.cached_dim)]
        query = ("q_proj", hidden)
        if latent.query_rank is not None:
            parts.insert(0, ("q_a_proj", latent.query_rank))
            query = ("q_b_proj", latent.query_rank)
            self.q_a_norm = RMSNorm(
                config,
                holder,
                f"{prefix}.q_a_layernorm.weight",
                latent.query_rank,
                eps=latent.norm_eps,
            )
        weights, biases = (
            tuple(Piece(f"{prefix}.{name}.{kind}", rows=(0, rows)) for name, rows in parts)
            for kind in ("weight", "bias")
        )
        self.widths = [rows for _, rows in parts]
        self.a_proj = Linear(
            config, holder, weights, hidden, sum(self.widths), biases if latent.bias else None
        )
        self.q_proj = Linear(
            config,
            holder,
            (rows_of(f"{prefix}.{query[0]}.weight", heads, latent.query_dim),),
            query[1],
            self.num_heads * latent.query_dim,
        )
        self.kv_a_norm = RMSNorm(
            config, holder, f"{prefix}.kv_a_layernorm.weight", latent.kv_rank, eps=latent.norm_eps
        )
        width = latent.nope_dim + latent.value_dim
        self.kv_b_proj = DeclaredWeight(
            "kv_b_proj",
            config.dtype,
            (self.num_heads * width, latent.kv_rank),
            placement.devices[holder],
            FromCheckpoint((rows_of(f"{prefix}.kv_b_proj.weight", heads, width),)),
            holder,
        )
        # The results of a replica's devices are summed, so one of them adds the bias.
        adds_bias = latent.bias and placement.rank(holder) == 0
        self.o_proj = Linear(
            config,
            holder,
            (columns_of(f"{prefix}.o_proj.weight", heads, latent.value_dim),),
            self.num_heads * latent.value_dim,
            hidden,
            (Piece(f"{prefix}.o_proj.bias"),) if adds_bias else None,
        )

    def __call__(self, x: TensorValue, step: Step) -> TensorValue:
        """[tokens, hidden] to this device's part of [tokens, hidden]."""
        *compressed_query, compressed = ops.split(self.a_proj(x), self.widths, axis=1)
        queries = self.q_proj(self.q_a_norm(compressed_query[0]) if compressed_query else x)
        queries = queries.reshape((-1, self.num_heads, self.latent.query_dim))
        attend = self._attend_on_host if x.device.is_cpu() else self._attend_on_accelerator
        return self.o_proj(attend(queries, compressed, step))

    def _attend_on_accelerator(
        self, queries: TensorValue, compressed: TensorValue, step: Step
    ) -> TensorValue:
        """[tokens, heads, query_dim] and [tokens, cached_dim] to [tokens, heads * value_dim]."""
        assert step.kv is not None
        assert step.rope is not None
        assert step.prefill is not None
        assert step.context_length is not None
        attended = accelerators.latent_attention(
            queries,
            compressed,
            self.kv_a_norm.weight,
            self.kv_b_proj,
            step.rope,
            step.row_offsets,
            step.kv,
            params=self.kv_params,
            layer=self.kv_layer,
            latent=self.latent,
            prefill=step.prefill,
            context_length=step.context_length,
        )
        return attended.reshape((-1, self.num_heads * self.latent.value_dim))

    def _attend_on_host(
        self, queries: TensorValue, compressed: TensorValue, step: Step
    ) -> TensorValue:
        """[tokens, heads, query_dim] and [tokens, cached_dim] to [tokens, heads * value_dim]."""
        latent = self.latent
        assert step.kv is not None
        assert step.workspace is not None
        assert step.context_length is not None
        key_values, positions = ops.split(compressed, [latent.kv_rank, latent.rope_dim], axis=1)
        latents = ops.concat([self.kv_a_norm(key_values), positions], axis=1)
        queries = self._rotate(queries, step)
        latents = self._rotate(latents.reshape((-1, 1, latent.cached_dim)), step)
        kernels.store_k_cache_ragged(
            step.kv,
            latents,
            step.row_offsets,
            ops.constant(self.kv_layer, DType.uint32, DeviceRef.CPU()),
        )
        latent_context(
            step.workspace, step.kv, step.row_offsets, self.kv_layer, step.context_length
        )
        return latent_attention(
            queries.reshape((-1, self.num_heads * latent.query_dim)),
            self.kv_b_proj,
            step.workspace,
            step.kv,
            step.row_offsets,
            num_heads=self.num_heads,
            value_dim=latent.value_dim,
            page_size=self.kv_params.page_size,
            scale=latent.scale,
        )

    def _rotate(self, heads: TensorValue, step: Step) -> TensorValue:
        assert step.kv is not None
        assert step.rope is not None
        return rotate_last(
            heads, step.row_offsets, step.kv.cache_lengths, step.rope, self.latent.interleaved
        )


def workspace_types(config: DecoderConfig, latent: LatentSettings) -> tuple[BufferType, ...]:
    """What each device gathers its replica's latents into, for one layer after the other.

    Args:
        config: The decoder's configuration.
        latent: The model's latent attention.
    """
    rows = config.max_context_length
    return tuple(
        BufferType(config.dtype, [rows, latent.cached_dim], device)
        for device in config.placement.devices
    )
