"""The tensors of a checkpoint that several graphs of a process load, each read once."""

from __future__ import annotations

from collections import defaultdict
from threading import Lock

import numpy as np
import numpy.typing as npt

from models.arena import Arena
from models.checkpoints.base import Checkpoint
from models.storage import Stored


class KeptTensors:
    """Reads each tensor whole, once, and gives parts of what it keeps.

    A weight that is a tensor, or rows of one, is a view of what is kept and takes no memory of its
    own. Beyond the limit tensors are read as they are asked for.

    Args:
        checkpoint: The checkpoint.
        max_bytes: How much may be kept.
    """

    keeps = True
    """Loaders need no copies (``TensorReader``)."""

    def __init__(self, checkpoint: Checkpoint, max_bytes: int) -> None:
        self._checkpoint = checkpoint
        self._room = max_bytes
        self._kept: dict[str, npt.NDArray[np.float32]] = {}
        self._locks: dict[str, Lock] = defaultdict(Lock)
        self._bookkeeping = Lock()
        self._arena = Arena()

    def read(self, name: str, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Rows of one tensor as float32; treat it as read-only.

        Args:
            name: The canonical name.
            rows: Which rows of the first dimension.
        """
        with self._bookkeeping:
            lock = self._locks[name]
        with lock:
            if name not in self._kept:
                if not self._takes(name):
                    return self._checkpoint.read(name, rows)
                self._kept[name] = self._arena.place(self._checkpoint.read(name))
            return self._kept[name][rows]

    def read_stored(self, name: str, rows: slice = slice(None)) -> Stored:
        """Rows of one tensor as they are stored: the file's own memory, which needs no keeping.

        Args:
            name: The canonical name.
            rows: Which rows of the first dimension.
        """
        return self._checkpoint.read_stored(name, rows)

    def _takes(self, name: str) -> bool:
        size = int(np.prod(self._checkpoint.tensors[name].shape)) * np.dtype(np.float32).itemsize
        with self._bookkeeping:
            fits = size <= self._room
            self._room -= size if fits else 0
        return fits
