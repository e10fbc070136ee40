"""Mistral: the Llama architecture with a sliding window on every layer."""

from __future__ import annotations

from models.families.base import ConfigReader, Family, dense_settings
from models.settings import ModelSettings


def _settings(reader: ConfigReader) -> ModelSettings:
    # An absent key is Hugging Face's default window, a null one is none.
    window = (
        None
        if reader.config.get("sliding_window", 4096) is None
        else reader.integer("sliding_window", 4096)
    )
    return dense_settings(
        reader,
        "mistral",
        num_kv_heads=reader.integer("num_key_value_heads", 8),
        windows=(window,) * reader.integer("num_hidden_layers"),
    )


FAMILY = Family(name="mistral", architectures=("MistralForCausalLM",), settings=_settings)
