"""The decoder: embeddings, layers of a mixer and a feed-forward, and the output head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from max import tree
from max.graph import BufferValue, TensorValue
from max.nn.kv_cache import KVCacheInputsPerDevice
from max.nn.layer import LayerList, Module

from models.config import DecoderConfig
from models.graph_api import GraphApiModule
from models.layers.attention import Attention
from models.layers.head import Embedding, OutputHead
from models.layers.mlp import MLP
from models.layers.norm import RMSNorm
from models.layers.rope import RopeTable, rope_table
from models.layers.step import Step
from models.role_contracts import DecoderInputs, DecoderOutputs
from models.weights import Computed


class DecoderLayer(Module):
    """One pre-norm layer: ``x + mixer(norm(x))``, then ``x + feed_forward(norm(x))``.

    Args:
        config: The decoder's configuration.
        layer: The layer's index in the model.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_norm, self.post_attention_norm = (
            LayerList(
                [
                    RMSNorm(
                        f"layers.{layer}.{name}.weight",
                        config.settings.hidden_size,
                        config.settings.norm_eps,
                        config.dtype,
                        device,
                    )
                    for device in config.placement.devices
                ]
            )
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config, layer)

    def __call__(self, xs: Sequence[TensorValue], steps: Sequence[Step]) -> list[TensorValue]:
        """Per device [tokens, hidden] to [tokens, hidden]."""
        xs = _add(xs, self.self_attn(_each(self.input_norm, xs), steps))
        return _add(xs, self.mlp(_each(self.post_attention_norm, xs)))


class CausalDecoder(GraphApiModule):
    """A decoder-only language model.

    Args:
        config: The finalized configuration, completed with the deployment.
    """

    supports_data_parallelism: ClassVar[bool] = False

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        settings, placement = config.settings, config.placement
        table = Computed(partial(rope_table, settings.rope, settings.head_dim, config.max_seq_len))
        self.rope = LayerList(
            [
                RopeTable(table, (config.max_seq_len, settings.head_dim), device)
                for device in placement.devices
            ]
        )
        self.embed_tokens = LayerList(
            [Embedding("embed_tokens.weight", config, device) for device in placement.devices]
        )
        self.layers = LayerList([DecoderLayer(config, layer) for layer in placement.layers])
        self.head = OutputHead(config, self.embed_tokens)

    def __call__(
        self, inputs: DecoderInputs[TensorValue, BufferValue]
    ) -> DecoderOutputs[TensorValue]:
        """Computes one step of a ragged batch."""
        caches = tree.leaves(inputs.kv, leaf=KVCacheInputsPerDevice)
        steps = [
            Step(inputs.input_row_offsets, cache, table())
            for cache, table in zip(caches, self.rope, strict=True)
        ]
        xs = [embed(inputs.tokens) for embed in self.embed_tokens]
        for layer in self.layers:
            xs = layer(xs, steps)
        return self.head(xs, inputs.input_row_offsets, inputs.return_n_logits)


def _each(norms: LayerList, xs: Sequence[TensorValue]) -> list[TensorValue]:
    return [norm(x) for norm, x in zip(norms, xs, strict=True)]


def _add(xs: Sequence[TensorValue], ys: Sequence[TensorValue]) -> list[TensorValue]:
    return [x + y for x, y in zip(xs, ys, strict=True)]
