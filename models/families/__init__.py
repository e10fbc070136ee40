"""The families: which checkpoints this project serves, and how each one's settings map.

Adding a family is one new file here and one line in ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.errors import ConfigError
from models.families import (
    deepseek_v2,
    deepseek_v3,
    gpt2,
    idefics3,
    lfm2,
    llama,
    mistral,
    mixtral,
    olmoe,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
)
from models.families.base import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen3_moe.FAMILY,
    olmoe.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    lfm2.FAMILY,
    qwen3_next.FAMILY,
    gpt2.FAMILY,
    idefics3.FAMILY,
)


def family_for(config: Mapping[str, Any], *, source: str) -> Family:
    """Finds the family that serves a Hugging Face configuration.

    Args:
        config: The contents of ``config.json`` (or the same keys made from GGUF metadata).
        source: Where it came from, for the message.

    Raises:
        ConfigError: If no family serves any of its ``architectures``.
    """
    named = config.get("architectures")
    architectures = [str(name) for name in named] if isinstance(named, list) else []
    for family in FAMILIES:
        if set(architectures) & set(family.architectures):
            return family
    served = ", ".join(name for family in FAMILIES for name in family.architectures)
    found = ", ".join(architectures) or "none named"
    raise ConfigError(
        f"model.source: the architecture of {source} is not supported: {found}\n"
        f"  supported: {served}"
    )
