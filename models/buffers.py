"""The allocation of buffers that a graph takes every step."""

from __future__ import annotations

import numpy as np
from max.driver import Buffer
from max.graph import BufferType


def zeroed(buffer: BufferType) -> Buffer:
    """A buffer of zeros of a type whose sizes are static.

    On the host it takes memory that the operating system zeroes when it is first touched: MAX's
    own are written at once.
    """
    shape = [int(dim) for dim in buffer.shape]
    if buffer.device.is_cpu():
        return Buffer.from_numpy(np.zeros(shape, buffer.dtype.to_numpy()))
    return Buffer.zeros(shape, buffer.dtype, buffer.device.to_device())
