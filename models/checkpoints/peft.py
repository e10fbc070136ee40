"""Adapters in PEFT's layout: ``adapter_config.json`` and ``adapter_model.safetensors``.

Source: https://github.com/huggingface/peft, ``LoraConfig`` and ``save_pretrained``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.checkpoints.base import read_json_object
from models.checkpoints.safetensors import read_tensors
from models.errors import ConfigError
from models.lora import Adapter, Array

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?:model\.)?(.+)\.lora_([AB])\.weight")

_REFUSED = {
    "use_dora": "DoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "fan_in_fan_out": "transposed weights are not supported",
    "modules_to_save": "trained copies of whole modules are not supported",
    "rank_pattern": "ranks per module are not supported",
    "alpha_pattern": "alphas per module are not supported",
    "trainable_token_indices": "trained tokens are not supported",
    "target_parameters": "adapters of parameters are not supported",
    "lora_bias": "a bias is not supported",
}
"""What other computations need, and what is said of it."""


def open_adapter(folder: Path, canonical: Callable[[str], str] = str) -> Adapter:
    """Reads an adapter.

    Args:
        folder: The PEFT folder.
        canonical: The name by which our layers know a checkpoint's tensor; by default the same.

    Raises:
        ConfigError: If it is not one, or computes something else than LoRA.
    """
    config = _config(folder)
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"deployment.lora: {folder}: r: {rank!r} is not a positive integer")
    alpha = config.get("lora_alpha", 8)
    if not isinstance(alpha, int | float):
        raise ConfigError(f"deployment.lora: {folder}: lora_alpha: {alpha!r} is not a number")
    scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
    return Adapter(source=str(folder), rank=rank, scale=scale, pairs=_pairs(folder, canonical))


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(f"deployment.lora: no such folder: {folder}")
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"deployment.lora: {folder} has no adapter_config.json")
    config = read_json_object(folder / "adapter_config.json")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(f"deployment.lora: {folder}: peft_type {kind} is not supported, LORA is")
    for key, problem in _REFUSED.items():
        if config.get(key):
            raise ConfigError(f"deployment.lora: {folder}: {key}: {problem}")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"deployment.lora: {folder}: bias: trained biases are not supported")
    return config


def _pairs(folder: Path, canonical: Callable[[str], str]) -> dict[str, tuple[Array, Array]]:
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ConfigError(f"deployment.lora: {folder} has no adapter_model.safetensors")
    halves: dict[str, dict[str, Array]] = {}
    for name, values in read_tensors(file).items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise ConfigError(
                f"deployment.lora: {folder}: {name} is no A or B of a product, and would not be "
                "used"
            )
        module = canonical(f"{found[1]}.weight").removesuffix(".weight")
        halves.setdefault(module, {})[found[2]] = values
    if not halves:
        raise ConfigError(f"deployment.lora: {folder} adapts nothing")
    for module, half in halves.items():
        if len(half) != 2:
            raise ConfigError(f"deployment.lora: {folder}: {module} has {' '.join(half)} alone")
    return {module: (half["A"], half["B"]) for module, half in halves.items()}
