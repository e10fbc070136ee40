"""How long compiling takes in a process of its own, with caches of one's choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.apart import answer_order, carry_out
from builder.resolve import Plan, resolve
from builder.schema import DeploymentConfig, ModelConfig


@dataclass(frozen=True)
class _Order:
    """What the process is to compile."""

    model: ModelConfig
    deployment: DeploymentConfig
    source: Path


@dataclass(frozen=True)
class CompileTime:
    """One compile."""

    seconds: float
    """Opening a session and loading the model into it, its weights included."""

    cache_hit: bool
    """Whether every graph was found compiled."""


def compile_apart(plan: Plan, cache: Path, should_stop: Callable[[], bool]) -> CompileTime:
    """Compiles a plan's graphs in a new process, and says how long that took.

    Args:
        plan: The plan.
        cache: The folder of ours and MAX's; an empty one is cold.
        should_stop: Asked several times a second.

    Raises:
        InterruptedJob: If it was asked to stop.
        RuntimeError: If a signal ended it.
    """
    order = _Order(plan.model, plan.deployment, plan.checkpoint.path)
    answer = carry_out("builder.cold", order, should_stop, {"MODULAR_CACHE_DIR": str(cache)})
    if answer.signal is not None:
        raise RuntimeError(f"compiling apart ended with {answer.signal}")
    return CompileTime(**answer.contents)


def _compile(order: _Order) -> dict[str, Any]:
    """Compiles, in the process of its own."""
    from builder.build import build
    from builder.compile import compile_registration, process_session
    from models.checkpoints import open_checkpoint

    plan = resolve(order.model, order.deployment, open_checkpoint(order.source))
    registration = build(plan)
    began = time.perf_counter()
    session = process_session(0 if plan.capacity is None else plan.deployment.devices.count)
    compiled = compile_registration(registration, session)
    return {"seconds": time.perf_counter() - began, "cache_hit": compiled.cache_hit}


if __name__ == "__main__":
    # By its own name, as the order is pickled.
    from builder import cold

    answer_order(cold._compile)
