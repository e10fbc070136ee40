"""``task=compile``: every graph, exported with what it was compiled for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder.report import human_bytes, summary_table
from builder.steps import Job

if TYPE_CHECKING:
    from builder.compile import Compiled

FOLDER = "artifact"
"""The artifact, in the job's folder."""


def run(job: Job) -> None:
    """Compiles the deployment, exports its graphs, and loads them back.

    Raises:
        ConfigError: If the deployment can't be compiled.
    """
    plan = job.plan()
    compiled = job.compile(plan)
    from builder.artifact import export

    folder = job.folder.path / FOLDER
    artifacts = compiled.model.compiled_artifacts
    roles = compiled.model.roles
    with job.step("export", f"exporting {', '.join(roles)}"):
        export(plan, {role: artifacts.artifact(role) for role in roles}, folder)
    deployment = replace(plan.deployment, artifact=str(folder))
    job.compile(replace(plan, deployment=deployment))
    _print_summary(job, compiled, folder)


def _print_summary(job: Job, compiled: Compiled, folder: Path) -> None:
    plan = compiled.registration.plan
    table = summary_table(plan)
    table.add_row("compile cache", "hit" if compiled.cache_hit else "miss")
    size = sum(file.stat().st_size for file in folder.iterdir())
    table.add_row("artifact", f"{human_bytes(size)}, loaded back; the weights are not in it")
    table.add_row("steps", ", ".join(f"{name} {took:.2f} s" for name, took in job.seconds.items()))
    table.add_row("use it with", f"deployment.artifact={folder}")
    job.out.print(table)
