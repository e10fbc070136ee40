"""Buffers: their allocation and size, and values on their way to a device and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from max import tree
from max.driver import CPU, Buffer
from max.dtype import DType
from max.graph import BufferType, TensorType

from models.arena import large_pages


def zeroed(buffer: BufferType) -> Buffer:
    """A buffer of zeros of a type whose sizes are static.

    On the host it takes memory that the operating system zeroes when it is first touched: MAX's
    own are written at once.
    """
    shape = [int(dim) for dim in buffer.shape]
    if buffer.device.is_cpu():
        return Buffer.from_numpy(large_pages(shape, np.dtype(buffer.dtype.to_numpy())))
    return Buffer.zeros(shape, buffer.dtype, buffer.device.to_device())


def buffer_bytes(types: Any) -> int:
    """The bytes of the buffers of a tree of types.

    Args:
        types: The tree; its tensors are not counted.
    """
    return sum(
        math.prod(int(dim) for dim in buffer.shape) * buffer.dtype.size_in_bytes
        for buffer in tree.leaves(types, leaf=(BufferType, TensorType))
        if isinstance(buffer, BufferType)
    )


def host_values(buffer: Buffer) -> npt.NDArray[Any]:
    """A buffer's values, wherever it is."""
    return (buffer if buffer.device.is_host else buffer.to(CPU())).to_numpy()


def as_dtype(values: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[np.float32] | Buffer:
    """Values in a graph's dtype, on the host: float32 as they are, bfloat16 rounded to even.

    Args:
        values: C-contiguous.
        dtype: The dtype.
    """
    if dtype == DType.float32:
        return values
    assert dtype == DType.bfloat16, f"{dtype} is refused at resolve"
    bits = values.view(np.uint32)
    # Half of the last place that is kept, less a little where that is even.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    # A NaN stays one: rounding could carry it to infinity.
    upper = np.where(np.isnan(values), (bits >> 16) | np.uint32(0x40), rounded >> 16)
    halves = Buffer.from_numpy(upper.astype(np.uint16))
    return halves.view(DType.bfloat16, list(values.shape))
