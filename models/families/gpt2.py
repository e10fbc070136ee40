"""GPT-2: learned positions, layer norms, and a feed-forward without a gate."""

from __future__ import annotations

from models.families.base import ConfigReader, Family
from models.layers.activations import ACTIVATIONS
from models.settings import ModelSettings


def _settings(reader: ConfigReader) -> ModelSettings:
    hidden_size = reader.integer("n_embd", 768)
    num_heads = reader.integer("n_head", 12)
    num_layers = reader.integer("n_layer", 12)
    if hidden_size % num_heads:
        raise reader.error("n_head", f"{hidden_size} dimensions do not divide over {num_heads}")
    for key, supported in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if reader.flag(key, supported) is not supported:
            raise reader.error(key, f"only {str(supported).lower()} is supported")
    return ModelSettings(
        family="gpt2",
        vocab_size=reader.integer("vocab_size", 50257),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=reader.integer("n_inner", 4 * hidden_size),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        norm="layer",
        rope=None,
        max_position_embeddings=reader.integer("n_positions", 1024),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=True),
        hidden_act=reader.choice("activation_function", tuple(ACTIVATIONS), "gelu_new"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        mlp_gated=False,
        qkv_fused=True,
        transposed=True,
        windows=(None,) * num_layers,
    )


FAMILY = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    settings=_settings,
    names=(
        (r"^wte\.", "embed_tokens."),
        (r"^wpe\.", "embed_positions."),
        (r"^h\.", "layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"^ln_f\.", "norm."),
        (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
        (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
        (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    ),
)
