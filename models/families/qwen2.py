"""Qwen2 and Qwen2.5: a bias on the query, key and value projections, never on the output's."""

from __future__ import annotations

from models.families.base import ConfigReader, Family, dense_settings, layer_windows
from models.settings import ModelSettings


def _settings(reader: ConfigReader) -> ModelSettings:
    return dense_settings(reader, "qwen2", qkv_bias=True, windows=layer_windows(reader))


FAMILY = Family(name="qwen2", architectures=("Qwen2ForCausalLM",), settings=_settings)
