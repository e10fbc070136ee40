"""What a plan looks like: as JSON for programs, as tables for people."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from builder.resolve import Plan
from models.contract import FieldDecision, Leaf


def console() -> Console:
    """The terminal, or a wide page where there is none."""
    probe = Console(highlight=False)
    return probe if probe.is_terminal else Console(highlight=False, width=160)


def contract_json(plan: Plan) -> dict[str, Any]:
    """The contract: sixteen fields in canonical order, with their leaves."""
    return {
        "fields": [
            {
                "name": field.name,
                "present": field.present,
                "because": field.because,
                "keys": list(field.keys),
                "leaves": [
                    {
                        "path": leaf.path,
                        "dtype": leaf.type.dtype.name,
                        "shape": _shape(leaf),
                        "device": device_name(leaf),
                        "kind": leaf.kind,
                        "max_bytes": max_bytes(plan, leaf),
                    }
                    for leaf in field.leaves
                ],
            }
            for field in plan.contract.fields
        ]
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
        "memory": [{**dataclasses.asdict(device), "total": device.total} for device in plan.memory],
    }


def as_json(value: Any) -> Any:
    """A dataclass as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value


def _shape(leaf: Leaf) -> list[int | str]:
    return [int(str(dim)) if str(dim).isdigit() else str(dim) for dim in leaf.type.shape]


def device_name(leaf: Leaf) -> str:
    """The device of an input, such as ``cpu:0``."""
    device = leaf.type.device
    return f"{device.device_type.value}:{device.id}"


def max_bytes(plan: Plan, leaf: Leaf) -> int:
    """The bytes of an input when each symbolic dimension is at its limit."""
    total = leaf.type.dtype.size_in_bytes
    for dim in _shape(leaf):
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
    """Prints the contract, one row per field, then each many-leaved field's inputs, and memory."""
    present = [field for field in plan.contract.fields if field.present]
    out.print(
        f"[bold]{plan.model.name}[/] on [bold]{plan.deployment.name}[/]: "
        f"{len(present)} of {len(plan.contract.fields)} fields, "
        f"{len(plan.contract.leaves)} graph inputs"
    )
    table = _table("field", "", "dtype", "shape", "device", "at most", "why  [config keys]")
    for field in plan.contract.fields:
        table.add_row(*_field_cells(plan, field), style="" if field.present else "dim")
    out.print(table)
    for field in present:
        if len(field.leaves) > 1:
            inputs = _table(f"{field.name}:", "", "dtype", "shape", "device", "at most")
            for leaf in field.leaves:
                name = leaf.path.removeprefix(f"{field.name}.")
                inputs.add_row(f"  {name}", "", *_leaf_cells(plan, leaf))
            out.print(inputs)
    print_memory(plan, out)


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
            (device_name(leaf) for leaf in field.leaves),
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
    dtype = leaf.type.dtype.name + (" buffer" if leaf.kind == "buffer" else "")
    shape = Text(f"[{', '.join(map(str, _shape(leaf)))}]")
    return dtype, shape, device_name(leaf), human_bytes(max_bytes(plan, leaf))


def print_memory(plan: Plan, out: Console) -> None:
    """Prints what each device holds."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("device")
    for heading in ("weights", "KV pages", "total"):
        table.add_column(heading, justify="right")
    for device in plan.memory:
        table.add_row(
            device.device,
            *map(human_bytes, (device.weights, device.kv_pages, device.total)),
        )
    out.print(table)
    out.print(
        f"KV: {plan.num_pages} pages of {plan.deployment.kv.page_size} tokens, "
        f"{human_bytes(plan.kv_bytes_per_token)} per token; "
        f"sequences of up to {plan.max_length} tokens"
    )
