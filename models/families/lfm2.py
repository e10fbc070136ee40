"""LFM2: gated short convolutions, and attention with normed heads in some layers."""

from __future__ import annotations

from models.families.base import (
    ConfigReader,
    Family,
    dense_settings,
    layers_of_kind,
    rope_settings,
)
from models.settings import ModelSettings, ShortConvSettings


def _settings(reader: ConfigReader) -> ModelSettings:
    num_layers = reader.integer("num_hidden_layers")
    width = reader.integer("conv_L_cache", 3)
    if width < 2:
        raise reader.error("conv_L_cache", f"{width} keeps no state; 2 and more are supported")
    max_position_embeddings = reader.integer("max_position_embeddings", 128000)
    conv = _conv_layers(reader, num_layers)
    if len(conv) == num_layers:
        raise reader.error("layer_types", "no layer attends, which is not supported")
    return dense_settings(
        reader,
        "lfm2",
        num_kv_heads=reader.integer("num_key_value_heads", 8),
        intermediate_size=_intermediate_size(reader),
        norm_eps=reader.number("norm_eps", 1e-5),
        max_position_embeddings=max_position_embeddings,
        rope=rope_settings(reader, max_position_embeddings, default_theta=1e6),
        # Older configurations call it tie_embedding.
        tie_word_embeddings=reader.flag(
            "tie_embedding", reader.flag("tie_word_embeddings", default=True)
        ),
        qk_norm="head",
        conv=ShortConvSettings(layers=conv, width=width, bias=reader.flag("conv_bias"))
        if conv
        else None,
    )


def _conv_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    found = layers_of_kind(reader, num_layers, ("conv", "full_attention"), "conv")
    if found is not None:
        return found
    attending = reader.config.get("full_attn_idxs")
    attending = list(range(num_layers)) if attending is None else attending
    if not isinstance(attending, list) or not all(type(n) is int for n in attending):
        raise reader.error("full_attn_idxs", f"{attending!r} is no list of layers")
    return frozenset(range(num_layers)) - frozenset(attending)


def _intermediate_size(reader: ConfigReader) -> int:
    """The width as ``Lfm2MLP`` adjusts it: two thirds, times a factor, rounded up."""
    size = reader.integer("block_ff_dim", reader.integer("intermediate_size", 12288))
    if not reader.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    if reader.config.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    multiple = reader.integer("block_multiple_of", 256)
    size = int(reader.number("block_ffn_dim_multiplier", 1.0) * size)
    return -(-size // multiple) * multiple


FAMILY = Family(
    name="lfm2",
    architectures=("Lfm2ForCausalLM",),
    settings=_settings,
    keeps_state=True,
    names=(
        (r"^embedding_norm\.", "norm."),
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
        (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
        (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.([qk])_layernorm\.", r".\1_norm."),
    ),
)
