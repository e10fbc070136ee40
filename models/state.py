"""Per-request state that is not a KV cache: declared, allocated and assigned here."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from max import tree
from max.driver import Buffer
from max.dtype import DType
from max.graph import BufferType, TensorType

from models.buffers import zeroed
from models.placement import Placement
from models.settings import ModelSettings

TensorT = TypeVar("TensorT")
BufferT = TypeVar("BufferT")


@tree.dataclass
@dataclass(frozen=True, kw_only=True)
class DeviceState(Generic[TensorT, BufferT]):
    """One device's state inputs."""

    slots: TensorT
    """uint32 ``[sequences of the replica]``: where each sequence's state is."""

    started: TensorT
    """bool ``[sequences of the replica]``: whether a sequence has any; otherwise it is zero."""

    pools: tuple[BufferT, ...]
    """Updated in place, per layer that keeps state: ``[slots, channels, width - 1]``, the last
    inputs of its convolution, and for the delta rule ``[slots, heads, key, value]``, its memory."""


DeclaredState = tuple[DeviceState[TensorType, BufferType], ...]
"""One per device of a stage."""


def state_types(
    settings: ModelSettings, placement: Placement, dtype: DType, num_slots: int
) -> DeclaredState | None:
    """What a stage's layers declare; ``None`` where none keeps state.

    Args:
        settings: The model.
        placement: The stage's devices and layers.
        dtype: The dtype of what is kept.
        num_slots: Sequences of a replica.
    """
    layers = settings.recurrent(placement.layers)
    if not layers:
        return None
    declared = []
    for holder, device in enumerate(placement.devices):
        batch = f"replica_{placement.replica(holder)}_batch_size"
        shapes = [
            shape for layer in layers for shape in _pool_shapes(settings, placement, layer, holder)
        ]
        declared.append(
            DeviceState(
                slots=TensorType(DType.uint32, [batch], device),
                started=TensorType(DType.bool, [batch], device),
                pools=tuple(BufferType(dtype, [num_slots, *shape], device) for shape in shapes),
            )
        )
    return tuple(declared)


def first_pool(settings: ModelSettings, placement: Placement, layer: int) -> int:
    """The position of a layer's first pool among those of its stage.

    Args:
        settings: The model.
        placement: The stage's devices and layers.
        layer: The layer's index in the model.
    """
    before = settings.recurrent(range(placement.layers.start, layer))
    return sum(len(_pool_shapes(settings, placement, n, 0)) for n in before)


def _pool_shapes(
    settings: ModelSettings, placement: Placement, layer: int, holder: int
) -> tuple[tuple[int, ...], ...]:
    """What one slot of a layer's pools holds on a device."""
    delta, conv = settings.delta, settings.conv
    if delta is not None and layer in delta.layers:
        keys, values = (
            len(placement.inner_columns(heads, holder))
            for heads in (delta.key_heads, delta.value_heads)
        )
        return (
            (delta.channels(keys), delta.width - 1),
            (values, delta.key_dim, delta.value_dim),
        )
    assert conv is not None
    return ((len(placement.inner_columns(settings.hidden_size, holder)), conv.width - 1),)


@dataclass(frozen=True)
class StateRow:
    """One sequence of a step, as far as its state is concerned."""

    request: Hashable
    """The request."""

    started: bool
    """Whether an earlier step computed tokens of it."""


class RequestStateStore:
    """The state of all requests under way, per replica in as many slots as a batch has.

    A request keeps its slot until it is released, wherever it is in a batch.

    Args:
        stages: What each stage declares.
        num_replicas: Replicas.
        num_slots: Slots of each.
    """

    def __init__(
        self, stages: Sequence[DeclaredState | None], num_replicas: int, num_slots: int
    ) -> None:
        self._free = [list(range(num_slots))[::-1] for _ in range(num_replicas)]
        self._held: dict[Hashable, tuple[int, int]] = {}
        self._pools = [
            None if declared is None else [tuple(map(zeroed, device.pools)) for device in declared]
            for declared in stages
        ]

    def release(self, request: Hashable) -> None:
        """Frees a request's slot; one that holds none is none of the store's."""
        held = self._held.pop(request, None)
        if held is not None:
            replica, slot = held
            self._free[replica].append(slot)

    def inputs(
        self, stage: int, placement: Placement, batches: Sequence[Sequence[StateRow]]
    ) -> tuple[DeviceState[Buffer, Buffer], ...] | None:
        """A stage's state inputs of one step.

        Args:
            stage: The stage.
            placement: Its devices.
            batches: Each replica's sequences, in order.
        """
        pools = self._pools[stage]
        if pools is None:
            return None
        slots_of = [
            np.array([self._slot(row.request, replica) for row in batch], np.uint32)
            for replica, batch in enumerate(batches)
        ]
        started_of = [np.array([row.started for row in batch], np.bool_) for batch in batches]
        inputs = []
        for holder, device in enumerate(placement.devices):
            replica = placement.replica(holder)
            slots, started = slots_of[replica], started_of[replica]
            inputs.append(
                DeviceState(
                    slots=Buffer.from_numpy(slots).to(device.to_device()),
                    started=Buffer.from_numpy(started).to(device.to_device()),
                    pools=pools[holder],
                )
            )
        return tuple(inputs)

    def _slot(self, request: Hashable, replica: int) -> int:
        if request not in self._held:
            assert self._free[replica], "no more sequences than a replica's batch has"
            self._held[request] = (replica, self._free[replica].pop())
        held, slot = self._held[request]
        assert held == replica, "a request stays with its replica"
        return slot
