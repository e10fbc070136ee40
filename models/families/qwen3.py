"""Qwen3: an RMS norm on each query and key head, heads of 128 unless said otherwise."""

from __future__ import annotations

from models.families.base import ConfigReader, Family, dense_settings, layer_windows
from models.settings import ModelSettings


def _settings(reader: ConfigReader) -> ModelSettings:
    bias = reader.flag("attention_bias")
    return dense_settings(
        reader,
        "qwen3",
        head_dim=reader.integer("head_dim", 128),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        windows=layer_windows(reader),
    )


FAMILY = Family(name="qwen3", architectures=("Qwen3ForCausalLM",), settings=_settings)
