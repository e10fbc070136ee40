"""What a family is, and the reading of Hugging Face configurations that families share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.errors import ConfigError
from models.layers.activations import ACTIVATIONS
from models.settings import ExpertSettings, ModelSettings, RopeSettings, RouterSettings


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: the checkpoints it serves and how to read them."""

    name: str
    """The registry name, which is also Hugging Face's ``model_type``."""

    architectures: tuple[str, ...]
    """The ``architectures`` entries of ``config.json`` that it serves."""

    settings: Callable[[ConfigReader], ModelSettings]
    """Maps a configuration to our settings."""

    names: tuple[tuple[str, str], ...] = ()
    """Patterns in Hugging Face's tensor names, and what the Llama line calls the same."""

    keeps_state: bool = False
    """Whether a request has state beside its keys and values, which no page of another holds."""

    takes_images: bool = False
    """Whether images can be served."""

    unread: tuple[str, ...] = ()
    """Beginnings of the names of tensors that checkpoints have and a decoder does not read."""

    def canonical(self, name: str) -> str:
        """The name by which our layers know a checkpoint's tensor."""
        for pattern, replacement in self.names:
            name = re.sub(pattern, replacement, name)
        return name


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

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer from ``least`` on; ``default`` where the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "missing, and it has no default")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer from {least} on"
            raise self.error(key, f"{value!r} is not {kind}")
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
    head_dim = family_facts.get("head_dim") or _head_dim(reader, hidden_size, num_heads)
    if head_dim % 2:
        raise reader.error("head_dim", f"{head_dim} is odd; rotary embeddings need an even one")
    hidden_act = reader.choice("hidden_act", tuple(ACTIVATIONS), "silu")
    if "rotated_dim" not in family_facts:
        _check_whole_rotation(reader)
    max_position_embeddings = reader.integer("max_position_embeddings", 2048)
    facts: dict[str, Any] = {
        "family": family,
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": family_facts.get("intermediate_size")
        or reader.integer("intermediate_size"),
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rope": family_facts.get("rope") or rope_settings(reader, max_position_embeddings),
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": reader.flag("tie_word_embeddings"),
        "hidden_act": hidden_act,
        "windows": (None,) * num_layers,
    }
    return ModelSettings(**(facts | family_facts))


def _head_dim(reader: ConfigReader, hidden_size: int, num_heads: int) -> int:
    if reader.config.get("head_dim") is None and hidden_size % num_heads:
        raise reader.error(
            "head_dim", f"absent, and hidden_size {hidden_size} / {num_heads} heads is not whole"
        )
    return reader.integer("head_dim", hidden_size // num_heads)


def expert_settings(
    reader: ConfigReader,
    num_experts_key: str,
    *,
    num_experts: int | None = None,
    intermediate_size: int,
    router: RouterSettings,
    top_k: int | None = None,
    layers: frozenset[int] | None = None,
    **family_facts: Any,
) -> ExpertSettings:
    """The settings that every mixture of experts shares.

    Args:
        reader: The configuration.
        num_experts_key: The family's name of the number of experts.
        num_experts: The family's default of it.
        intermediate_size: Width of one expert's inner layer.
        router: How experts are chosen.
        top_k: The family's default of ``num_experts_per_tok``.
        layers: The layers that have experts; all by default.
        family_facts: What the family sets differently, by ``ExpertSettings`` field.

    Raises:
        ConfigError: If more experts are chosen than there are, or groups don't divide.
    """
    # Transformers 5 reads and writes some families' key under another's name.
    aliases = (num_experts_key, "num_local_experts", "num_experts")
    named = [key for key in aliases if reader.config.get(key) is not None]
    num_experts = reader.integer(named[0] if named else num_experts_key, num_experts)
    top_k = reader.integer("num_experts_per_tok", top_k)
    if num_experts % router.num_groups:
        raise reader.error(
            "n_group", f"{num_experts} experts do not divide over {router.num_groups} groups"
        )
    if router.top_groups > router.num_groups:
        raise reader.error(
            "topk_group", f"{router.top_groups} of {router.num_groups} groups cannot be chosen"
        )
    if router.group_score == "top2" and num_experts // router.num_groups < 2:
        raise reader.error(
            "n_group",
            f"{num_experts} experts in {router.num_groups} groups; a group's score needs two",
        )
    choices = num_experts // router.num_groups * router.top_groups
    if top_k > choices:
        raise reader.error("num_experts_per_tok", f"{top_k} of {choices} experts cannot be chosen")
    return ExpertSettings(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=intermediate_size,
        router=router,
        layers=frozenset(range(reader.integer("num_hidden_layers"))) if layers is None else layers,
        **family_facts,
    )


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


def layers_of_kind(
    reader: ConfigReader, num_layers: int, kinds: Sequence[str], wanted: str
) -> frozenset[int] | None:
    """The layers that ``layer_types`` says are of a kind; ``None`` where it is absent.

    Args:
        reader: The configuration.
        num_layers: Layers of the model.
        kinds: Every kind that is computed.
        wanted: The kind.

    Raises:
        ConfigError: If it is no list with one of the kinds per layer.
    """
    found = reader.config.get("layer_types")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != num_layers:
        raise reader.error("layer_types", f"{found!r} is no list of {num_layers} entries")
    for kind in found:
        if kind not in kinds:
            raise reader.error("layer_types", f"{kind!r} is not one of {', '.join(kinds)}")
    return frozenset(layer for layer, kind in enumerate(found) if kind == wanted)


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The ways of stretching rotary frequencies that are computed."""

_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"),
    *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}


def rope_parameters(reader: ConfigReader) -> ConfigReader | None:
    """The object that describes the rotation: transformers 5's name, or the older one."""
    return reader.nested("rope_scaling") or reader.nested("rope_parameters")


def rope_settings(
    reader: ConfigReader,
    max_position_embeddings: int,
    default_theta: float = 10000.0,
    *,
    partial: bool = False,
) -> RopeSettings:
    """Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (older).

    Source of the rules, precedence and defaults: Hugging Face ``modeling_rope_utils.py``.

    Args:
        reader: The configuration.
        max_position_embeddings: The longest sequence the checkpoint is made for.
        default_theta: The family's default base.
        partial: Whether the family rotates a part of each head.
    """
    rope = rope_parameters(reader)
    if rope is None:
        return RopeSettings(theta=reader.number("rope_theta", default_theta))
    unknown = sorted(set(rope.config) - _ROPE_KEYS)
    if unknown:
        raise rope.error(unknown[0], "unknown; rotary settings per layer type are not supported")
    theta = rope.number("rope_theta", reader.number("rope_theta", default_theta))
    kind = rope.choice("rope_type", ROPE_TYPES, rope.choice("type", ROPE_TYPES, "default"))
    if not partial:
        _check_whole_rotation(rope)
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


def _check_whole_rotation(reader: ConfigReader) -> None:
    if reader.number("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error("partial_rotary_factor", "only 1.0 is supported")


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """What cos and sin are multiplied with: given, or yarn's temperature."""
    if rope.config.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.config.get("mscale") and rope.config.get("mscale_all_dim"):
        named, all_dims = rope.number("mscale"), rope.number("mscale_all_dim")
        return yarn_temperature(factor, named) / yarn_temperature(factor, all_dims)
    return yarn_temperature(factor, 1.0)


def yarn_temperature(factor: float, mscale: float) -> float:
    """``0.1 mscale ln(factor) + 1`` (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
