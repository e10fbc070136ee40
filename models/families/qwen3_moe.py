"""Qwen3-MoE: Qwen3's attention, and experts in place of most feed-forwards."""

from __future__ import annotations

from models.families.base import ConfigReader, Family, dense_settings, expert_settings
from models.settings import ModelSettings, RouterSettings


def _settings(reader: ConfigReader) -> ModelSettings:
    num_layers = reader.integer("num_hidden_layers")
    bias = reader.flag("attention_bias")
    window = None
    if reader.flag("use_sliding_window") and reader.config.get("sliding_window", 4096) is not None:
        window = reader.integer("sliding_window", 4096)
    return dense_settings(
        reader,
        "qwen3_moe",
        num_kv_heads=reader.integer("num_key_value_heads", 4),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        windows=(window,) * num_layers,
        experts=expert_settings(
            reader,
            "num_experts",
            top_k=8,
            intermediate_size=reader.integer("moe_intermediate_size", 768),
            router=RouterSettings(normalize=reader.flag("norm_topk_prob")),
            layers=expert_layers(reader, num_layers),
        ),
    )


def expert_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    """Every ``decoder_sparse_step``-th layer, less those of ``mlp_only_layers``.

    Args:
        reader: The configuration.
        num_layers: Layers of the model.
    """
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise reader.error("mlp_only_layers", f"{dense!r} is no list of layers")
    return frozenset(
        layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense
    )


FAMILY = Family(name="qwen3_moe", architectures=("Qwen3MoeForCausalLM",), settings=_settings)
