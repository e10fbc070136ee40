"""What a family is, and the reading of Hugging Face configurations that families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.errors import ConfigError
from models.settings import ModelSettings, RopeSettings

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
"""The ``hidden_act`` values that the feed-forward layer computes."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: the checkpoints it serves and how to read them."""

    name: str
    """The registry name, which is also Hugging Face's ``model_type``."""

    architectures: tuple[str, ...]
    """The ``architectures`` entries of ``config.json`` that it serves."""

    settings: Callable[[ConfigReader], ModelSettings]
    """Maps a configuration to our settings."""


class ConfigReader:
    """Reads ``config.json`` values with errors that name the key and the file.

    Args:
        config: The configuration.
        source: Where it came from, for messages.
    """

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def error(self, key: str, problem: str) -> ConfigError:
        """A ``ConfigError`` about one key of this configuration."""
        return ConfigError(f"model.source: {self.source}: {key}: {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; ``default`` where the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "missing, and it has no default")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"{value!r} is not a positive integer")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """A finite number above ``least``; ``default`` where the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "missing, and it has no default")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"{value!r} is not a number")
        if not least < value < math.inf:
            raise self.error(key, f"{value!r} is not a number above {least:g}")
        return float(value)

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        """One of several words; ``default`` where the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            return default
        if value not in choices:
            raise self.error(key, f"{value!r} is not one of {', '.join(choices)}")
        return str(value)

    def nested(self, key: str) -> ConfigReader | None:
        """The object of a key; ``None`` where it is absent, null or empty."""
        value = self.config.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"{value!r} is no object")
        return ConfigReader(value, f"{self.source}: {key}")

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean; ``default`` where the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is not true or false")
        return value


def dense_settings(reader: ConfigReader, family: str, **family_facts: Any) -> ModelSettings:
    """The settings that every dense decoder of the Llama line shares.

    Args:
        reader: The configuration.
        family: The family's name.
        family_facts: What the family sets differently, by ``ModelSettings`` field.

    Raises:
        ConfigError: If a value is missing, of the wrong type, or not computed by our layers.
    """
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    num_layers = reader.integer("num_hidden_layers")
    if num_heads % num_kv_heads:
        raise reader.error(
            "num_key_value_heads",
            f"{num_heads} query heads do not divide over {num_kv_heads} key-value heads",
        )
    if reader.config.get("head_dim") is None and hidden_size % num_heads:
        raise reader.error(
            "head_dim", f"absent, and hidden_size {hidden_size} / {num_heads} heads is not whole"
        )
    head_dim = reader.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise reader.error("head_dim", f"{head_dim} is odd; rotary embeddings need an even one")
    hidden_act = reader.choice("hidden_act", ACTIVATIONS, "silu")
    if reader.number("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error("partial_rotary_factor", "only 1.0 is supported")
    max_position_embeddings = reader.integer("max_position_embeddings", 2048)
    facts: dict[str, Any] = {
        "family": family,
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": reader.integer("intermediate_size"),
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rope": rope_settings(reader, max_position_embeddings),
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": reader.flag("tie_word_embeddings"),
        "hidden_act": hidden_act,
        "windows": (None,) * num_layers,
    }
    return ModelSettings(**(facts | family_facts))


def layer_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """Each layer's window for configurations with ``use_sliding_window`` (Qwen2, Qwen3).

    As in Hugging Face's ``Qwen2Config``: ``layer_types`` where given, otherwise the layers from
    ``max_window_layers`` (28 by default) on.
    """
    num_layers = reader.integer("num_hidden_layers")
    if not reader.flag("use_sliding_window") or reader.config.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    window = reader.integer("sliding_window", 4096)
    layer_types = reader.config.get("layer_types")
    if layer_types is None:
        first = reader.config.get("max_window_layers", 28)
        if type(first) is not int:
            raise reader.error("max_window_layers", f"{first!r} is not an integer")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise reader.error("layer_types", f"{layer_types!r} is no list of {num_layers} entries")
    known = {"sliding_attention": window, "full_attention": None}
    for kind in layer_types:
        if not isinstance(kind, str) or kind not in known:
            raise reader.error("layer_types", f"{kind!r} is not one of {', '.join(known)}")
    return tuple(known[kind] for kind in layer_types)


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The ways of stretching rotary frequencies that are computed."""

_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"),
    *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}


def rope_settings(reader: ConfigReader, max_position_embeddings: int) -> RopeSettings:
    """Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (older).

    Source of the rules, precedence and defaults: Hugging Face ``modeling_rope_utils.py``.
    """
    rope = reader.nested("rope_scaling") or reader.nested("rope_parameters")
    if rope is None:
        return RopeSettings(theta=reader.number("rope_theta", 10000.0))
    unknown = sorted(set(rope.config) - _ROPE_KEYS)
    if unknown:
        raise rope.error(unknown[0], "unknown; rotary settings per layer type are not supported")
    theta = rope.number("rope_theta", reader.number("rope_theta", 10000.0))
    kind = rope.choice("rope_type", ROPE_TYPES, rope.choice("type", ROPE_TYPES, "default"))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "only 1.0 is supported")
    if kind == "default":
        return RopeSettings(theta=theta)
    original = reader.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", max_position_embeddings),
    )
    # Yarn's factor follows from the lengths where it is not given.
    factor = rope.number("factor", max_position_embeddings / original if kind == "yarn" else None)
    if kind == "linear":
        return RopeSettings(theta=theta, rope_type="linear", factor=factor)
    if kind == "llama3":
        return RopeSettings(
            theta=theta,
            rope_type="llama3",
            factor=factor,
            original_max_position=original,
            low_freq_factor=rope.number("low_freq_factor", 1.0),
            high_freq_factor=rope.number("high_freq_factor", 4.0),
        )
    return RopeSettings(
        theta=theta,
        rope_type="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """Yarn's temperature (arXiv 2309.00071, section 3.4): given, or 0.1 mscale ln(factor) + 1."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.config.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.config.get("mscale") and rope.config.get("mscale_all_dim"):
        return temperature(rope.number("mscale")) / temperature(rope.number("mscale_all_dim"))
    return temperature(1.0)
