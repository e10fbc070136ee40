"""What every layer of one step shares."""

from __future__ import annotations

from dataclasses import dataclass

from max.graph import TensorValue
from max.nn.kv_cache import PagedCacheValues


@dataclass(frozen=True)
class Step:
    """One device's view of the batch inside the graph."""

    row_offsets: TensorValue
    """uint32 ``[sequences + 1]``: each sequence's start in this device's tokens."""

    kv: PagedCacheValues
    """This device's pages."""

    rope: TensorValue
    """float32 ``[max_seq_len, head_dim]``: this device's table of rotations."""
