"""Checkpoints in Hugging Face's layout: ``config.json`` and (sharded) safetensors.

The header is parsed here, not with the safetensors package, because numpy has no bfloat16 and
the package's numpy reader refuses it. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.checkpoints.base import Checkpoint, TensorInfo, is_ignored, read_json_object, short_name
from models.errors import ConfigError
from models.storage import Stored

_STORED_AS: dict[str, npt.DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
}


@dataclass(frozen=True)
class _Location:
    file: Path
    offset: int
    info: TensorInfo


class SafetensorsCheckpoint(Checkpoint):
    """A folder with ``config.json`` and ``*.safetensors``, sharded or not.

    Without safetensors it is a configuration that can be planned.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._config = read_json_object(path / "config.json") | _image_processor(path)
        self._stored = _locate(path)
        self._maps: dict[Path, mmap.mmap] = {}

    @property
    def config(self) -> Mapping[str, Any]:
        """The contents of ``config.json``, and those of an image processor as one entry."""
        return self._config

    @cached_property
    def _locations(self) -> Mapping[str, _Location]:
        if not self._stored:
            return {}
        return {self.family.canonical(name): location for name, location in self._stored.items()}

    @property
    def has_weights(self) -> bool:
        """Whether the tensors are there; without them the model can be planned, not run."""
        return bool(self._stored)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of every shard by canonical name."""
        return {
            name: replace(location.info, name=name) for name, location in self._locations.items()
        }

    def read(self, name: str, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Reads rows of one tensor; float32 comes as a view of the mapped file."""
        location = self._locations[name]
        return _values(self._map(location.file), location, rows)

    def read_stored(self, name: str, rows: slice = slice(None)) -> Stored:
        """Reads rows of one matrix as they are stored: a view of the mapped file."""
        location = self._locations[name]
        stored = _stored(self._map(location.file), location)[rows]
        return stored.view(np.uint8).reshape(*stored.shape, stored.itemsize)

    def _map(self, file: Path) -> mmap.mmap:
        # One map per file for as long as the checkpoint lives; views of it are handed out.
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def _image_processor(folder: Path) -> dict[str, Any]:
    """How images are prepared: in a file of its own, or since transformers 5 in the processor's."""
    alone, beside = folder / "preprocessor_config.json", folder / "processor_config.json"
    if alone.is_file():
        return {"image_processor": read_json_object(alone)}
    found = read_json_object(beside).get("image_processor") if beside.is_file() else None
    return {} if found is None else {"image_processor": found}


def read_tensors(file: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of one file as float32, by the name it has there.

    Raises:
        ConfigError: If the file is damaged.
    """
    locations = _read_header(file)
    with file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return {
            name: _values(mapped, location, slice(None)) for name, location in locations.items()
        }


def _values(mapped: mmap.mmap, location: _Location, rows: slice) -> npt.NDArray[np.float32]:
    info = location.info
    stored = _stored(mapped, location)[rows]
    if info.encoding == "BF16":
        # bfloat16 is the upper half of a float32.
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def _stored(mapped: mmap.mmap, location: _Location) -> npt.NDArray[Any]:
    info = location.info
    return np.frombuffer(
        mapped, _STORED_AS[info.encoding], math.prod(info.shape), location.offset
    ).reshape(info.shape)


def _locate(folder: Path) -> dict[str, _Location]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(map(_is_text, weight_map.values())):
            raise ConfigError(f"model.source: {index} has no valid weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ConfigError(
                f"model.source: {folder}: {index.name} names files that are not there: "
                f"{', '.join(missing)}"
            )
    else:
        files = sorted(folder.glob("*.safetensors"))
        weight_map = {}
    locations: dict[str, _Location] = {}
    found: set[str] = set()
    for file in files:
        for raw, location in _read_header(file).items():
            found.add(raw)
            if is_ignored(raw):
                continue
            name = location.info.name
            if name in locations:
                raise ConfigError(
                    f"model.source: {name} is in {locations[name].file.name} and {file.name}"
                )
            locations[name] = location
    lost = sorted(set(weight_map) - found)
    if lost:
        raise ConfigError(
            f"model.source: {folder}: {len(lost)} tensors of {index.name} are in no file, "
            f"the first {lost[0]}"
        )
    return locations


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _read_entry(file: Path, raw: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        encoding, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        valid = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and shape
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"model.source: {file} has no valid entry of {raw}") from error
    if not valid or begin > end:
        raise ConfigError(f"model.source: {file} has no valid entry of {raw}: {entry}")
    return str(encoding), tuple(shape), begin, end


def _read_header(file: Path) -> dict[str, _Location]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ConfigError(
                f"model.source: {file} is truncated: its header needs "
                f"{8 + length} bytes, the file has {size}"
            )
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ConfigError(f"model.source: {file} has no valid header: {error}") from error
    start = 8 + length
    locations: dict[str, _Location] = {}
    if not isinstance(header, dict):
        raise ConfigError(f"model.source: {file} has no valid header: no object")
    for raw, entry in header.items():
        if raw == "__metadata__":
            continue
        encoding, shape, begin, end = _read_entry(file, raw, entry)
        if start + end > size:
            raise ConfigError(
                f"model.source: {file} is truncated: {raw} ends at byte {start + end}, "
                f"the file has {size}"
            )
        if encoding not in _STORED_AS:
            if is_ignored(raw):
                continue
            raise ConfigError(
                f"model.source: {file}: {raw} is stored as {encoding}\n"
                f"  supported: {', '.join(_STORED_AS)}"
            )
        itemsize = np.dtype(_STORED_AS[encoding]).itemsize
        if end - begin != math.prod(shape) * itemsize:
            raise ConfigError(
                f"model.source: {file}: {raw} has {end - begin} bytes, but its shape "
                f"{list(shape)} as {encoding} needs {math.prod(shape) * itemsize}"
            )
        info = TensorInfo(short_name(raw), shape, encoding, end - begin)
        locations[raw] = _Location(file, start + begin, info)
    return locations
