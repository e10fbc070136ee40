"""Compiled graphs as files: exported with what they were compiled for, and checked against it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max.engine import CompiledModel, read

from builder.report import as_json, contract_json
from builder.resolve import Plan
from models.errors import ConfigError
from models.kernels import kernels_version

if TYPE_CHECKING:
    # Importing MAX's pipelines costs two seconds, which checking does without.
    from max.pipelines.lib.graph_specs import CompiledArtifacts

DESCRIPTION = "artifact.json"
"""What an artifact's graphs were compiled for, and the file of each role."""


def describe(plan: Plan) -> dict[str, Any]:
    """Everything that the graphs of a plan depend on, as JSON.

    Args:
        plan: The plan.
    """
    deployment, contract = plan.deployment, contract_json(plan)
    on_host = plan.capacity is None
    return {
        "max": version("max"),
        "kernels": kernels_version() if on_host else None,
        "target": "cpu" if plan.capacity is None else plan.capacity.accelerator.target,
        "deployment": {
            "devices": {"count": deployment.devices.count},
            "parallel": as_json(deployment.parallel),
            "constants": as_json(deployment.constants),
            "max_length": plan.max_length,
            "return_logits": plan.stages[-1].config.return_logits.value,
            "vision": deployment.vision,
            **({} if on_host else _limits(plan)),
        },
        "settings": as_json(plan.settings),
        "encoding": plan.encoding.value,
        "stored": dict(plan.stages[0].config.stored),
        "inputs": {
            "decoder": [
                _inputs(leaf for field in stage["fields"] for leaf in field["leaves"])
                for stage in contract["stages"]
            ],
            "vision": _inputs(contract.get("vision", {"inputs": []})["inputs"]),
        },
    }


def _limits(plan: Plan) -> dict[str, Any]:
    """What is in an accelerator's graph as a constant, and on the host in the shape of an input."""
    config = plan.stages[0].config
    return {
        "batch": {
            "max_batch_size": config.max_batch_size,
            "max_batch_input_tokens": config.max_batch_input_tokens,
        },
        "max_context_length": config.max_context_length,
    }


def _inputs(leaves: Any) -> list[dict[str, Any]]:
    return [{key: leaf[key] for key in ("path", "dtype", "shape", "device")} for leaf in leaves]


def export(
    plan: Plan, artifacts: Mapping[str, CompiledModel], folder: Path, *, replaces: bool = True
) -> None:
    """Writes compiled graphs, whole or not at all.

    Args:
        plan: What they were compiled for.
        artifacts: The compiled model that holds each role's graph.
        folder: Where to.
        replaces: Whether what is there is replaced.

    Raises:
        OSError: If they can't be written, or are there and stay.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        files: dict[int, str] = {}
        for compiled in artifacts.values():
            if id(compiled) not in files:
                files[id(compiled)] = f"graphs_{len(files)}.mef"
                _write(compiled, made / files[id(compiled)])
        roles = {role: files[id(compiled)] for role, compiled in artifacts.items()}
        contents = {"roles": roles, **describe(plan)}
        (made / DESCRIPTION).write_text(json.dumps(contents, indent=1) + "\n")
        if replaces:
            shutil.rmtree(folder, ignore_errors=True)
        made.replace(folder)


def _write(compiled: CompiledModel, file: Path) -> None:
    try:
        compiled.export_mef(str(file))
    except ValueError as error:
        # So MAX says that a file can't be written.
        raise OSError(f"{file}: {error}") from error


def check_artifact(plan: Plan) -> Path | None:
    """The graphs of the artifact that a plan names are the plan's.

    Args:
        plan: The plan.

    Returns:
        The artifact; ``None`` where the plan names none.

    Raises:
        ConfigError: If it is none, or was compiled for something else.
    """
    if plan.deployment.artifact is None:
        return None
    folder = Path(plan.deployment.artifact).expanduser()
    # Before encodings could be kept, artifacts did not say which are.
    found = {"stored": {}, **_description(folder)}
    difference = _first_difference("", found, {"roles": found["roles"], **describe(plan)})
    if difference is not None:
        where, there, here = difference
        raise ConfigError(
            f"deployment.artifact: {folder} was compiled for something else: {where} is {there} "
            f"there, {here} here\n  what works: what it was compiled for, or task=compile anew"
        )
    return folder


def read_graphs(folder: Path) -> CompiledArtifacts:
    """Reads an artifact's graphs, which takes the place of compiling them.

    Args:
        folder: The artifact.

    Raises:
        ConfigError: If a file of it is missing or damaged.
    """
    from max.pipelines.lib.graph_specs import CompiledArtifacts

    roles = _description(folder)["roles"]
    files = sorted(set(roles.values()))
    try:
        compiled = [read(str(folder / file)) for file in files]
    except RuntimeError as error:
        raise ConfigError(f"deployment.artifact: {folder} is damaged: {error}") from error
    return CompiledArtifacts(compiled, {role: files.index(file) for role, file in roles.items()})


def _description(folder: Path) -> dict[str, Any]:
    file = folder / DESCRIPTION
    if not file.is_file():
        raise ConfigError(f"deployment.artifact: {folder} has no {DESCRIPTION}")
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
        missing = [name for name in contents["roles"].values() if not (folder / name).is_file()]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"deployment.artifact: {file} is damaged: {error}") from error
    if missing:
        raise ConfigError(f"deployment.artifact: {folder} has no {missing[0]}")
    described: dict[str, Any] = contents
    return described


def _first_difference(path: str, there: Any, here: Any) -> tuple[str, Any, Any] | None:
    """The first place in which two JSON values differ, and what is in it."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*here, *(key for key in there if key not in here)]:
            found = _first_difference(f"{path}.{key}", there.get(key), here.get(key))
            if found is not None:
                return found
        return None
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, pair in enumerate(zip(there, here, strict=True)):
            found = _first_difference(f"{path}.{number}", *pair)
            if found is not None:
                return found
        return None
    return None if there == here else (path.removeprefix("."), there, here)
