"""The one place that decides which inputs a decoder graph takes, and why.

``resolve_contract`` turns a ``DecoderConfig`` into the ``DecoderInputs`` of types. Planning
prints it, the graph is traced from it, and the batch processor fills exactly it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from max import tree
from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorType

from models.config import DecoderConfig
from models.role_contracts import FIELD_NAMES, DecoderInputs, VisionInputs


@dataclass(frozen=True)
class Leaf:
    """One graph input."""

    path: str
    """Where it is in the tree, such as ``kv.0.cache_lengths``."""

    type: TensorType | BufferType
    """Its dtype, shape and device."""

    @property
    def kind(self) -> str:
        """``tensor``, or ``buffer`` for an input that the graph updates in place."""
        return "buffer" if isinstance(self.type, BufferType) else "tensor"


@dataclass(frozen=True)
class FieldDecision:
    """Whether a deployment's graph takes one of the sixteen fields."""

    name: str
    """The field."""

    present: bool
    """Whether it is a graph input."""

    because: str
    """The rule that decided, with this deployment's values."""

    keys: tuple[str, ...]
    """The config keys that the rule read."""

    leaves: tuple[Leaf, ...] = ()
    """The graph inputs it stands for, in order."""


@dataclass(frozen=True)
class Contract:
    """A decoder graph's inputs, with the reason for each field."""

    inputs: DecoderInputs[TensorType, BufferType]
    """The types; the leaves in order are the graph's inputs."""

    fields: tuple[FieldDecision, ...]
    """One decision per field, in canonical order."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every graph input, in order."""
        return tuple(leaf for field in self.fields for leaf in field.leaves)


_CPU = DeviceRef.CPU()

_Rule = Callable[[DecoderConfig], tuple[Any, str, tuple[str, ...]]]
"""Returns the field's tree of types (``None`` where absent), the reason and the config keys."""


def resolve_contract(config: DecoderConfig) -> Contract:
    """Resolves a decoder's configuration into exactly the inputs its graph takes."""
    values: dict[str, Any] = {}
    decisions = []
    for name in FIELD_NAMES:
        value, because, keys = _RULES[name](config)
        values[name] = value
        leaves = () if value is None else named_leaves(name, value)
        decisions.append(FieldDecision(name, value is not None, because, keys, leaves))
    inputs: DecoderInputs[TensorType, BufferType] = DecoderInputs(**values)
    assert [leaf.type for leaf in named_leaves("", inputs)] == [
        leaf.type for decision in decisions for leaf in decision.leaves
    ], "the fields' leaves, in order, are the graph's inputs"
    return Contract(inputs, tuple(decisions))


def _is_type(value: Any) -> bool:
    return isinstance(value, TensorType | BufferType)


def named_leaves(prefix: str, value: Any) -> tuple[Leaf, ...]:
    """The leaves of a tree of types, in order, each with its path.

    Args:
        prefix: What each path begins with.
        value: The tree.
    """
    return tuple(Leaf(path, leaf) for path, leaf in _walk(prefix, value))


def _walk(path: str, value: Any) -> Sequence[tuple[str, Any]]:
    # tree.paths names positions inside tree dataclasses by index; fields read better.
    if _is_type(value):
        return [(path, value)]
    children, keys, meta = tree.flatten_one_level(value)
    names = keys or (meta if hasattr(type(value), "__dataclass_fields__") else range(len(children)))
    return [
        found
        for name, child in zip(names, children, strict=True)
        for found in _walk(tree.extend_path(path, name), child)
    ]


# The rules, in canonical order. Each is the row of the same name in the contract's table.


def _tokens(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    device = config.placement.devices[0]
    return TensorType(DType.int64, ["total_seq_len"], device), "every decoder takes tokens", ()


def _vision(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("deployment.vision",)
    if not config.declarations.vision:
        if not config.placement.is_first:
            return None, "images are placed among the tokens in the first stage", keys
        return None, "no VISION module is registered", keys
    hidden = config.settings.hidden_size
    devices = config.placement.devices
    inputs: VisionInputs[TensorType] = VisionInputs(
        embeddings=tuple(
            TensorType(config.dtype, ["num_image_tokens", hidden], device) for device in devices
        ),
        scatter_indices=tuple(
            TensorType(DType.int32, ["num_image_tokens"], device) for device in devices
        ),
    )
    return inputs, "a VISION module is registered", keys


def _input_row_offsets(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    device = config.placement.devices[0]
    return (
        TensorType(DType.uint32, ["input_row_offsets_len"], device),
        "every decoder takes a ragged batch",
        (),
    )


def _token_positions(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("model.source",)
    if not config.declarations.token_positions:
        reason = (
            f"{config.settings.family} does not declare absolute positions"
            if config.settings.rope is not None
            else "positions are added in the first stage"
        )
        return None, reason, keys
    device = config.placement.devices[0]
    return (
        TensorType(DType.int64, ["total_seq_len"], device),
        f"{config.settings.family} declares absolute positions",
        keys,
    )


def _host_input_row_offsets(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("deployment.parallel.data",)
    if config.placement.data == 1:
        return None, "one replica (data=1)", keys
    return (
        TensorType(DType.uint32, ["input_row_offsets_len"], _CPU),
        f"{config.placement.data} replicas bound their slices on the host",
        keys,
    )


def _return_n_logits(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    return (
        TensorType(DType.int64, [1], _CPU),
        f"every decoder takes it (return_logits={config.return_logits.value})",
        ("deployment.return_logits",),
    )


def _data_parallel_splits(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("deployment.parallel.data",)
    replicas = config.placement.data
    if replicas == 1:
        return None, "one replica (data=1)", keys
    return (
        TensorType(DType.int64, [replicas + 1], _CPU),
        f"{replicas} replicas share the batch",
        keys,
    )


def _signals(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("deployment.devices.count", "deployment.parallel")
    devices = config.placement.devices
    if len(devices) == 1 and not config.declarations.always_signal_buffers:
        return None, "one device per stage, so no collective runs", keys
    assert config.declarations.signal_bytes is not None, "signals need a size"
    because = (
        f"collectives over {len(devices)} devices"
        if len(devices) > 1
        else "the decoder always takes signal buffers"
    )
    size = config.declarations.signal_bytes
    return tuple(BufferType(DType.uint8, [size], device) for device in devices), because, keys


def _kv(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    layers = config.placement.layers
    keys = ("deployment.kv", "deployment.parallel")
    if config.kv_params is None:
        return (), f"none of layers {layers.start} to {layers.stop - 1} attends", keys
    attending = len(config.settings.attending(layers))
    which = "" if attending == len(layers) else f"the {attending} attending of "
    return (
        config.kv_params.get_symbolic_inputs(),
        f"the pages of {which}layers {layers.start} to {layers.stop - 1}, per device",
        keys,
    )


def _batch_context_lengths(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("model.source",)
    if not config.declarations.takes_batch_context_lengths:
        return None, f"{config.settings.family} does not size buffers by context length", keys
    dtype = config.declarations.device_context_length_dtype
    if dtype is not None:
        return (
            tuple(TensorType(dtype, [1], device) for device in config.placement.devices),
            f"{config.settings.family} takes context lengths, on each device",
            keys,
        )
    return (
        tuple(TensorType(DType.int32, [1], _CPU) for _ in range(config.placement.data)),
        f"{config.settings.family} takes context lengths, per replica",
        keys,
    )


def _ep(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("deployment.parallel.expert",)
    if config.declarations.ep is None:
        return None, "no expert parallelism (expert=1)", keys
    return config.declarations.ep, "experts are exchanged between devices", keys


def _lora(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("deployment.lora",)
    if config.declarations.lora is None:
        return None, "no adapters are served", keys
    return config.declarations.lora, "adapters are served", keys


def _constants(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("deployment.constants",)
    if config.declarations.constants is None:
        return None, "no weight is asked for as an input", keys
    return config.declarations.constants, "weights held as inputs, shared by the graphs", keys


def _state(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("model.source",)
    if config.declarations.state is None:
        return None, f"{config.settings.family} keeps no per-request state", keys
    return config.declarations.state, f"{config.settings.family} keeps per-request state", keys


def _scratch(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("model.source",)
    if config.declarations.scratch is None:
        return None, f"{config.settings.family} declares no workspace", keys
    return config.declarations.scratch, f"{config.settings.family} declares workspace", keys


def _stage_boundary(config: DecoderConfig) -> tuple[Any, str, tuple[str, ...]]:
    keys = ("deployment.parallel.pipeline",)
    stage, stages = config.placement.stage, config.placement.num_stages
    if stages == 1:
        return None, "one stage (pipeline=1)", keys
    if stage == 0:
        return None, f"the first of {stages} stages has none before it", keys
    assert config.declarations.stage_boundary is not None, "a later stage declares its boundary"
    return config.declarations.stage_boundary, f"what stage {stage - 1} of {stages} returns", keys


_RULES: dict[str, _Rule] = {
    "tokens": _tokens,
    "vision": _vision,
    "input_row_offsets": _input_row_offsets,
    "token_positions": _token_positions,
    "host_input_row_offsets": _host_input_row_offsets,
    "return_n_logits": _return_n_logits,
    "data_parallel_splits": _data_parallel_splits,
    "signals": _signals,
    "kv": _kv,
    "batch_context_lengths": _batch_context_lengths,
    "ep": _ep,
    "lora": _lora,
    "constants": _constants,
    "state": _state,
    "scratch": _scratch,
    "stage_boundary": _stage_boundary,
}
