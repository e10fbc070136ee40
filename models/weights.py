"""Weights that know where their values come from, and their loading.

A layer declares each weight with the rectangles of the checkpoint it is stacked from, so the
placement, the memory plan and the loading all read the same declaration.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, Weight
from max.nn.layer import Module

from models.arena import Arena
from models.buffers import as_dtype
from models.kernels import Matrix
from models.storage import Storage, Stored

Array = npt.NDArray[np.float32]


class TensorReader(Protocol):
    """What loading needs of a checkpoint."""

    @property
    def keeps(self) -> bool:
        """Whether what it has read is in memory to stay, and is shared."""
        ...

    def read(self, name: str, rows: slice = ...) -> Array:
        """Rows of one tensor as float32."""
        ...

    def read_stored(self, name: str, rows: slice = ...) -> Stored:
        """Rows of one tensor as they are stored, where the encoding is one that is kept."""
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

    transposed: bool = False
    """Whether the tensor is stored with rows and columns exchanged."""

    def read(self, reader: TensorReader) -> Array:
        """The piece's values."""
        if self.transposed:
            return self._part(reader.read(self.tensor).T)
        rows = slice(None) if self.rows is None else slice(*self.rows)
        values = reader.read(self.tensor, rows)
        return values if self.columns is None else values[:, slice(*self.columns)]

    def read_stored(self, reader: TensorReader, storage: Storage) -> Stored:
        """The piece's values as they are stored; its columns are whole blocks."""
        assert not self.transposed, "transposed tensors are converted"
        rows = slice(None) if self.rows is None else slice(*self.rows)
        stored = reader.read_stored(self.tensor, rows)
        if self.columns is None:
            return stored
        first, end = (column // storage.block for column in self.columns)
        return stored[:, first:end]

    def _part(self, values: Array) -> Array:
        rows, columns = (
            slice(None) if ends is None else slice(*ends) for ends in (self.rows, self.columns)
        )
        return values[rows, columns]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The piece's shape, from its tensor's."""
        if self.transposed:
            whole = whole[::-1]
        rows = whole[0] if self.rows is None else self.rows[1] - self.rows[0]
        if self.columns is None:
            return (rows, *whole[1:])
        return (rows, self.columns[1] - self.columns[0])

    def alone(self) -> FromCheckpoint:
        """The source of a weight that is this piece."""
        return FromCheckpoint((self,))


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
        holder: The position of that device in the stage's placement.
        storage: How it is kept, where not in the dtype; it is a matrix then.
    """

    def __init__(
        self,
        name: str,
        dtype: DType,
        shape: tuple[int, ...],
        device: DeviceRef,
        source: Source,
        holder: int = 0,
        storage: Storage | None = None,
    ) -> None:
        kept = TensorType(dtype, list(shape), device)
        if storage is not None:
            rows, columns = shape
            kept = storage.type(rows, columns, device)
        super().__init__(name, kept.dtype, [int(dim) for dim in kept.shape], device)
        self.source = source
        self.holder = holder
        self.sizes = shape
        self.storage = storage
        self.input_type = kept
        """Its type where it is an input instead."""

    @property
    def matrix(self) -> Matrix:
        """Its values in the graph that is traced."""
        return self.matrix_of(self)

    def matrix_of(self, values: TensorValue) -> Matrix:
        """The same with values from an input of the graph."""
        rows, columns = self.sizes
        return Matrix(values, rows, columns, self.storage)

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes on its device."""
        return math.prod(int(dim) for dim in self.input_type.shape) * self.dtype.size_in_bytes


def rows_of(tensor: str, rows: range, width: int = 1, transposed: bool = False) -> Piece:
    """Consecutive groups of rows of a tensor, such as the rows of some heads.

    Args:
        tensor: The tensor's canonical name.
        rows: Which groups.
        width: Rows per group.
        transposed: Whether the tensor is stored with rows and columns exchanged.
    """
    ends = (rows.start * width, rows.stop * width)
    return Piece(tensor, rows=ends, transposed=transposed)


def columns_of(tensor: str, columns: range, width: int = 1, transposed: bool = False) -> Piece:
    """Consecutive groups of columns of a tensor.

    Args:
        tensor: The tensor's canonical name.
        columns: Which groups.
        width: Columns per group.
        transposed: Whether the tensor is stored with rows and columns exchanged.
    """
    ends = (columns.start * width, columns.stop * width)
    return Piece(tensor, columns=ends, transposed=transposed)


def declared_weights(module: Module, prefix: str = "") -> dict[str, DeclaredWeight]:
    """Every weight of a module by its full name, and names each one so.

    Args:
        module: The module.
        prefix: Before each name, where graphs that compile together need distinct ones.
    """
    weights: dict[str, DeclaredWeight] = {}
    for path, weight in module.raw_state_dict().items():
        name = f"{prefix}{path}"
        assert isinstance(weight, DeclaredWeight), f"{name} does not say where it comes from"
        weight.name = name
        weights[name] = weight
    return weights


def expected_shapes(weights: Iterable[DeclaredWeight]) -> dict[str, tuple[int, ...]]:
    """The shape of each checkpoint tensor that weights are made from.

    Args:
        weights: The weights of every device, whose pieces together cover each tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in weights:
        if not isinstance(weight.source, FromCheckpoint):
            continue
        for piece in weight.source.pieces:
            assert piece.rows is not None or len(weight.source.pieces) == 1
            ends = [piece.rows[1] if piece.rows else weight.sizes[0], *weight.sizes[1:]]
            if piece.columns is not None:
                ends[1] = piece.columns[1]
            if piece.transposed:
                ends.reverse()
            before = shapes.get(piece.tensor, (0,) * len(ends))
            shapes[piece.tensor] = tuple(map(max, before, ends))
    return shapes


Values: TypeAlias = npt.NDArray[Any] | Buffer
"""What a graph reads a weight from."""

_Made = tuple[Source, DType, Storage | None]


class _Awaited(Mapping[str, Values]):
    """Values that are being made; taking one waits for it."""

    def __init__(self, values: Mapping[str, Future[Values]]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Values:
        return self._values[name].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class WeightLoader:
    """Makes the values of weights in the background, those of the same source once.

    Replicas on one host, and the graphs of several stages, so share one array.

    Args:
        reader: The checkpoint.
    """

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._made: dict[_Made, Future[Values]] = {}
        self._arena = Arena()

    def load(self, weights: Mapping[str, DeclaredWeight]) -> Mapping[str, Values]:
        """The values of every weight, C-contiguous in its dtype on the host, by full name.

        Taking one waits until it is made, and raises what reading it raised.
        """
        self.begin(weights.values())
        return _Awaited({name: self._made[_made(weight)] for name, weight in weights.items()})

    def begin(self, weights: Iterable[DeclaredWeight]) -> None:
        """Begins to make the values of weights that are not made yet."""
        missing = {_made(w): w for w in weights if _made(w) not in self._made}
        # numpy gives up the interpreter lock while it dequantizes.
        pool = ThreadPoolExecutor(max_workers=os.cpu_count())
        for made, weight in missing.items():
            self._made[made] = pool.submit(_make, self._reader, self._arena, weight)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Waits until all that is begun is made, and raises what reading it raised first."""
        try:
            for value in self._made.values():
                value.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Leaves what is not begun yet, where what it was for has failed."""
        self._made = {made: value for made, value in self._made.items() if not value.cancel()}

    def buffer(self, weight: DeclaredWeight) -> Buffer:
        """The values of one weight, on its device."""
        values = self.load({weight.name: weight})[weight.name]
        held = values if isinstance(values, Buffer) else Buffer.from_numpy(values)
        return held if weight.device.is_cpu() else held.to(weight.device.to_device())


def _made(weight: DeclaredWeight) -> _Made:
    """What weights of the same values have in common."""
    return weight.source, weight.dtype, weight.storage


def _make(reader: TensorReader, arena: Arena, weight: DeclaredWeight) -> Values:
    if isinstance(weight.source, Computed):
        values = weight.source.values()
    elif weight.storage is not None:
        rows = [piece.read_stored(reader, weight.storage) for piece in weight.source.pieces]
        return weight.storage.pack(rows[0] if len(rows) == 1 else np.concatenate(rows), arena)
    elif len(weight.source.pieces) == 1:
        values = weight.source.pieces[0].read(reader)
        if not reader.keeps:
            values = arena.place(values)
    else:
        values = arena.take(weight.sizes, np.dtype(np.float32))
        row = 0
        for piece in weight.source.pieces:
            part = piece.read(reader)
            values[row : row + len(part)] = part
            row += len(part)
        assert row == weight.sizes[0], f"{weight.name}: {row} rows for {weight.sizes}"
    assert values.shape == weight.sizes, f"{weight.name}: {values.shape} for {weight.sizes}"
    return as_dtype(np.ascontiguousarray(values, dtype=np.float32), weight.dtype)
