"""Llama 2, 3 and the models of the same architecture (SmolLM2, TinyLlama, Yi)."""

from __future__ import annotations

from models.families.base import ConfigReader, Family, dense_settings
from models.settings import ModelSettings


def _settings(reader: ConfigReader) -> ModelSettings:
    bias = reader.flag("attention_bias")
    return dense_settings(
        reader, "llama", qkv_bias=bias, o_bias=bias, mlp_bias=reader.flag("mlp_bias")
    )


FAMILY = Family(name="llama", architectures=("LlamaForCausalLM",), settings=_settings)
