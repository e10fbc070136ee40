"""What devices of one stage exchange inside the graph.

One interface with two backends: MAX's own collectives between accelerators, and one for simulated
devices, which are all the one CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from max.driver import Buffer
from max.dtype import DType
from max.graph import BufferType, BufferValue, TensorValue, ops
from max.nn.comm import Signals

from models.buffers import zeroed
from models.placement import Placement

HOST_SIGNAL_BYTES = 1
"""A simulated device's signal buffer: one flag."""


class Collectives(Protocol):
    """Exchanges between the devices of a stage; values come and go one per device."""

    def sum_in_replicas(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Every device gets the sum of the values of those that share its layers' weights."""
        ...

    def concat_in_replicas(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Every device gets the values of the same devices side by side (last dimension)."""
        ...

    def stack_in_replicas(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Every device of a replica gets the values of all its devices, one below the other."""
        ...

    def concat_replicas(self, xs: Sequence[TensorValue]) -> TensorValue:
        """The first device gets one value of each replica, one below the other."""
        ...

    def broadcast(self, x: TensorValue) -> list[TensorValue]:
        """Every device gets the first one's value."""
        ...


def collectives_for(placement: Placement, signals: Sequence[BufferValue] | None) -> Collectives:
    """The backend of a stage's devices.

    Args:
        placement: The stage's devices.
        signals: One buffer per device; ``None`` on one device, which exchanges nothing.
    """
    if placement.on_host:
        return HostCollectives(placement, signals)
    return DeviceCollectives(placement, signals)


def signal_bytes(placement: Placement) -> int:
    """The size of one signal buffer of a stage's devices."""
    return HOST_SIGNAL_BYTES if placement.on_host else int(Signals.NUM_BYTES)


def allocate_signals(types: Sequence[BufferType]) -> tuple[Buffer, ...]:
    """The signal buffers of a stage's devices, ready for the first exchange.

    Accelerators' are MAX's own: they hold marks that zeros are not, and let devices reach each
    other's memory.

    Args:
        types: What the contract declares, one per device.
    """
    if types[0].device.is_cpu():
        return tuple(map(zeroed, types))
    return tuple(Signals.allocate([buffer.device.to_device() for buffer in types]))


class DeviceCollectives:
    """Exchanges between accelerators, through MAX's all-reduce and all-gather.

    Args:
        placement: The stage's devices.
        signals: One buffer per device; ``None`` on one device, which exchanges nothing.
    """

    def __init__(self, placement: Placement, signals: Sequence[BufferValue] | None) -> None:
        self._placement = placement
        self._signals = signals

    def sum_in_replicas(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Every device gets the sum of the values of those that share its layers' weights."""
        return self._exchange(xs, self._placement.tensor, ops.allreduce.sum)

    def concat_in_replicas(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Every device gets the values of the same devices side by side."""
        return self._exchange(xs, self._placement.tensor, partial(ops.allgather, axis=-1))

    def stack_in_replicas(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Every device of a replica gets the values of all its devices, one below the other."""
        return self._exchange(xs, self._placement.group, partial(ops.allgather, axis=0))

    def concat_replicas(self, xs: Sequence[TensorValue]) -> TensorValue:
        """The first device gets one value of each replica, one below the other."""
        first = self._placement.devices[0]
        return _concat([x.to(first) for x in xs], axis=0)

    def broadcast(self, x: TensorValue) -> list[TensorValue]:
        """Every device gets the first one's value."""
        if self._signals is None:
            return [x]
        return list(ops.distributed_broadcast(x, self._signals))

    def _exchange(
        self,
        xs: Sequence[TensorValue],
        size: int,
        exchange: Callable[[list[TensorValue], list[BufferValue]], list[TensorValue]],
    ) -> list[TensorValue]:
        if size == 1:
            return list(xs)
        assert self._signals is not None, "several devices have signals"
        received: list[TensorValue] = []
        for start in range(0, len(xs), size):
            group = slice(start, start + size)
            received += exchange(list(xs[group]), list(self._signals[group]))
        return received


class HostCollectives:
    """Exchanges in the host's memory.

    A simulated device's signal buffer holds one flag that is always zero: no device has to wait
    for another, because the graph's own order does that. Each device reads its flag in every
    exchange and adds it to what it receives, so a flag that is not zero is seen at once.

    Args:
        placement: The stage's devices.
        signals: One buffer per device; ``None`` on one device, which exchanges nothing.
    """

    def __init__(self, placement: Placement, signals: Sequence[BufferValue] | None) -> None:
        self._placement = placement
        self._flags = (
            None
            if signals is None
            else [ops.cast(ops.buffer_load(signal), DType.float32) for signal in signals]
        )

    def sum_in_replicas(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Every device gets the sum of the values of those that share its layers' weights."""
        return self._exchange(xs, self._placement.tensor, _sum)

    def concat_in_replicas(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Every device gets the values of the same devices side by side."""
        return self._exchange(xs, self._placement.tensor, partial(_concat, axis=-1))

    def stack_in_replicas(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Every device of a replica gets the values of all its devices, one below the other."""
        return self._exchange(xs, self._placement.group, partial(_concat, axis=0))

    def concat_replicas(self, xs: Sequence[TensorValue]) -> TensorValue:
        """The first device gets one value of each replica, one below the other."""
        return self._receive(_concat(xs, axis=0), 0)

    def broadcast(self, x: TensorValue) -> list[TensorValue]:
        """Every device gets the first one's value."""
        return [x] * len(self._placement.devices)

    def _exchange(
        self,
        xs: Sequence[TensorValue],
        size: int,
        exchange: Callable[[Sequence[TensorValue]], TensorValue],
    ) -> list[TensorValue]:
        groups = [exchange(xs[start : start + size]) for start in range(0, len(xs), size)]
        return [self._receive(groups[device // size], device) for device in range(len(xs))]

    def _receive(self, x: TensorValue, device: int) -> TensorValue:
        if self._flags is None:
            return x
        flag = self._flags[device]
        return x + (flag if x.dtype == flag.dtype else ops.cast(flag, x.dtype))


def _sum(xs: Sequence[TensorValue]) -> TensorValue:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def _concat(xs: Sequence[TensorValue], axis: int) -> TensorValue:
    return xs[0] if len(xs) == 1 else ops.concat(list(xs), axis=axis)
