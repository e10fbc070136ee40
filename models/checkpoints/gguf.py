"""GGUF files: metadata as a Hugging Face configuration, tensors dequantized on load.

The header is parsed here because ``gguf.GGUFReader`` takes two seconds over a vocabulary of
49152 tokens; the formats of the values are the gguf package's.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from models.checkpoints.base import Checkpoint, TensorInfo
from models.errors import ConfigError
from models.storage import Stored

_T = TypeVar("_T", bound=np.generic)

LONG_ROW = 512
"""The blocks of a row that is long enough: 16 of them are dequantized within a cache."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_TOP_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True)
class _Location:
    offset: int
    info: TensorInfo
    quantization: GGMLQuantizationType


class _HeaderReader:
    """Walks a GGUF header; running off its end is a ``ConfigError``."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def scalar(self, layout: str) -> Any:
        try:
            (value,) = struct.unpack_from(layout, self.data, self.at)
        except struct.error as error:
            raise self.truncated() from error
        self.at += struct.calcsize(layout)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        end = self.at + length
        if end > len(self.data):
            raise self.truncated()
        value = self.data[self.at : end].decode("utf-8", errors="replace")
        self.at = end
        return value

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            element, count = self.scalar("<I"), self.scalar("<Q")
            if element in _SCALARS:
                dtype = np.dtype(_SCALARS[GGUFValueType(element)])
                if self.at + count * dtype.itemsize > len(self.data):
                    raise self.truncated()
                values = np.frombuffer(self.data, dtype, count, self.at).tolist()
                self.at += count * dtype.itemsize
                return values
            if element == GGUFValueType.STRING:
                return self.strings(count)
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise ConfigError(f"model.source: {self.path}: unknown GGUF value type {kind}")
        return self.scalar(_SCALARS[GGUFValueType(kind)])

    def strings(self, count: int) -> list[str]:
        # A vocabulary and its merges: 100000 strings, so without a call for each.
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                found.append(data[start:at])
        except struct.error as error:
            raise self.truncated() from error
        if at > len(data):
            raise self.truncated()
        self.at = at
        return [value.decode("utf-8", errors="replace") for value in found]

    def truncated(self) -> ConfigError:
        return ConfigError(
            f"model.source: {self.path} is truncated: its header goes on after "
            f"byte {len(self.data)}, where the file ends"
        )


class GGUFCheckpoint(Checkpoint):
    """One ``.gguf`` file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if path.stat().st_size == 0:
            raise ConfigError(f"model.source: {path} is empty")
        with path.open("rb") as stream:
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        reader = _HeaderReader(self._data, path)
        if self._data[:4] != b"GGUF":
            raise ConfigError(f"model.source: {path} is not a GGUF file")
        reader.at = 4
        version = reader.scalar("<I")
        if version not in (2, 3):
            raise ConfigError(
                f"model.source: {path} is GGUF version {version}\n  supported: 2 and 3"
            )
        num_tensors, num_values = reader.scalar("<Q"), reader.scalar("<Q")
        self.metadata: dict[str, Any] = {}
        """The file's key-value metadata, as it is."""
        for _ in range(num_values):
            key = reader.string()
            self.metadata[key] = reader.value(reader.scalar("<I"))
        self._locations = self._read_tensor_headers(reader, num_tensors)

    def _read_tensor_headers(self, reader: _HeaderReader, count: int) -> dict[str, _Location]:
        headers = []
        for _ in range(count):
            raw = reader.string()
            shape = tuple(reader.scalar("<Q") for _ in range(reader.scalar("<I")))[::-1]
            headers.append((raw, shape, reader.scalar("<I"), reader.scalar("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ConfigError(f"model.source: {self.path}: general.alignment is {alignment!r}")
        start = -(-reader.at // alignment) * alignment
        locations: dict[str, _Location] = {}
        for raw, shape, kind, offset in headers:
            try:
                quantization = GGMLQuantizationType(kind)
            except ValueError as error:
                raise ConfigError(
                    f"model.source: {self.path}: {raw} has the unknown tensor type {kind}"
                ) from error
            if not _can_dequantize(quantization):
                raise ConfigError(
                    f"model.source: {self.path}: {raw} is {quantization.name}, which the gguf "
                    "package cannot dequantize"
                )
            block, block_bytes = GGML_QUANT_SIZES[quantization]
            if not shape or shape[-1] % block:
                raise ConfigError(
                    f"model.source: {self.path}: rows of {raw} {list(shape)} are no whole blocks "
                    f"of {block} ({quantization.name})"
                )
            num_bytes = int(np.prod(shape, dtype=np.int64)) // block * block_bytes
            if start + offset + num_bytes > len(self._data):
                raise ConfigError(
                    f"model.source: {self.path} is truncated: {raw} ends at byte "
                    f"{start + offset + num_bytes}, the file has {len(self._data)}"
                )
            info = TensorInfo(_canonical_name(raw), shape, quantization.name, num_bytes)
            locations[info.name] = _Location(start + offset, info, quantization)
        return locations

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by canonical name."""
        return {name: location.info for name, location in self._locations.items()}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The metadata in the terms of ``config.json``."""
        return _config_from_metadata(self)

    def read(self, name: str, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Dequantizes rows of one tensor, in Hugging Face's order of rows."""
        location = self._locations[name]
        stored = self._stored(location)
        *outer, _, _ = stored.shape
        # A tensor of rank 1 has no rows to choose before it is dequantized.
        chosen = stored[rows] if outer else stored
        shape = (*chosen.shape[:-2], location.info.shape[-1])
        values = dequantize(_long_rows(chosen), location.quantization)
        values = values.astype(np.float32, copy=False).reshape(shape)
        if not outer:
            values = values[rows]
        return self._unpermute(name, values)

    def read_stored(self, name: str, rows: slice = slice(None)) -> Stored:
        """Reads rows of one matrix as they are stored, in Hugging Face's order of rows."""
        return self._unpermute(name, self._stored(self._locations[name])[rows])

    def _stored(self, location: _Location) -> Stored:
        """A tensor's bytes, the last dimension in blocks."""
        block, block_bytes = GGML_QUANT_SIZES[location.quantization]
        *outer, width = location.info.shape
        return np.frombuffer(
            self._data, np.uint8, location.info.num_bytes, location.offset
        ).reshape(*outer, width // block, block_bytes)

    def _unpermute(self, name: str, values: npt.NDArray[_T]) -> npt.NDArray[_T]:
        # llama.cpp's converter interleaves the two halves of each query and key head of a
        # Llama, because its rotary embedding pairs neighbours; ours pairs the halves.
        if self.metadata["general.architecture"] != "llama" or not re.search(
            r"self_attn\.[qk]_proj\.", name
        ):
            return values
        half = int(self.config["head_dim"]) // 2
        pairs = values.reshape(-1, half, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


@cache
def _can_dequantize(quantization: GGMLQuantizationType) -> bool:
    """Whether the gguf package reads a type of values; it says so of a block of them."""
    _, block_bytes = GGML_QUANT_SIZES[quantization]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), quantization)
    except NotImplementedError:
        return False
    return True


def _long_rows(stored: Stored) -> Stored:
    """Some rows after each other as one, bytes ``[rows, bytes of a row]``.

    The gguf package dequantizes 16 rows at a time, and where they are short most of its time is
    the interpreter's.
    """
    *outer, blocks, block_bytes = stored.shape
    count = math.prod(outer)
    joined = max(n for n in range(1, max(1, LONG_ROW // blocks) + 1) if count % n == 0)
    return stored.reshape(count // joined, joined * blocks * block_bytes)


def _canonical_name(raw: str) -> str:
    if raw in _TOP_NAMES:
        return _TOP_NAMES[raw]
    match = _LAYER_TENSOR.fullmatch(raw)
    if match and match[2] in _LAYER_NAMES:
        return f"layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return raw


def _config_from_metadata(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    """Maps GGUF metadata to the keys that the families read.

    Raises:
        ConfigError: If the architecture is not served, or a key is missing.
    """
    metadata = checkpoint.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"model.source: the architecture of {checkpoint.path} is not supported: "
            f"{architecture}\n  supported in GGUF: {', '.join(_ARCHITECTURES)}"
        )

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise ConfigError(f"model.source: {checkpoint.path} has no {architecture}.{key}")
        return found

    embedding = checkpoint.tensors.get("embed_tokens.weight")
    if embedding is None:
        raise ConfigError(f"model.source: {checkpoint.path} has no token_embd.weight")
    hidden_size, num_heads = (
        _whole(checkpoint, f"{architecture}.{key}", value(key))
        for key in ("embedding_length", "attention.head_count")
    )
    if value("expert_count", 0):
        raise ConfigError(
            f"model.source: {checkpoint.path} has {value('expert_count')} experts per layer, which "
            "are not supported in GGUF\n  what works: the model's Hugging Face folder"
        )
    head_dim = value("attention.key_length", hidden_size // num_heads)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(
            f"model.source: {checkpoint.path} rotates {value('rope.dimension_count')} of "
            f"{head_dim} dimensions; only whole heads are supported"
        )
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": value("feed_forward_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in checkpoint.tensors,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in checkpoint.tensors,
        "rope_theta": value("rope.freq_base", 10000.0),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    for key in ("rope.scale_linear", "attention.sliding_window"):
        if metadata.get(f"{architecture}.{key}"):
            raise ConfigError(
                f"model.source: {checkpoint.path}: {architecture}.{key} is not supported"
            )
    scaling = value("rope.scaling.type", "none")
    if scaling != "none":
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": value("rope.scaling.factor"),
            "attention_factor": metadata.get(f"{architecture}.rope.scaling.attn_factor"),
            "original_max_position_embeddings": value(
                "rope.scaling.original_context_length", config["max_position_embeddings"]
            ),
        }
    return config


def _whole(checkpoint: GGUFCheckpoint, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"model.source: {checkpoint.path}: {key} is {value!r}, not a positive integer"
        )
    return value
