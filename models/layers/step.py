"""What every layer of one step shares."""

from __future__ import annotations

from dataclasses import dataclass

from max.graph import BufferValue, TensorValue
from max.nn.kv_cache import PagedCacheValues


@dataclass(frozen=True)
class Step:
    """One device's view of the batch inside the graph."""

    row_offsets: TensorValue
    """uint32 ``[sequences + 1]``: each sequence's start in this device's tokens."""

    kv: PagedCacheValues
    """This device's pages."""

    rope: TensorValue
    """float32 ``[max_seq_len, rotary_dim]``: this device's table of rotations."""

    context_length: TensorValue | None = None
    """int32 ``[1]`` on the CPU: the page-aligned context of this device's replica, where taken."""

    workspace: BufferValue | None = None
    """This device's scratch, where the decoder declares it."""
