"""OLMoE: queries and keys normalised over all heads at once, and experts in every layer."""

from __future__ import annotations

from models.families.base import ConfigReader, Family, dense_settings, expert_settings
from models.settings import ModelSettings, RouterSettings


def _settings(reader: ConfigReader) -> ModelSettings:
    bias = reader.flag("attention_bias")
    clip = None if reader.config.get("clip_qkv") is None else reader.number("clip_qkv")
    return dense_settings(
        reader,
        "olmoe",
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        max_position_embeddings=reader.integer("max_position_embeddings", 4096),
        qk_norm="projection",
        qkv_clip=clip,
        qkv_bias=bias,
        o_bias=bias,
        experts=expert_settings(
            reader,
            "num_experts",
            top_k=8,
            intermediate_size=reader.integer("intermediate_size", 2048),
            router=RouterSettings(normalize=reader.flag("norm_topk_prob")),
        ),
    )


FAMILY = Family(name="olmoe", architectures=("OlmoeForCausalLM",), settings=_settings)
