"""The same weights in other formats, for engines that compute in the format of their file."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize, quantize

from builder.sources import cache_folder

_TABLES = ("token_embd.weight", "output.weight")
_FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}


def gguf_file(original: Path, kind: str) -> Path:
    """A GGUF file with its weights in a format.

    Args:
        original: The file.
        kind: The format, such as ``BF16``.

    Returns:
        The original where it is in that format already; otherwise a copy that is made in the
        cache, and kept.
    """
    reader = GGUFReader(original)
    if kind == main_format(reader):
        return original
    status = original.stat()
    stamp = repr((str(original.resolve()), status.st_size, status.st_mtime_ns))
    name = f"{original.stem}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}"
    made = cache_folder() / "benchmarks" / name / f"{kind}.gguf"
    if not made.is_file():
        print(f"making {kind} of {original.name} (once)", file=sys.stderr, flush=True)
        made.parent.mkdir(parents=True, exist_ok=True)
        partial = made.with_suffix(".partial")
        convert(reader, partial, kind)
        partial.replace(made)
    return made


def main_format(reader: GGUFReader) -> str:
    """The format that most of a file's values are in."""
    values: dict[str, int] = {}
    for tensor in reader.tensors:
        name = tensor.tensor_type.name
        values[name] = values.get(name, 0) + int(tensor.n_elements)
    return max(values, key=lambda name: values[name])


def convert(reader: GGUFReader, file: Path, kind: str) -> None:
    """Writes a copy with its matrices in another format, and the metadata as it is.

    Vectors stay as they are. In a copy of four bits the tables stay as they are too, or in eight
    bits, as llama.cpp's own quantizer leaves them.

    Args:
        reader: The original.
        file: The copy.
        kind: The format.
    """
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(file, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.name == "general.file_type":
            value = int(_FILE_TYPES[kind])
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(
            field.name, value, field.types[0], sub_type=field.types[-1] if is_array else None
        )
    kinds = [_format(tensor, GGMLQuantizationType[kind]) for tensor in reader.tensors]
    for tensor, own in zip(reader.tensors, kinds, strict=True):
        # Outermost first, where the header has the innermost first.
        shape = [int(size) for size in reversed(tensor.shape)]
        block, size = GGML_QUANT_SIZES[own]
        num_bytes = int(tensor.n_elements) // block * size
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), num_bytes, own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, own in zip(reader.tensors, kinds, strict=True):
        kept = own == tensor.tensor_type
        values = tensor.data if kept else quantize(dequantize(tensor.data, tensor.tensor_type), own)
        writer.write_tensor_data(values)
    writer.close()


def _format(tensor: ReaderTensor, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    if len(tensor.shape) < 2:
        return tensor.tensor_type
    block, size = GGML_QUANT_SIZES[kind]
    if tensor.name in _TABLES and block > 1 and size * 8 / block < 8:
        kept = GGML_QUANT_SIZES[tensor.tensor_type][0] > 1
        return tensor.tensor_type if kept else GGMLQuantizationType.Q8_0
    return kind
