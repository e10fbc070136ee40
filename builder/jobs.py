"""Runs one composed job to its end, whatever that is, and writes how it ended."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from builder.compose import to_config
from builder.interrupt import InterruptedJob, Interrupts
from builder.job import JobFolder, exit_status
from builder.processes import process_facts
from builder.provenance import with_provenance
from builder.schema import TASKS
from builder.shared import Shared
from builder.steps import FailedJob, Job, SomeRefused
from builder.tables import console
from builder.tasks import task_runner
from models.errors import ConfigError

GROUPS = ("model", "deployment", "task")
"""The groups whose choices a job is."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended."""

    status: str
    """``ok``, ``failed``, ``error``, ``interrupted`` or ``killed``."""

    error: str | None = None
    """What went wrong, as the terminal says it."""

    trace: str | None = None
    """The traceback; printed where it is asked for, or where the fault is ours."""

    is_defect: bool = False
    """Whether the fault is ours."""

    stops: bool = False
    """Whether the command was asked to stop, though the job came to its end."""

    objective: float | None = None
    """The figure that a search maximises; ``None`` where the task has none."""

    @property
    def told(self) -> str:
        """The line for the terminal."""
        if self.status in ("failed", "killed"):
            return f"{self.status}: {self.error}"
        return f"error: {self.error}"

    @property
    def exit_status(self) -> int:
        """The command's, where it runs this job alone."""
        return exit_status(self.status, self.is_defect)


def job_facts(hydra: HydraConf) -> dict[str, Any]:
    """What was asked for in a job.

    Args:
        hydra: Hydra's own configuration of it.
    """
    # As they were written: what looks like an interpolation may be a prompt.
    words = list(map(str, OmegaConf.to_container(hydra.overrides.task)))  # type: ignore[arg-type]
    chosen = hydra.runtime.choices
    return {
        "num": None if OmegaConf.is_missing(hydra.job, "num") else hydra.job.num,
        **{group: str(chosen[group]) for group in GROUPS},
        "overrides": [word for word in words if word.partition("=")[0] not in GROUPS],
        "sweep": None if hydra.mode is RunMode.RUN else str(sweep_folder(hydra)),
    }


def sweep_folder(hydra: HydraConf) -> Path:
    """The folder of the sweep that is composed, whatever folder the job is in.

    Args:
        hydra: Hydra's own configuration.
    """
    return Path(hydra.runtime.cwd, hydra.sweep.dir).expanduser()


def run_job(composed: DictConfig, began: float, shared: Shared) -> Ended:
    """Runs one job, writes how it ended, and tells where.

    Args:
        composed: The job's configuration, as Hydra composed it.
        began: When composing it began, by ``time.perf_counter``.
        shared: What the jobs of this process share.
    """
    hydra = HydraConfig.get()
    folder = JobFolder(Path(hydra.runtime.output_dir))
    folder.begin(job_facts(hydra), process_facts())
    out = console()
    ended = _run(composed, began, shared, folder, out)
    if folder.has_results:
        # A line of its own, however long: it is copied.
        out.print(f"files: {folder.shown(Path(hydra.runtime.cwd))}", soft_wrap=True)
    return ended


def _run(
    composed: DictConfig, began: float, shared: Shared, folder: JobFolder, out: Console
) -> Ended:
    job: Job | None = None

    def stopped() -> None:
        folder.write_status("interrupted")

    with Interrupts(on_exit=stopped) as interrupts:
        try:
            config = to_config(composed)
            job = Job(config, folder, interrupts, shared, out)
            job.seconds["compose"] = time.perf_counter() - began
            name = next(name for name, task in TASKS.items() if type(config.task) is task)
            objective = task_runner(name)(job)
        except (InterruptedJob, KeyboardInterrupt):
            stopped()
            return Ended(status="interrupted")
        except FailedJob as error:
            folder.write_status("failed", str(error), **_facts(job))
            return replace(_ended("failed", error), stops=interrupts.requested)
        except ConfigError as error:
            if interrupts.requested:
                # What could not be fetched because the download was stopped too.
                stopped()
                return Ended(status="interrupted")
            if not isinstance(error, SomeRefused):
                folder.discard()
            told = with_provenance(error)
            folder.write_status("error", str(told))
            return _ended("error", told)
        except Exception as error:  # noqa: BLE001 - a defect, told with its traceback
            text = f"{type(error).__name__}: {error}"
            folder.write_status("error", text, is_defect=True, **_facts(job))
            return Ended(status="error", error=text, trace=traceback.format_exc(), is_defect=True)
        folder.write_status("ok", **_facts(job))
        return Ended(status="ok", objective=objective, stops=interrupts.requested)


def _facts(job: Job | None) -> Mapping[str, Any]:
    return {} if job is None else {"seconds": job.seconds, "compiled": job.compiled}


def _ended(status: str, error: Exception) -> Ended:
    return Ended(status=status, error=str(error), trace=traceback.format_exc())
