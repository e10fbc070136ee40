"""Checkpoints as MAX loads them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from max.driver import Buffer
from max.dtype import DType
from max.graph.weights import WeightData

from models.errors import ConfigError
from models.storage import Stored


class LoadedWeights:
    """Reads tensors of a state dictionary of MAX's as float32.

    Args:
        state: The tensors by canonical name.
    """

    keeps = False
    """What MAX has mapped is copied (``TensorReader``)."""

    def __init__(self, state: Mapping[str, WeightData]) -> None:
        self._state = state

    def read(self, name: str, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Reads rows of one tensor; float32 comes as a view.

        Raises:
            ConfigError: If the checkpoint has no such tensor.
        """
        if name not in self._state:
            raise ConfigError(f"model.source: the checkpoint has no tensor {name}")
        weight = self._state[name]
        buffer = weight.to_buffer()
        if weight.dtype == DType.bfloat16:
            # bfloat16 is the upper half of a float32.
            halves = buffer.view(DType.uint16, buffer.shape).to_numpy()[rows]
            return (halves.astype(np.uint32) << 16).view(np.float32)
        assert isinstance(buffer, Buffer)
        return buffer.to_numpy()[rows].astype(np.float32, copy=False)

    def read_stored(self, name: str, rows: slice = slice(None)) -> Stored:
        """Nothing is kept as it is stored: MAX's configuration says what is computed in."""
        raise AssertionError(f"{name}[{rows}] is converted")
