"""The engines there are: what each runs, in which interpreter, and what it is given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.files import gguf_file
from benchmarks.workload import Workload
from builder.serving import served_folder
from models.checkpoints.gguf import GGUFCheckpoint

ROLECALL = {
    "float32": (None, ("model.encoding=float32",)),
    "F32": ("F32", ("model.encoding=float32",)),
    "BF16": ("BF16", ("model.encoding=float32",)),
    "Q4_1": ("Q4_1", ("model.encoding=stored",)),
    "Q4_0": ("Q4_0", ("model.encoding=stored",)),
}
"""Our own variants: the format of the file, where not the workload's own, and the overrides."""

LLAMA_CPP = ("F32", "BF16", "Q4_1", "Q4_0")
"""The formats of llama.cpp's file; the one that the file has is the file as it is."""

INSTALL = "make peers"
"""What installs the engines that are not our dependencies."""


class UnavailableError(Exception):
    """An engine can't be run here, with the reason."""


@dataclass(frozen=True)
class Engine:
    """One engine with one set of settings."""

    name: str
    """What tables call it."""

    module: str
    """Its process's module."""

    settings: Callable[[Workload], dict[str, Any]]
    """What its process is given."""

    packages: tuple[str, ...] = ()
    """What its interpreter must have; nothing where that is ours."""


def _rolecall(kind: str | None, overrides: tuple[str, ...]) -> Callable[[Workload], dict[str, Any]]:
    def settings(work: Workload) -> dict[str, Any]:
        file = []
        if kind is not None:
            # The file that llama.cpp reads, too.
            path = _gguf(work, kind)
            file = ["model=local", f"model.source={path}"]
        # The same prompts come again: what is measured is computing them.
        alone = "deployment.kv.prefix_caching=false"
        return {"overrides": [*work.overrides, *work.limits, *file, alone, *overrides]}

    return settings


def _max(encoding: str) -> Callable[[Workload], dict[str, Any]]:
    return lambda work: {
        "folder": str(served_folder(work.plan)),
        "encoding": encoding,
        "batch": work.batch,
        "max_length": work.max_length,
        "memory_share": work.memory_share(work.batch),
    }


def _gguf(work: Workload, kind: str) -> Path:
    """The workload's model as a GGUF file of some format."""
    checkpoint = work.plan.checkpoint
    if not isinstance(checkpoint, GGUFCheckpoint):
        raise UnavailableError(f"{checkpoint.path} is no GGUF file")
    return gguf_file(checkpoint.path, kind)


def _llama_cpp(kind: str) -> Callable[[Workload], dict[str, Any]]:
    def settings(work: Workload) -> dict[str, Any]:
        return {
            "file": str(_gguf(work, kind)),
            "batch": work.batch,
            "max_length": work.max_length,
            "threads": work.threads,
        }

    return settings


def _transformers(work: Workload) -> dict[str, Any]:
    return {"folder": str(served_folder(work.plan)), "threads": work.threads}


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        *(
            Engine(f"rolecall-{label}", "rolecall", _rolecall(kind, overrides))
            for label, (kind, overrides) in ROLECALL.items()
        ),
        Engine("max-float32", "max_pipeline", _max("float32")),
        *(
            Engine(f"llama.cpp-{kind}", "llama_cpp", _llama_cpp(kind), ("llama_cpp",))
            for kind in LLAMA_CPP
        ),
        Engine("transformers-float32", "transformers", _transformers, ("torch", "transformers")),
    )
}
"""Every engine, by name."""

REFERENCES = ("transformers-float32", "llama.cpp-F32")
"""Whose tokens the others' are held against: the first that was measured."""


def interpreter(engine: Engine, candidates: Sequence[Path]) -> Path:
    """The interpreter to run an engine in.

    Args:
        engine: The engine.
        candidates: Interpreters that peers may be installed in.

    Raises:
        UnavailableError: If none has what it needs.
    """
    if not engine.packages:
        return Path(sys.executable)
    program = (
        "import sys; from importlib.util import find_spec; "
        "sys.exit(not all(map(find_spec, sys.argv[1:])))"
    )
    for path in candidates:
        command = [str(path), "-c", program, *engine.packages]
        if (
            path.is_file()
            and not subprocess.run(command, check=False, env=environment()).returncode
        ):
            return path
    names = " and ".join(engine.packages)
    places = ", ".join(map(str, candidates))
    raise UnavailableError(f"{names} not installed in {places}; `{INSTALL}` installs it")


def environment() -> dict[str, str]:
    """The environment of an engine's process.

    Given explicitly because MAX puts PYTHONEXECUTABLE into the process's own, behind os.environ.
    """
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"MODULAR_TELEMETRY_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}
