"""Matrices kept as a checkpoint stores them, and computed with in float32.

GGUF's formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, TensorType
from max.graph.quantization import QuantizationEncoding

from models.arena import Arena

Stored = npt.NDArray[np.uint8]
"""Rows as they are in a file: uint8 ``[rows, blocks, bytes of a block]``."""

PANEL_ROWS = 16
"""Outputs that our kernels compute side by side."""

_ALIGNMENT = 64
"""Where a panel begins: at a line of the cache."""


@dataclass(frozen=True, kw_only=True)
class Storage(ABC):
    """How a matrix is kept, instead of in the dtype that is computed in."""

    encoding: str
    """The checkpoint's name of it, as ``TensorInfo.encoding``."""

    block: int
    """Consecutive values of a row that are stored together."""

    block_bytes: int
    """Bytes of these."""

    row_multiple: int = 1
    """What a number of rows has to be a multiple of."""

    @property
    def gathers(self) -> bool:
        """Whether single rows of it can be read in a graph, as a token embedding's are."""
        return True

    @property
    def exact(self) -> Storage | None:
        """The same for products that round nothing; ``None`` where there are none."""
        return self

    @abstractmethod
    def type(self, rows: int, columns: int, device: DeviceRef) -> TensorType:
        """What a graph takes for it.

        Args:
            rows: The matrix's rows.
            columns: Its columns, whole blocks.
            device: Where it is.
        """

    @abstractmethod
    def pack(self, stored: Stored, arena: Arena) -> npt.NDArray[Any] | Buffer:
        """The values that a graph takes.

        Args:
            stored: Its rows, stacked.
            arena: Where they are put.
        """

    def bytes_of(self, values: int) -> int:
        """The bytes of so many values, whole blocks."""
        return values // self.block * self.block_bytes


@dataclass(frozen=True, kw_only=True)
class Halves(Storage):
    """Values of 16 bits, which are exact in float32."""

    dtype: DType
    """What they are."""

    block: int = 1
    block_bytes: int = 2

    def type(self, rows: int, columns: int, device: DeviceRef) -> TensorType:
        """``[rows, columns]`` of the 16 bit type."""
        return TensorType(self.dtype, [rows, columns], device)

    def pack(self, stored: Stored, arena: Arena) -> Buffer:
        """The same bytes."""
        rows, columns, _ = stored.shape
        halves = arena.place(stored).view(np.uint16).reshape(rows, columns)
        return Buffer.from_numpy(halves).view(self.dtype, [rows, columns])


@dataclass(frozen=True, kw_only=True)
class Blocks(Storage):
    """Blocks of 32 small integers, laid out for our own kernels (``kernels/blocks.mojo``).

    A value is ``scale * (integer - offset)``, or ``scale * integer + minimum``; the layout keeps
    every bit of it.
    """

    bits: int
    """Of an integer: 4 or 8."""

    offset: int = 0
    """What is taken from each integer."""

    has_minimum: bool = False
    """Whether a block says what its integers begin at."""

    signed: bool = False
    """Whether integers are stored with a sign, and 128 is added in the layout."""

    rounds: bool = True
    """Whether a product rounds activations to 8 bits, or widens the integers to float32."""

    block: int = 32

    @property
    def exact(self) -> Blocks:
        """The same layout."""
        return replace(self, rounds=False)

    @property
    def layout(self) -> dict[str, int | bool]:
        """What kernels that read it are compiled for."""
        return {"bits": self.bits, "offset": self.offset, "has_minimum": self.has_minimum}

    @property
    def parameters(self) -> dict[str, int | bool]:
        """What products with it are compiled for."""
        return {**self.layout, "rounds": self.rounds}

    def type(self, rows: int, columns: int, device: DeviceRef) -> TensorType:
        """uint8 ``[panels, bytes of a panel]``."""
        panels = -(-rows // PANEL_ROWS)
        size = columns // self.block * self.block_bytes * PANEL_ROWS
        return TensorType(DType.uint8, [panels, -(-size // _ALIGNMENT) * _ALIGNMENT], device)

    def pack(self, stored: Stored, arena: Arena) -> npt.NDArray[np.uint8]:
        """Panels of 16 rows: of each block the integers, then the scales, then the minima."""
        rows, blocks, _ = stored.shape
        shape = self.type(rows, blocks * self.block, DeviceRef.CPU()).shape
        packed = arena.take([int(dim) for dim in shape], np.dtype(np.uint8))
        whole = rows // PANEL_ROWS
        self._fill(packed[:whole], stored[: whole * PANEL_ROWS])
        if whole < len(packed):
            last = np.zeros((PANEL_ROWS, blocks, self.block_bytes), np.uint8)
            last[: rows % PANEL_ROWS] = stored[whole * PANEL_ROWS :]
            self._fill(packed[whole:], last)
        return packed

    def _fill(self, packed: npt.NDArray[np.uint8], stored: Stored) -> None:
        panels, blocks = len(packed), stored.shape[1]
        integer_bytes = self.block * self.bits // 8
        # The scale, and the minimum, come before the integers.
        header = self.block_bytes - integer_bytes
        of_row = stored.reshape(panels, PANEL_ROWS, blocks, self.block_bytes)
        size = self.block_bytes * PANEL_ROWS
        of_panel = packed[:, : blocks * size].reshape(panels, blocks, size)
        end = integer_bytes * PANEL_ROWS
        integers, scales = of_panel[..., :end], of_panel[..., end:]
        # The four bytes of a group are moved as one.
        words = np.ascontiguousarray(of_row[..., header:]).view(np.uint32)
        shape = (panels, blocks, integer_bytes // 4, PANEL_ROWS)
        integers.view(np.uint32).reshape(shape)[...] = words.transpose(0, 2, 3, 1)
        if self.signed:
            integers ^= 0x80
        halves = np.ascontiguousarray(of_row[..., :header]).view(np.uint16)
        shape = (panels, blocks, header // 2, PANEL_ROWS)
        scales.view(np.uint16).reshape(shape)[...] = halves.transpose(0, 2, 3, 1)


@dataclass(frozen=True, kw_only=True)
class SuperBlocks(Storage):
    """Blocks of 256 values, which MAX's kernels multiply with as they are.

    They round activations to 8 bits. Those of MAX 26.7 end the process where rows are no multiple
    of 32.
    """

    quantization: QuantizationEncoding
    """MAX's name of it."""

    block: int = 256
    row_multiple: int = 32

    @property
    def gathers(self) -> bool:
        """No: MAX has products with them only."""
        return False

    @property
    def exact(self) -> None:
        """None: MAX has no others."""
        return None

    def type(self, rows: int, columns: int, device: DeviceRef) -> TensorType:
        """uint8 ``[rows, bytes of a row]``."""
        return TensorType(DType.uint8, [rows, columns // self.block * self.block_bytes], device)

    def pack(self, stored: Stored, arena: Arena) -> npt.NDArray[np.uint8]:
        """The same bytes."""
        return arena.place(stored).reshape(len(stored), -1)


STORAGES: Mapping[str, Storage] = {
    storage.encoding: storage
    for storage in (
        Halves(encoding="BF16", dtype=DType.bfloat16),
        Halves(encoding="F16", dtype=DType.float16),
        Blocks(encoding="Q4_0", block_bytes=18, bits=4, offset=8),
        Blocks(encoding="Q4_1", block_bytes=20, bits=4, has_minimum=True),
        Blocks(encoding="Q8_0", block_bytes=34, bits=8, offset=128, signed=True),
        SuperBlocks(encoding="Q4_K", quantization=QuantizationEncoding.Q4_K, block_bytes=144),
        SuperBlocks(encoding="Q6_K", quantization=QuantizationEncoding.Q6_K, block_bytes=210),
    )
}
"""What is kept, by the checkpoint's name; other encodings are converted on load."""

EXACT_STORAGES: Mapping[str, Storage] = {
    name: exact for name, storage in STORAGES.items() if (exact := storage.exact) is not None
}
"""The same where products round nothing."""


def storages(*, rounds: bool) -> Mapping[str, Storage]:
    """What is kept, by the checkpoint's name.

    Args:
        rounds: Whether products may round activations to 8 bits.
    """
    return STORAGES if rounds else EXACT_STORAGES


def storage_of(encoding: str | None, rows: int, *ends: int, rounds: bool) -> Storage | None:
    """How rows of a tensor are kept; ``None`` where they are converted.

    Args:
        encoding: The tensor's, where it is to be kept.
        rows: How many rows.
        ends: Columns that a part of it begins or ends at, each of which has to be between blocks.
        rounds: Whether products may round activations to 8 bits.
    """
    storage = None if encoding is None else storages(rounds=rounds).get(encoding)
    if storage is None or rows % storage.row_multiple:
        return None
    if any(end % storage.block for end in ends):
        return None
    return storage
