"""A deployment in the terms of MAX's own server: its arguments, and what it can't serve."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from builder.resolve import Plan
from builder.schema import Encoding
from builder.sources import cache_folder
from builder.tokenizer import load_tokenizer, stop_ids
from models.checkpoints import Checkpoint, SafetensorsCheckpoint
from models.errors import ConfigError

ARCHITECTURES = "models.architectures"
"""The module that MAX imports our decoders from."""


def check_servable(plan: Plan) -> None:
    """The deployment is one that MAX's server can run.

    Raises:
        ConfigError: If it is not, with the reason.
    """
    deployment, family = plan.deployment, plan.checkpoint.family
    devices, on_host = deployment.devices.count, plan.capacity is None
    reasons = {
        "devices.count": on_host
        and devices > 1
        and f"{devices} simulated devices; MAX has one CPU, and serves on that",
        "parallel.pipeline": deployment.parallel.pipeline > 1
        and "several stages; MAX's server has one graph of all layers",
        "parallel.expert": deployment.parallel.expert > deployment.parallel.tensor
        and deployment.parallel.data == 1
        and "experts beside layers that each device has all of; MAX divides those, or has replicas",
        "vision": deployment.vision
        and "images; what MAX 26.7 prepares them with needs PyTorch and torchvision",
        "lora": plan.stages[0].config.lora is not None
        and "adapters; MAX 26.7 has them in layers of its own only",
        "artifact": deployment.artifact is not None
        and "exported graphs; MAX's server compiles its own, or finds them in the cache",
        "constants": bool(deployment.constants)
        and "weights as graph inputs; MAX's server holds them itself",
        "return_logits": deployment.return_logits is not None
        and "it; MAX's server chooses the logits that a request asks for",
        "kv.num_pages": deployment.kv.num_pages is not None
        and "a number of pages; MAX's server takes what fits in the memory",
    }
    if plan.encoding is Encoding.stored:
        raise ConfigError(
            "model.encoding: task=serve can't serve stored: MAX's server reads the weights itself, "
            "from safetensors\n  what works: model.encoding=float32"
        )
    for key, reason in reasons.items():
        if reason:
            raise ConfigError(f"deployment.{key}: task=serve can't serve {reason}")
    if family.takes_images:
        raise ConfigError(
            f"model.source: task=serve can't serve {family.name}: what MAX 26.7 reads its images "
            "and texts with needs PyTorch and torchvision"
        )
    if load_tokenizer(plan.checkpoint, plan.model.tokenizer) is None:
        raise ConfigError(
            f"model.source: {plan.checkpoint.path} has no tokenizer, which a server needs\n"
            "  what works: model.tokenizer=FOLDER"
        )


def server_arguments(plan: Plan, folder: Path) -> list[str]:
    """What MAX's commands are given beside what they are to do.

    Args:
        plan: The plan.
        folder: The model's folder.
    """
    batch, parallel = plan.batch, plan.deployment.parallel
    devices = "cpu"
    if plan.capacity is not None:
        devices = f"gpu:{','.join(map(str, range(plan.deployment.devices.count)))}"
    return [
        f"--custom-architectures={ARCHITECTURES}",
        f"--model-path={folder}",
        f"--served-model-name={plan.model.name}",
        f"--devices={devices}",
        f"--device-memory-utilization={plan.deployment.devices.memory_utilization:g}",
        f"--data-parallel-degree={parallel.data}",
        f"--ep-size={parallel.expert}",
        f"--quantization-encoding={plan.dtype.name}",
        f"--max-length={plan.max_length}",
        f"--max-batch-size={batch.max_batch_size}",
        f"--max-batch-input-tokens={batch.max_batch_input_tokens}",
        f"--kv-cache-page-size={plan.deployment.kv.page_size}",
        f"--{'' if plan.prefix_caching else 'no-'}enable-prefix-caching",
    ]


def max_command(*arguments: str) -> list[str]:
    """The command line of MAX's own command, of the environment that this process runs in.

    Args:
        arguments: What it is given.
    """
    return [str(Path(sys.executable).parent / "max"), *arguments]


def served_folder(plan: Plan) -> Path:
    """A Hugging Face folder of the plan's model, which MAX's server reads.

    Args:
        plan: The plan.

    Returns:
        The checkpoint's own folder where it is one with its tokenizer in it; otherwise one that is
        made of it in the cache, with float32 weights, and kept.
    """
    checkpoint = plan.checkpoint
    if isinstance(checkpoint, SafetensorsCheckpoint) and plan.model.tokenizer is None:
        return checkpoint.path
    stamp = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in _files(plan)]
    name = hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]
    folder = cache_folder() / "served" / f"{plan.model.name}-{name}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        _write_tokenizer(plan, made)
        _write_model(checkpoint, made)
        made.replace(folder)
    return folder


def _files(plan: Plan) -> list[Path]:
    """The files that a folder is made of."""
    roots = [plan.checkpoint.path]
    if plan.model.tokenizer is not None:
        roots.append(Path(plan.model.tokenizer).expanduser())
    return [
        file
        for root in roots
        for file in (sorted(root.iterdir()) if root.is_dir() else [root])
        if file.is_file()
    ]


def _write_model(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes the configuration and the weights, by Hugging Face's names."""
    config = {**checkpoint.config, "dtype": "float32"}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": sorted(stop_ids(checkpoint))})
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": np.ascontiguousarray(
            checkpoint.read(name)
        )
        for name in checkpoint.tensors
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(plan: Plan, folder: Path) -> None:
    tokenizer = load_tokenizer(plan.checkpoint, plan.model.tokenizer)
    assert tokenizer is not None, "a checkpoint without a tokenizer is refused"
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": plan.settings.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **tokenizer.template_variables,
    }
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(file: Path, contents: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
