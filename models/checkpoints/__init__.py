"""Checkpoints on disk: what they hold, from the header alone, and their values on demand."""

from __future__ import annotations

from pathlib import Path

from models.checkpoints.base import Checkpoint, TensorInfo, read_json_object
from models.checkpoints.gguf import GGUFCheckpoint
from models.checkpoints.safetensors import SafetensorsCheckpoint
from models.errors import ConfigError

__all__ = [
    "Checkpoint",
    "GGUFCheckpoint",
    "SafetensorsCheckpoint",
    "TensorInfo",
    "open_checkpoint",
    "read_json_object",
]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint and reads its header; no weights are read.

    Args:
        path: A GGUF file, or a folder in Hugging Face's layout.

    Raises:
        ConfigError: If nothing is there, the format is unknown, or a file is damaged.
    """
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return GGUFCheckpoint(path)
        raise ConfigError(
            f"model.source: {path} is neither a .gguf file nor a Hugging Face folder\n"
            "  what works: a folder with config.json and *.safetensors, or one .gguf file"
        )
    raise ConfigError(f"model.source: no such file or folder: {path}")
