"""Compiled graphs of jobs before, found by what they were made from.

MAX's own compile cache is asked with a traced graph, and tracing one and reading our kernels for it
takes two seconds of every start. What a host's graph depends on is known before it is traced.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max.engine import CompiledModel, InferenceSession

from builder.artifact import export, read_graphs
from builder.report import as_json
from builder.resolve import Plan
from models import SOURCES_VERSION
from models.errors import ConfigError
from models.kernels import kernels_version
from models.kernels.library import cache_folder

if TYPE_CHECKING:
    from max.pipelines.lib.graph_specs import CompiledArtifacts

PROCESSOR = Path("/proc/cpuinfo")
"""Where Linux says what the processor can do."""

PROCESSOR_FACTS = ("model name", "flags", "CPU implementer", "CPU part", "Features")
"""The beginnings of its lines that say so, on x86 and on Arm."""

COMPILED_IN = ("USE_FI_TOPK_KERNEL", "ENABLE_PER_TENSOR_FP8_QUANTIZE")
"""Variables of the environment that a session of MAX compiles with, beside ``MODULAR_*``."""

INERT = (
    *("MODULAR_CACHE_DIR", "MODULAR_TELEMETRY_ENABLED", "MODULAR_MAX_PACKAGE_ROOT"),
    *("MODULAR_MOJO_MAX_PACKAGE_ROOT", "MODULAR_MOJO_MAX_IMPORT_PATH"),
)
"""Those of ``MODULAR_*`` that change no graph; MAX sets the last three when it is imported."""


def find(plan: Plan) -> CompiledArtifacts | None:
    """A plan's compiled graphs; ``None`` where none are kept.

    Args:
        plan: The plan.
    """
    folder = kept_in(plan)
    if folder is None or not folder.is_dir():
        return None
    try:
        return read_graphs(folder)
    except ConfigError:
        told = f"the compiled graphs in {folder} are damaged: compiled anew"
        print(told, file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def keep(plan: Plan, artifacts: Mapping[str, CompiledModel]) -> None:
    """Keeps a plan's compiled graphs for later jobs, unless they are kept.

    Args:
        plan: What they were compiled for.
        artifacts: The compiled model that holds each role's graph.
    """
    folder = kept_in(plan)
    if folder is None or folder.is_dir():
        return
    try:
        export(plan, artifacts, folder, replaces=False)
    except OSError as error:
        # Unless another process was first, the next job will wait; this one has its graphs.
        if not folder.is_dir():
            print(f"can't keep compiled graphs: {error}", file=sys.stderr, flush=True)


def kept_in(plan: Plan) -> Path | None:
    """The folder of a plan's graphs, an artifact.

    Args:
        plan: The plan.

    Returns:
        The folder; ``None`` where they are an accelerator's, or read from an artifact.
    """
    if plan.capacity is not None or plan.deployment.artifact is not None:
        return None
    name = hashlib.sha256(made_from(plan).encode()).hexdigest()[:32]
    return cache_folder() / "graphs" / name


def made_from(plan: Plan) -> str:
    """Everything that the graphs of a host's plan depend on, as text.

    Args:
        plan: The plan.
    """
    facts = {
        "max": version("max"),
        "settings": _settings(),
        "kernels": kernels_version(),
        "sources": SOURCES_VERSION,
        "processor": processor(),
        "stages": [as_json(stage.config) for stage in plan.stages],
        "vision": as_json(plan.vision),
    }
    # MAX's own types say all of themselves as text.
    return json.dumps(facts, default=repr, sort_keys=True)


def _settings() -> dict[str, Any]:
    """What MAX compiles with: its settings in the environment, and those of debugging in force."""
    debug = InferenceSession.debug
    return {
        "environment": {
            name: value
            for name, value in os.environ.items()
            if (name.startswith("MODULAR_") and name not in INERT) or name in COMPILED_IN
        },
        "debug": {
            name: getattr(debug, name)
            for name in dir(debug)
            if not name.startswith("_") and not callable(getattr(debug, name))
        },
    }


@cache
def processor() -> list[str]:
    """The processor that code is compiled for."""
    found = {platform.machine(), f"{os.cpu_count()} cores"}
    if PROCESSOR.is_file():
        lines = PROCESSOR.read_text().splitlines()
        found |= {line for line in lines if line.startswith(PROCESSOR_FACTS)}
    return sorted(found)
