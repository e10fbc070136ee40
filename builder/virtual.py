"""Compiling for accelerators that are not here, in a process of its own.

MAX's virtual devices belong to a process, and have to be the first it makes: what was compiled for
the CPU before would be for them.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.accelerators import accelerator_of, compile_error, max_reason
from builder.interrupt import InterruptedJob
from builder.resolve import Plan, resolve
from builder.schema import DeploymentConfig, ModelConfig

MEMORY_PART = 0.9
"""The part of this machine's memory that a compile may take: some take all before they fail."""


POLL_S = 0.2
"""How often is asked whether to stop, in seconds."""


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
    process = subprocess.Popen(
        [sys.executable, "-m", "builder.virtual"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # As Python knows it: Mojo puts another interpreter into the process' own (26.7).
        env=dict(os.environ),
        # Ctrl-C is this process' to notice.
        start_new_session=True,
    )
    try:
        output, said = _wait(process, pickle.dumps(order), should_stop)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    # A status of its own is a defect of ours; a signal ends MAX's compiler.
    assert process.returncode <= 0, said.decode()
    answer = json.loads(output) if process.returncode == 0 else {}
    if "inputs" in answer:
        return CompiledForTarget(**answer)
    reason = answer["reason"] if answer else _how_it_ended(process.returncode)
    assert plan.capacity is not None
    raise compile_error(plan.capacity.accelerator, reason)


def _wait(
    process: subprocess.Popen[bytes], order: bytes, should_stop: Callable[[], bool]
) -> tuple[bytes, bytes]:
    """What a process writes until it ends, to standard output and error."""
    given: bytes | None = order
    while True:
        try:
            return process.communicate(given, timeout=POLL_S)
        except subprocess.TimeoutExpired:
            # It goes on where it was, and takes no input a second time.
            given = None
            if should_stop():
                raise InterruptedJob from None
            if _resident_bytes(process.pid) > _memory_limit():
                process.kill()


def _resident_bytes(pid: int) -> int:
    """The memory that a process has; 0 where the system does not tell."""
    file = Path(f"/proc/{pid}/statm")
    pages = int(file.read_text().split()[1]) if file.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _how_it_ended(status: int) -> str:
    limit = _memory_limit() / 2**30
    name = signal.Signals(-status).name
    return f"its compiler ended with {name}; it may take {limit:.1f} GiB of memory here"


def _memory_limit() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
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


def main() -> None:
    """Compiles what standard input orders, and answers in JSON on standard output."""
    os.environ.setdefault("MODULAR_TELEMETRY_ENABLED", "0")
    order = pickle.load(sys.stdin.buffer)
    # MAX may print; the answer is alone on standard output.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    status = 0
    try:
        json.dump(_compile(order), answer)
        answer.close()
    except BaseException:  # noqa: BLE001 - told with its traceback
        traceback.print_exc()
        status = 1
    # Devices that are none have nothing to tear down, and MAX may hang trying.
    os._exit(status)


if __name__ == "__main__":
    # By its own name, as the order is pickled.
    from builder import virtual

    virtual.main()
