"""Compiled graphs of jobs before, found by what they were made from.

MAX's own compile cache is asked with a traced graph, and tracing one and reading our kernels for it
takes two seconds of every start. What a host's graph depends on is known before it is traced.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

from max.engine import CompiledModel

import models
from builder.artifact import export
from builder.report import as_json
from builder.resolve import Plan
from models.kernels import kernels_version
from models.kernels.library import cache_folder

SOURCES = Path(models.__file__).parent
"""The layers that graphs are traced from."""

PROCESSOR = Path("/proc/cpuinfo")
"""Where Linux says what the processor can do."""

INERT = ("MODULAR_CACHE_DIR", "MODULAR_TELEMETRY_ENABLED")
"""Settings of MAX in the environment that change no graph."""


def find(plan: Plan) -> Path | None:
    """The folder of a plan's compiled graphs, an artifact; ``None`` where none are kept.

    Args:
        plan: The plan.
    """
    folder = _folder(plan)
    return folder if folder is not None and folder.is_dir() else None


def keep(plan: Plan, artifacts: Mapping[str, CompiledModel]) -> None:
    """Keeps a plan's compiled graphs for later jobs, unless they are kept.

    Args:
        plan: What they were compiled for.
        artifacts: The compiled model that holds each role's graph.
    """
    folder = _folder(plan)
    if folder is None or folder.is_dir():
        return
    try:
        export(plan, artifacts, folder, replaces=False)
    except OSError as error:
        # Unless another process was first, the next job will wait; this one has its graphs.
        if not folder.is_dir():
            print(f"can't keep compiled graphs: {error}", file=sys.stderr, flush=True)


def made_from(plan: Plan) -> str:
    """Everything that the graphs of a host's plan depend on, as text."""
    facts = {
        "max": version("max"),
        "kernels": kernels_version(),
        "sources": sources_version(),
        "processor": processor(),
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("MODULAR_") and name not in INERT
        },
        "stages": [as_json(stage.config) for stage in plan.stages],
        "vision": as_json(plan.vision),
    }
    # MAX's own types say all of themselves as text.
    return json.dumps(facts, default=repr)


def _folder(plan: Plan) -> Path | None:
    if plan.capacity is not None or plan.deployment.artifact is not None:
        return None
    name = hashlib.sha256(made_from(plan).encode()).hexdigest()[:32]
    return cache_folder() / "graphs" / name


@cache
def sources_version() -> str:
    """What tells the sources of the layers from all others."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.rglob("*.py")):
        digest.update(str(source.relative_to(SOURCES)).encode() + source.read_bytes())
    return digest.hexdigest()


@cache
def processor() -> list[str]:
    """The processor that code is compiled for."""
    found = {platform.machine(), platform.processor(), f"{os.cpu_count()} cores"}
    if PROCESSOR.is_file():
        lines = PROCESSOR.read_text().splitlines()
        found |= {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return sorted(found)
