"""LoRA (arXiv 2106.09685): which products adapters add to, and the adapters that are served.

A target slot is one product of one layer on one device. Its stacks are graph inputs, so adapters
come and go without compiling: A is ``[adapters, rank, in]``, B ``[adapters, out, rank]``, with the
scale in B, and zeros behind an adapter's rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, TensorType

from models.buffers import as_dtype
from models.errors import ConfigError
from models.placement import Placement
from models.settings import ModelSettings

Array = npt.NDArray[np.float32]
TensorT = TypeVar("TensorT")

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD_TARGETS = ("gate_proj", "up_proj", "down_proj")
TARGETS = (*ATTENTION_TARGETS, *FEED_FORWARD_TARGETS)
"""The products that adapters may add to, by Hugging Face's names, in the contract's order."""


@dataclass(frozen=True, kw_only=True)
class LoraLimits:
    """How many adapters are served at once, and how large."""

    max_adapters: int
    """Adapters at once."""

    max_rank: int
    """The largest rank."""

    targets: tuple[str, ...]
    """The products that they may add to, of ``TARGETS``."""


@dataclass(frozen=True)
class AdapterSlot:
    """One product of one layer on one device."""

    layer: int
    """The layer's index in the model."""

    target: str
    """The product."""

    rows: range
    """The device's rows of the whole product's weight."""

    columns: range
    """The device's columns of it."""

    @property
    def module(self) -> str:
        """The product's name in adapters."""
        part = "self_attn" if self.target in ATTENTION_TARGETS else "mlp"
        return f"layers.{self.layer}.{part}.{self.target}"


@dataclass(frozen=True)
class Routing(Generic[TensorT]):
    """Which tokens have which adapter."""

    ids: TensorT
    """int32 ``[groups]``: each group's adapter, -1 for none."""

    offsets: TensorT
    """uint32 ``[groups + 1]``: each group's first token in the batch."""

    end: TensorT
    """int64 ``[1]`` on the CPU: the end of the last token with an adapter."""


def adapter_slots(
    settings: ModelSettings, placement: Placement, limits: LoraLimits, holder: int
) -> tuple[AdapterSlot, ...]:
    """A device's target slots, in the contract's order."""
    slots = (
        adapter_slot(settings, placement, limits, holder, layer, target)
        for layer in placement.layers
        for target in limits.targets
    )
    return tuple(slot for slot in slots if slot is not None)


def adapter_slot(
    settings: ModelSettings,
    placement: Placement,
    limits: LoraLimits,
    holder: int,
    layer: int,
    target: str,
) -> AdapterSlot | None:
    """A device's target slot of one product; ``None`` where adapters add nothing to it."""
    part = _part(settings, placement, holder, layer, target) if target in limits.targets else None
    if part is None:
        return None
    hidden = range(settings.hidden_size)
    rows, columns = (hidden, part) if target in ("o_proj", "down_proj") else (part, hidden)
    return AdapterSlot(layer, target, rows, columns)


def _part(
    settings: ModelSettings, placement: Placement, holder: int, layer: int, target: str
) -> range | None:
    """A device's part of a product's divided side; ``None`` where the layer lacks the product."""
    if target in ATTENTION_TARGETS:
        if settings.latent is not None or settings.attention_gate:
            return None
        if not settings.attending(range(layer, layer + 1)):
            return None
        heads = placement.heads(settings, holder)
        if target in ("k_proj", "v_proj"):
            heads = placement.kv_heads(settings, holder)
        width = settings.head_dim
        return range(heads.start * width, heads.stop * width)
    if settings.experts is not None and layer in settings.experts.layers:
        return None
    if target == "gate_proj" and not settings.mlp_gated:
        return None
    return placement.inner_columns(settings.intermediate_size, holder)


def lora_types(
    settings: ModelSettings, placement: Placement, dtype: DType, limits: LoraLimits
) -> tuple[TensorType, ...]:
    """The contract's ``lora``: routing, then per device an A and a B stack per target slot.

    Args:
        settings: The model.
        placement: The stage's devices and layers.
        dtype: The dtype of activations, and of the stacks.
        limits: What the stacks hold.
    """
    device = placement.devices[0]
    types = [
        TensorType(DType.int32, ["lora_groups"], device),
        TensorType(DType.uint32, ["lora_grouped_offsets_len"], device),
        TensorType(DType.int64, [1], DeviceRef.CPU()),
    ]
    for holder, device in enumerate(placement.devices):
        for slot in adapter_slots(settings, placement, limits, holder):
            count, rank = limits.max_adapters, limits.max_rank
            types.append(TensorType(dtype, [count, rank, len(slot.columns)], device))
            types.append(TensorType(dtype, [count, len(slot.rows), rank], device))
    return tuple(types)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter's values."""

    source: str
    """Where it came from, for messages."""

    rank: int
    """Its rank."""

    scale: float
    """What its products are multiplied with."""

    pairs: Mapping[str, tuple[Array, Array]]
    """Per product, by its name (``layers.0.self_attn.q_proj``): A [rank, in], B [out, rank]."""


class _Stack:
    """One stack: its values, and the buffer that graphs take.

    Args:
        shape: Its sizes.
        dtype: The buffer's dtype.
        device: The buffer's device.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DType, device: DeviceRef) -> None:
        self.values = np.zeros(shape, np.float32)
        self._dtype, self._device = dtype, device
        self.hand_over()

    def hand_over(self) -> None:
        """Makes the buffer of the values; on the host it is the values."""
        values = as_dtype(self.values, self._dtype)
        held = values if isinstance(values, Buffer) else Buffer.from_numpy(values)
        self.buffer = held if self._device.is_cpu() else held.to(self._device.to_device())


class AdapterStore:
    """The adapters that are served, in the stacks of every stage and device.

    Args:
        stages: Each stage's placement.
        settings: The model.
        dtype: The dtype of the stacks.
        limits: What they hold.
    """

    def __init__(
        self,
        stages: Sequence[Placement],
        settings: ModelSettings,
        dtype: DType,
        limits: LoraLimits,
    ) -> None:
        self._limits = limits
        self._slots = _stage_slots(settings, stages, limits)
        self._sizes = _whole_sizes(self._slots)
        count, rank = limits.max_adapters, limits.max_rank
        self._stacks = [
            [
                [
                    (
                        _Stack((count, rank, len(slot.columns)), dtype, device),
                        _Stack((count, len(slot.rows), rank), dtype, device),
                    )
                    for slot in slots
                ]
                for slots, device in zip(held, placement.devices, strict=True)
            ]
            for held, placement in zip(self._slots, stages, strict=True)
        ]
        self._names: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._loaded = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that are served."""
        return tuple(self._names)

    def slot(self, name: str) -> int:
        """An adapter's position in the stacks, -1 where there is none of that name."""
        return self._names.get(name, -1)

    def number(self, name: str) -> int:
        """A number that no other adapter has or had, also of the same name; 0 for none."""
        return self._numbers.get(name, 0)

    def load(self, name: str, adapter: Adapter) -> None:
        """Serves an adapter under a name.

        Raises:
            ConfigError: If the name is taken, there is no room, the rank is too large, or a tensor
                matches no product or not its shape.
        """
        if name in self._names:
            raise ConfigError(f"deployment.lora: there is an adapter {name!r} already")
        taken = set(self._names.values())
        free = [n for n in range(self._limits.max_adapters) if n not in taken]
        if not free:
            raise ConfigError(
                f"deployment.lora.max_adapters: {self._limits.max_adapters} are served, there is "
                f"no room for {name!r}\n  what works: a larger deployment.lora.max_adapters"
            )
        check_adapter(adapter, self._limits, self._sizes)
        self._write(free[0], adapter)
        self._names[name] = free[0]
        self._loaded += 1
        self._numbers[name] = self._loaded

    def unload(self, name: str) -> None:
        """Serves an adapter no more."""
        self._write(self._names.pop(name), None)
        del self._numbers[name]

    def stacks(self, stage: int) -> Iterator[Buffer]:
        """A stage's stacks, in the contract's order."""
        for device in self._stacks[stage]:
            for a, b in device:
                yield a.buffer
                yield b.buffer

    def _write(self, at: int, adapter: Adapter | None) -> None:
        for stage, placed in zip(self._stacks, self._slots, strict=True):
            for stacks, slots in zip(stage, placed, strict=True):
                for (stack_a, stack_b), slot in zip(stacks, slots, strict=True):
                    a, b = stack_a.values, stack_b.values
                    a[at], b[at] = 0, 0
                    pair = None if adapter is None else adapter.pairs.get(slot.module)
                    if adapter is not None and pair is not None:
                        down, up = pair
                        rank = len(down)
                        columns, rows = slot.columns, slot.rows
                        a[at, :rank] = down[:, columns.start : columns.stop]
                        b[at, :, :rank] = adapter.scale * up[rows.start : rows.stop]
                    stack_a.hand_over()
                    stack_b.hand_over()


def whole_sizes(
    settings: ModelSettings, stages: Sequence[Placement], limits: LoraLimits
) -> Mapping[str, tuple[int, int]]:
    """Each product's inputs and outputs, by its name in adapters."""
    return _whole_sizes(_stage_slots(settings, stages, limits))


def _stage_slots(
    settings: ModelSettings, stages: Sequence[Placement], limits: LoraLimits
) -> list[list[tuple[AdapterSlot, ...]]]:
    """Per stage and device, its target slots."""
    return [
        [
            adapter_slots(settings, placement, limits, holder)
            for holder in range(len(placement.devices))
        ]
        for placement in stages
    ]


def _whole_sizes(
    stages: Sequence[Sequence[Sequence[AdapterSlot]]],
) -> Mapping[str, tuple[int, int]]:
    sizes: dict[str, tuple[int, int]] = {}
    for slot in (slot for stage in stages for slots in stage for slot in slots):
        inputs, outputs = sizes.get(slot.module, (0, 0))
        sizes[slot.module] = max(inputs, slot.columns.stop), max(outputs, slot.rows.stop)
    return sizes


def check_adapter(
    adapter: Adapter, limits: LoraLimits, sizes: Mapping[str, tuple[int, int]]
) -> None:
    """An adapter fits a deployment's stacks.

    Raises:
        ConfigError: If it does not.
    """
    if adapter.rank > limits.max_rank:
        raise ConfigError(
            f"deployment.lora.max_rank: {limits.max_rank}, but {adapter.source} has rank "
            f"{adapter.rank}\n  what works: deployment.lora.max_rank={adapter.rank}"
        )
    for module, (down, up) in adapter.pairs.items():
        if module not in sizes:
            raise ConfigError(
                f"deployment.lora: {adapter.source} adapts {module}, which matches no layer that "
                f"adapters may add to\n  targets: {', '.join(limits.targets)}"
            )
        inputs, outputs = sizes[module]
        wanted = ((adapter.rank, inputs), (outputs, adapter.rank))
        if (down.shape, up.shape) != wanted:
            raise ConfigError(
                f"deployment.lora: {adapter.source}: {module} has A {list(down.shape)} and "
                f"B {list(up.shape)}; rank {adapter.rank} and the layer need {list(wanted[0])} and "
                f"{list(wanted[1])}"
            )


def routing_of(slots: Sequence[int], lengths: Sequence[int]) -> Routing[npt.NDArray[np.generic]]:
    """The routing of a batch, neighbours with the same adapter in one group.

    Args:
        slots: Each sequence's adapter, -1 for none.
        lengths: Each sequence's tokens in this step.
    """
    ids: list[int] = []
    offsets = [0]
    for slot, length in zip(slots, lengths, strict=True):
        if ids and ids[-1] == slot:
            offsets[-1] += length
        else:
            ids.append(slot)
            offsets.append(offsets[-1] + length)
    end = max((offsets[n + 1] for n, slot in enumerate(ids) if slot >= 0), default=0)
    return Routing(np.array(ids, np.int32), np.array(offsets, np.uint32), np.array([end], np.int64))
