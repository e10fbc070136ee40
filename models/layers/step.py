"""What every layer of one step shares."""

from __future__ import annotations

from dataclasses import dataclass

from max.graph import BufferValue, TensorValue
from max.nn.kv_cache import PagedCacheValues

from models.kernels.accelerators import LatentPrefill
from models.state import DeviceState


@dataclass(frozen=True)
class Step:
    """One device's view of the batch inside the graph."""

    row_offsets: TensorValue
    """uint32 ``[sequences + 1]``: each sequence's start in this device's tokens."""

    kv: PagedCacheValues | None
    """This device's pages, where the stage attends."""

    rope: TensorValue | None
    """float32 ``[max_seq_len, rotary_dim]``: this device's table of rotations, where it rotates."""

    context_length: TensorValue | None = None
    """int32 ``[1]`` on the CPU: the page-aligned context of this device's replica, where taken."""

    prefill: LatentPrefill | None = None
    """How latents are unpacked, where accelerators attend to latents."""

    state: DeviceState[TensorValue, BufferValue] | None = None
    """This device's per-request state, where the decoder declares it."""

    workspace: BufferValue | None = None
    """This device's scratch, where the decoder declares it."""
