"""Weights that know where their values come from, and their loading.

A layer declares each weight with the rectangles of the checkpoint it is stacked from, so the
placement, the memory plan and the loading all read the same declaration.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
from max.dtype import DType
from max.graph import DeviceRef, Weight
from max.nn.layer import Module

Array = npt.NDArray[np.float32]


class TensorReader(Protocol):
    """What loading needs of a checkpoint."""

    def read(self, name: str, rows: slice = ...) -> Array:
        """Rows of one tensor as float32."""
        ...


@dataclass(frozen=True)
class Piece:
    """Rows of one checkpoint tensor, and of those the columns."""

    tensor: str
    """The tensor's canonical name."""

    rows: tuple[int, int] | None = None
    """First row and the one after the last; ``None`` is all."""

    columns: tuple[int, int] | None = None
    """First column and the one after the last; ``None`` is all."""

    def read(self, reader: TensorReader) -> Array:
        """The piece's values."""
        rows = slice(None) if self.rows is None else slice(*self.rows)
        values = reader.read(self.tensor, rows)
        return values if self.columns is None else values[:, slice(*self.columns)]


@dataclass(frozen=True)
class FromCheckpoint:
    """Values stacked by rows from pieces of the checkpoint."""

    pieces: tuple[Piece, ...]
    """In the order they are stacked."""


@dataclass(frozen=True)
class Computed:
    """Values computed from the settings, such as rotary frequencies."""

    values: Callable[[], Array]
    """Makes them."""


Source = FromCheckpoint | Computed


class DeclaredWeight(Weight):
    """A ``max.graph.Weight`` with the source of its values.

    Args:
        name: Its name in the module.
        dtype: The dtype in the graph.
        shape: Static sizes, rows first.
        device: Where it resides.
        source: Where its values come from.
    """

    def __init__(
        self,
        name: str,
        dtype: DType,
        shape: tuple[int, ...],
        device: DeviceRef,
        source: Source,
    ) -> None:
        super().__init__(name, dtype, shape, device)
        self.source = source
        self.sizes = shape


def declared_weights(module: Module) -> dict[str, DeclaredWeight]:
    """Every weight of a module by its full name, and names each one so."""
    weights: dict[str, DeclaredWeight] = {}
    for name, weight in module.raw_state_dict().items():
        assert isinstance(weight, DeclaredWeight), f"{name} does not say where it comes from"
        weight.name = name
        weights[name] = weight
    return weights


def source_tensors(weights: Iterable[DeclaredWeight]) -> set[str]:
    """The names of the checkpoint tensors that weights are made from."""
    return {
        piece.tensor
        for weight in weights
        if isinstance(weight.source, FromCheckpoint)
        for piece in weight.source.pieces
    }


def load_weights(weights: Mapping[str, DeclaredWeight], reader: TensorReader) -> dict[str, Array]:
    """Makes the values of every weight.

    Weights with the same source share one array, so replicas cost nothing on one host.

    Args:
        weights: The weights by full name.
        reader: The checkpoint.

    Returns:
        C-contiguous float32 arrays by full name.
    """
    sources = {weight.source: weight for weight in weights.values()}
    # numpy gives up the interpreter lock while it dequantizes.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        made = dict(zip(sources, pool.map(partial(_make, reader), sources.values()), strict=True))
    return {name: made[weight.source] for name, weight in weights.items()}


def _make(reader: TensorReader, weight: DeclaredWeight) -> Array:
    if isinstance(weight.source, Computed):
        values = weight.source.values()
    elif len(weight.source.pieces) == 1:
        # One piece needs no copy: float32 safetensors stay mapped.
        values = weight.source.pieces[0].read(reader)
    else:
        values = np.empty(weight.sizes, np.float32)
        row = 0
        for piece in weight.source.pieces:
            part = piece.read(reader)
            values[row : row + len(part)] = part
            row += len(part)
        assert row == weight.sizes[0], f"{weight.name}: {row} rows for {weight.sizes}"
    assert values.shape == weight.sizes, f"{weight.name}: {values.shape} for {weight.sizes}"
    return np.ascontiguousarray(values, dtype=np.float32)
