"""Mixtral: Mistral's attention, and experts in place of every feed-forward."""

from __future__ import annotations

from models.families.base import (
    ConfigReader,
    Family,
    dense_settings,
    expert_settings,
    rope_settings,
)
from models.settings import ModelSettings, RouterSettings


def _settings(reader: ConfigReader) -> ModelSettings:
    window = (
        None if reader.config.get("sliding_window") is None else reader.integer("sliding_window")
    )
    max_position_embeddings = reader.integer("max_position_embeddings", 131072)
    return dense_settings(
        reader,
        "mixtral",
        max_position_embeddings=max_position_embeddings,
        rope=rope_settings(reader, max_position_embeddings, default_theta=1e6),
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        num_kv_heads=reader.integer("num_key_value_heads", 8),
        windows=(window,) * reader.integer("num_hidden_layers"),
        experts=expert_settings(
            reader,
            "num_local_experts",
            top_k=2,
            intermediate_size=reader.integer("intermediate_size"),
            router=RouterSettings(normalize=True),
        ),
    )


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    settings=_settings,
    names=(
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"\.w2\.", ".down_proj."),
    ),
)
