"""What a plan looks like: as JSON for programs, as tables for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from max.graph import BufferType, TensorType
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from builder.capacity import Capacity
from builder.provenance import Setting
from builder.resolve import Plan, Stage
from builder.tables import print_table
from models.contract import FieldDecision, Leaf, named_leaves
from models.vision import image_inputs

_SHOWN = 60
"""How much is shown of a value."""


def contract_json(plan: Plan) -> dict[str, Any]:
    """The contract: sixteen fields in canonical order, with their leaves.

    Where there are several stages, ``fields`` is what any of them takes, each leaf with its stage,
    and ``stages`` has each stage's own sixteen. ``vision`` has the inputs of the graph that encodes
    images, where there is one.
    """
    stages = [
        {
            "stage": stage.config.placement.stage,
            "layers": list(stage.config.placement.layers),
            "fields": [_field_json(plan, [(index, field)]) for field in stage.contract.fields],
        }
        for index, stage in enumerate(plan.stages)
    ]
    by_field = zip(*(stage.contract.fields for stage in plan.stages), strict=True)
    fields = [_field_json(plan, list(enumerate(decisions))) for decisions in by_field]
    contract: dict[str, Any] = {"fields": fields, "stages": stages}
    if plan.vision is not None:
        leaves = named_leaves("", image_inputs(plan.vision))
        contract["vision"] = {"inputs": [_leaf_json(plan, leaf) for leaf in leaves]}
    return contract


def _field_json(plan: Plan, decisions: Sequence[tuple[int, FieldDecision]]) -> dict[str, Any]:
    present = any(decision.present for _, decision in decisions)
    # The reasons of the stages that take the field, or where none does, of all.
    reasons = [decision.because for _, decision in decisions if decision.present == present]
    decision = decisions[0][1]
    return {
        "name": decision.name,
        "present": present,
        "because": "; ".join(dict.fromkeys(reasons)),
        "keys": list(decision.keys),
        "leaves": [
            {**_leaf_json(plan, leaf), "stage": stage}
            for stage, taken in decisions
            for leaf in taken.leaves
        ],
    }


def _leaf_json(plan: Plan, leaf: Leaf) -> dict[str, Any]:
    return {
        "path": leaf.path,
        **type_json(leaf.type),
        "kind": leaf.kind,
        "max_bytes": max_bytes(plan, leaf),
    }


def type_json(type_: TensorType | BufferType) -> dict[str, Any]:
    """The dtype, shape and device of a graph's input."""
    return {
        "dtype": type_.dtype.name,
        "shape": [int(str(dim)) if str(dim).isdigit() else str(dim) for dim in type_.shape],
        "device": f"{type_.device.device_type.value}:{type_.device.id}",
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan: configuration, settings, placement and memory."""
    return {
        "model": as_json(plan.model),
        "deployment": as_json(plan.deployment),
        "checkpoint": {
            "path": str(plan.checkpoint.path),
            "num_tensors": len(plan.checkpoint.tensors),
            "num_bytes": plan.checkpoint.num_bytes,
        },
        "settings": as_json(plan.settings),
        "max_length": plan.max_length,
        "num_pages": plan.num_pages,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "choices": [as_json(choice) for choice in plan.choices],
        "devices": [{**as_json(share), "total": share.total} for share in plan.devices],
        "capacity": None
        if plan.capacity is None
        else {**as_json(plan.capacity), "fits": plan.capacity.fits},
        "obstacles": list(plan.obstacles),
        "weights": {**as_json(plan.weights), "total": plan.weights.total},
    }


def as_json(value: Any) -> Any:
    """A dataclass as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, range):
        return {"start": value.start, "stop": value.stop}
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value


def max_bytes(plan: Plan, leaf: Leaf) -> int:
    """The bytes of an input when each symbolic dimension is at its limit."""
    total = leaf.type.dtype.size_in_bytes
    for dim in type_json(leaf.type)["shape"]:
        total *= dim if isinstance(dim, int) else plan.limits[dim]
    return total


def human_bytes(count: int) -> str:
    """Bytes for people: ``1.5 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def print_plan(plan: Plan, out: Console) -> None:
    """Prints each stage's contract, one row per field, then placement and memory."""
    for stage in plan.stages:
        _print_contract(plan, stage, out)
    if plan.vision is not None:
        out.print("the graph that encodes images", style="bold")
        inputs = _table("vision:", "", "dtype", "shape", "device", "at most")
        for leaf in named_leaves("", image_inputs(plan.vision)):
            inputs.add_row(f"  {leaf.path}", "", *_leaf_cells(plan, leaf))
        print_table(inputs, out)
    print_placement(plan, out)


def contract_line(stage: Stage) -> str:
    """A stage's contract in one line."""
    present = [field.name for field in stage.contract.fields if field.present]
    return (
        f"{', '.join(present)}: {len(present)} of {len(stage.contract.fields)} fields, "
        f"{len(stage.contract.leaves)} inputs"
    )


def _print_contract(plan: Plan, stage: Stage, out: Console) -> None:
    placement = stage.config.placement
    title = f"{plan.model.name} on {plan.deployment.name}"
    if len(plan.stages) > 1:
        title += f", stage {placement.stage}, {_span('layer', placement.layers)}"
    present = [field for field in stage.contract.fields if field.present]
    out.print(
        f"{title}: {len(present)} of {len(stage.contract.fields)} fields, "
        f"{len(stage.contract.leaves)} graph inputs",
        style="bold",
    )
    table = _table("field", "", "dtype", "shape", "device", "at most", "why  [config keys]")
    for field in stage.contract.fields:
        table.add_row(*_field_cells(plan, field), style="" if field.present else "dim")
    print_table(table, out)
    for field in present:
        if len(field.leaves) > 1:
            inputs = _table(f"{field.name}:", "", "dtype", "shape", "device", "at most")
            for leaf in field.leaves:
                name = leaf.path.removeprefix(f"{field.name}.")
                inputs.add_row(f"  {name}", "", *_leaf_cells(plan, leaf))
            print_table(inputs, out)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        right = heading == "at most"
        table.add_column(
            heading, justify="right" if right else "left", no_wrap=heading[:3] != "why"
        )
    return table


def _field_cells(plan: Plan, field: FieldDecision) -> tuple[str | Text, ...]:
    why = Text(field.because)
    if field.keys:
        why.append(f"  [{', '.join(field.keys)}]", style="cyan")
    if not field.present:
        return (field.name, "-", "", "", "", "", why)
    if len(field.leaves) == 1:
        return (field.name, "yes", *_leaf_cells(plan, field.leaves[0]), why)
    dtypes, devices = (
        ", ".join(dict.fromkeys(values))
        for values in (
            (leaf.type.dtype.name for leaf in field.leaves),
            (type_json(leaf.type)["device"] for leaf in field.leaves),
        )
    )
    total = sum(max_bytes(plan, leaf) for leaf in field.leaves)
    return (
        field.name,
        "yes",
        dtypes,
        f"{len(field.leaves)} inputs",
        devices,
        human_bytes(total),
        why,
    )


def _leaf_cells(plan: Plan, leaf: Leaf) -> tuple[str | Text, ...]:
    type_ = type_json(leaf.type)
    dtype = type_["dtype"] + (" buffer" if leaf.kind == "buffer" else "")
    shape = Text(f"[{', '.join(map(str, type_['shape']))}]")
    return dtype, shape, type_["device"], human_bytes(max_bytes(plan, leaf))


def _span(name: str, numbers: range) -> str:
    if len(numbers) == 1:
        return f"{name} {numbers.start}"
    return f"{name}s {numbers.start} to {numbers.stop - 1}" if numbers else f"no {name}s"


def summary_table(plan: Plan) -> Table:
    """A table of a job's results, begun with what was computed where."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("deployment", f"{plan.model.name} on {plan.deployment.name}")
    for number, stage in enumerate(plan.stages):
        name = "contract" if len(plan.stages) == 1 else f"contract {number}"
        table.add_row(name, contract_line(stage))
    return table


def print_placement(plan: Plan, out: Console) -> None:
    """Prints what each device holds, and where the bytes of the weights come from."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numbers, ranges, sizes = _placement_columns(plan)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ranges:
        table.add_column(heading, no_wrap=True)
    for heading in sizes:
        table.add_column(heading, justify="right", no_wrap=True)
    for share in plan.devices:
        table.add_row(
            *(str(getattr(share, name)) for name in numbers.values()),
            *(_ends(getattr(share, name)) for name in ranges.values()),
            *(human_bytes(getattr(share, name)) for name in sizes.values()),
        )
    print_table(table, out)
    items = plan.weights
    out.print(f"weights: {human_bytes(items.checkpoint)} of the checkpoint, each tensor once")
    for kind, extra in items.replicated.items():
        out.print(f"       + {human_bytes(extra)} of further copies of {kind}")
    for kind, extra in items.computed.items():
        out.print(f"       + {human_bytes(extra)} computed: {kind}")
    if len(items.kept) > 1:
        kept = ", ".join(f"{human_bytes(size)} as {name}" for name, size in items.kept.items())
        out.print(f"   kept: {kept}")
    out.print(
        f"KV: {plan.num_pages} pages of {plan.deployment.kv.page_size} tokens per replica, "
        f"{human_bytes(plan.kv_bytes_per_token)} per token; "
        f"sequences of up to {plan.max_length} tokens"
    )
    for choice in plan.choices:
        out.print(f"{choice.key}={json.dumps(choice.value)}: {choice.because}")
    if plan.capacity is not None:
        out.print(_capacity_line(plan, plan.capacity))
    for obstacle in plan.obstacles:
        out.print(f"cannot be run on this machine: {obstacle}", style="yellow")


def print_settings(settings: Mapping[str, Setting], out: Console) -> None:
    """Prints the keys that are not by default, with what set them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("key", "value", "set by"):
        table.add_column(heading, no_wrap=heading == "key", overflow="fold")
    for key, setting in settings.items():
        if setting.origin.by != "default":
            value = setting.value
            if not isinstance(value, str):
                value = json.dumps(value, ensure_ascii=False)
            shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
            table.add_row(key, shown, str(setting.origin))
    print_table(table, out)


def _capacity_line(plan: Plan, capacity: Capacity) -> str:
    accelerator, batch = capacity.accelerator, plan.batch.max_batch_size
    part = plan.deployment.devices.memory_utilization
    return (
        f"memory: {accelerator.name} has {human_bytes(accelerator.memory)}, of which "
        f"{human_bytes(capacity.usable)} are planned with ({part:g}); device {capacity.fullest} "
        f"needs {human_bytes(capacity.needed)}\n"
        f"largest: {capacity.largest_batch} sequences of {plan.max_length} tokens per replica; or "
        f"{batch} of {capacity.largest_length}"
    )


def _placement_columns(plan: Plan) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """The headings of numbers, ranges and bytes, and what of a share they show."""
    experts = plan.settings.experts is not None
    parts = {
        "image encoder": "vision",
        "constants": "constants",
        "KV pages": "kv_pages",
        "LoRA": "lora",
        "state": "state",
        "exchange": "exchange",
        "scratch": "scratch",
        "signals": "signals",
        "activations": "activations",
    }
    held = {
        heading: name
        for heading, name in parts.items()
        if name == "kv_pages" or any(getattr(share, name) for share in plan.devices)
    }
    numbers = {name: name for name in ("device", "stage", "replica", "rank")}
    ranges = {
        "layers": "layers",
        "heads": "heads",
        "KV heads": "kv_heads",
        "columns": "inner_columns",
        **({"experts": "experts", "their columns": "expert_columns"} if experts else {}),
        "vocabulary": "vocabulary",
    }
    sizes = {"weights": "weights", **held, "total": "total"}
    return numbers, ranges, sizes


def _ends(held: range) -> str:
    return f"{held.start}-{held.stop - 1}" if held else "-"
