"""Qwen3-Next: the gated delta rule, gated attention in every fourth layer, and experts."""

from __future__ import annotations

from models.families.base import (
    ConfigReader,
    Family,
    dense_settings,
    expert_settings,
    layers_of_kind,
    rope_parameters,
    rope_settings,
)
from models.families.qwen3_moe import expert_layers
from models.settings import DeltaSettings, ModelSettings, RouterSettings


def _settings(reader: ConfigReader) -> ModelSettings:
    num_layers = reader.integer("num_hidden_layers")
    bias = reader.flag("attention_bias")
    max_position_embeddings = reader.integer("max_position_embeddings", 32768)
    head_dim = reader.integer("head_dim", 256)
    delta = _delta(reader, num_layers)
    if len(delta.layers) == num_layers:
        raise reader.error("layer_types", "no layer attends, which is not supported")
    experts = expert_layers(reader, num_layers)
    return dense_settings(
        reader,
        "qwen3_next",
        num_kv_heads=reader.integer("num_key_value_heads", 2),
        head_dim=head_dim,
        rotated_dim=_rotated_dim(reader, head_dim),
        max_position_embeddings=max_position_embeddings,
        rope=rope_settings(reader, max_position_embeddings, partial=True),
        norm_offset=1.0,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        attention_gate=True,
        delta=delta if delta.layers else None,
        experts=expert_settings(
            reader,
            "num_experts",
            top_k=10,
            intermediate_size=reader.integer("moe_intermediate_size", 512),
            shared_size=reader.integer("shared_expert_intermediate_size", 512),
            shared_gate=True,
            router=RouterSettings(normalize=reader.flag("norm_topk_prob", default=True)),
            layers=experts,
        )
        if experts
        else None,
    )


def _rotated_dim(reader: ConfigReader, head_dim: int) -> int:
    rope = rope_parameters(reader) or reader
    factor = rope.number("partial_rotary_factor", reader.number("partial_rotary_factor", 0.25))
    rotated = int(head_dim * factor)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise reader.error(
            "partial_rotary_factor", f"{factor} of {head_dim} dimensions are {rotated}: no pairs"
        )
    return rotated


def _delta(reader: ConfigReader, num_layers: int) -> DeltaSettings:
    key_heads = reader.integer("linear_num_key_heads", 16)
    value_heads = reader.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise reader.error(
            "linear_num_value_heads", f"{value_heads} do not divide over {key_heads} key heads"
        )
    width = reader.integer("linear_conv_kernel_dim", 4)
    if width < 2:
        raise reader.error("linear_conv_kernel_dim", f"{width} keeps no state")
    return DeltaSettings(
        layers=_delta_layers(reader, num_layers),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=reader.integer("linear_key_head_dim", 128),
        value_dim=reader.integer("linear_value_head_dim", 128),
        width=width,
    )


def _delta_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    kinds = ("linear_attention", "full_attention")
    found = layers_of_kind(reader, num_layers, kinds, "linear_attention")
    if found is not None:
        return found
    interval = reader.integer("full_attention_interval", 4)
    return frozenset(layer for layer in range(num_layers) if (layer + 1) % interval)


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    settings=_settings,
    keeps_state=True,
    names=((r"\.shared_expert\.", ".shared_experts."),),
    # The head that predicts further tokens.
    unread=("mtp.",),
)
