"""Numbers that a kernel takes as values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from max.graph import DeviceRef, TensorValue, ops


def constant(values: Sequence[float], dtype: type[np.generic]) -> TensorValue:
    """Numbers on the CPU, [count].

    Args:
        values: The numbers.
        dtype: What they are in the graph.
    """
    return ops.constant(np.array(values, dtype), device=DeviceRef.CPU())
