"""The interface that every checkpoint format offers."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import ConfigError
from models.families import family_for
from models.families.base import ConfigReader, Family
from models.settings import ModelSettings
from models.storage import Stored

_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.attention\.bias$|\.attn\.bias$|\.masked_bias$")
"""Buffers that old exporters saved beside the weights; they are recomputed, never read."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor, as the header describes it."""

    name: str
    """The canonical name: that of Hugging Face's Llama, without the leading ``model.``."""

    shape: tuple[int, ...]
    """Rows first, as numpy has it."""

    encoding: str
    """How the values are stored (``F32``, ``BF16``, ``Q4_1``, ...)."""

    num_bytes: int
    """Bytes in the file."""


class Checkpoint(ABC):
    """A checkpoint whose header is read and whose values are read on demand.

    Args:
        path: The file or folder.
    """

    keeps = False
    """Nothing that is read is kept (``TensorReader``)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """The configuration, with the keys of Hugging Face's ``config.json``."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by canonical name."""

    @abstractmethod
    def read(self, name: str, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Reads rows of one tensor as float32.

        Args:
            name: The canonical name.
            rows: Which rows of the first dimension.

        Returns:
            float32; a view of the file where the format allows it, so treat it as read-only.
        """

    @abstractmethod
    def read_stored(self, name: str, rows: slice = slice(None)) -> Stored:
        """Reads rows of one matrix as they are stored.

        Args:
            name: The canonical name.
            rows: Which rows.

        Returns:
            uint8 ``[rows, blocks, bytes of a block]``; a view of the file where its order of rows
            is ours, so treat it as read-only.
        """

    @property
    def has_weights(self) -> bool:
        """Whether the tensors are there; without them the model can be planned, not run."""
        return bool(self.tensors)

    @cached_property
    def family(self) -> Family:
        """The family that serves it.

        Raises:
            ConfigError: If none does.
        """
        return family_for(self.config, source=str(self.path))

    @cached_property
    def settings(self) -> ModelSettings:
        """The model's settings, as its family reads them.

        Raises:
            ConfigError: If no family serves the architecture, or a value can't be used.
        """
        settings = self.family.settings(ConfigReader(self.config, str(self.path)))
        untied = self.has_weights and not settings.tie_word_embeddings
        if untied and "lm_head.weight" not in self.tensors:
            raise ConfigError(
                f"model.source: {self.path}: tie_word_embeddings is false, "
                "but there is no lm_head.weight"
            )
        return settings

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(info.num_bytes for info in self.tensors.values())


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a checkpoint's JSON file.

    Raises:
        ConfigError: If it is not there, is no JSON, or holds something else than an object.
    """
    if not path.is_file():
        raise ConfigError(f"model.source: {path.parent} has no {path.name}")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model.source: {path} is not JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ConfigError(f"model.source: {path} holds no JSON object")
    return contents


def canonical_name(family: Family, name: str) -> str | None:
    """The name by which our layers know a tensor; ``None`` for one that no decoder reads.

    Args:
        family: The family that serves the checkpoint.
        name: The tensor's name in the checkpoint.
    """
    return None if is_ignored(name) else family.canonical(short_name(name))


def short_name(name: str) -> str:
    """A tensor's name without what all of a checkpoint's begin with."""
    return name.removeprefix("model.").removeprefix("transformer.")


def is_ignored(name: str) -> bool:
    """Whether a tensor is a saved buffer that no decoder reads."""
    return _IGNORED.search(name) is not None
