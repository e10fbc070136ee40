"""Compiling for accelerators that are not here, in a process of its own.

MAX's virtual devices belong to a process, and have to be the first it makes: what was compiled for
the CPU before would be for them.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.accelerators import accelerator_of, compile_error, max_reason
from builder.apart import answer_order, carry_out
from builder.machine import memory_bytes
from builder.resolve import Plan, resolve
from builder.schema import DeploymentConfig, ModelConfig

MEMORY_PART = 0.9
"""The part of this machine's memory that a compile may take: some take all before they fail."""


@dataclass(frozen=True)
class _Order:
    """What the process is to compile."""

    model: ModelConfig
    deployment: DeploymentConfig
    source: Path
    folder: Path


@dataclass(frozen=True, kw_only=True)
class CompiledForTarget:
    """Graphs that were compiled and exported for accelerators."""

    inputs: Mapping[str, list[dict[str, Any]]]
    """What each role's compiled graph takes, in order."""

    peak_bytes: int
    """The most memory that the compile took."""


def compile_virtual(
    plan: Plan, folder: Path, should_stop: Callable[[], bool] = lambda: False
) -> CompiledForTarget:
    """Compiles a plan's graphs for its accelerators and exports them.

    Args:
        plan: The plan, of virtual devices.
        folder: Where the artifact goes.
        should_stop: Asked several times a second.

    Raises:
        ConfigError: If MAX can't compile them, with its reason.
        InterruptedJob: If it was asked to stop.
    """
    order = _Order(plan.model, plan.deployment, plan.checkpoint.path, folder)
    answer = carry_out("builder.virtual", order, should_stop, memory_limit=_memory_limit())
    if answer.signal is None and "inputs" in answer.contents:
        return CompiledForTarget(**answer.contents)
    reason = _how_it_ended(answer.signal) if answer.signal else answer.contents["reason"]
    assert plan.capacity is not None
    raise compile_error(plan.capacity.accelerator, reason)


def _how_it_ended(name: str) -> str:
    limit = _memory_limit() / 2**30
    return f"its compiler ended with {name}; it may take {limit:.1f} GiB of memory here"


def _memory_limit() -> int:
    total = memory_bytes()
    return int(total * MEMORY_PART)


def _compile(order: _Order) -> dict[str, Any]:
    """Compiles and exports, in the process of its own."""
    from max import driver

    accelerator = accelerator_of(order.deployment.devices)
    assert accelerator is not None
    count = order.deployment.devices.count
    driver.set_virtual_device_api(accelerator.api)
    driver.set_virtual_device_target_arch(accelerator.arch)
    driver.set_virtual_device_count(count)

    from max.engine import InferenceSession
    from max.graph import Module as GraphModule

    from builder.artifact import export
    from builder.report import type_json
    from models.checkpoints import open_checkpoint
    from models.decoder import CausalDecoder
    from models.graphs import RoleModules

    plan = resolve(order.model, order.deployment, open_checkpoint(order.source))
    stages = [stage.config for stage in plan.stages]
    specs = RoleModules.of(CausalDecoder, None, stages, None).specs(None)
    session = InferenceSession(devices=[driver.Accelerator(number) for number in range(count)])
    together = GraphModule() if len(specs) > 1 else None
    graphs = {role: spec.trace(together) for role, spec in specs.items()}
    try:
        compiled = session.compile(together if together is not None else graphs["decoder"])
        export(plan, dict.fromkeys(specs, compiled), order.folder)
    except Exception as error:  # noqa: BLE001 - told to the process that asked
        return {"reason": max_reason(error)}
    return {
        "inputs": {
            role: [type_json(value.type) for value in graph.inputs]
            for role, graph in graphs.items()
        },
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    # By its own name, as the order is pickled.
    from builder import virtual

    answer_order(virtual._compile)
