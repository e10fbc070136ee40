"""``task=compile``: every graph, exported with what it was compiled for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from builder.report import human_bytes, summary_table, type_json
from builder.resolve import Plan
from builder.schema import DeviceKind
from builder.steps import Job
from builder.tables import print_table
from builder.virtual import compile_virtual
from models.placement import stage_role

if TYPE_CHECKING:
    from builder.compile import Compiled

FOLDER = "artifact"
"""The artifact, in the job's folder."""


def run(job: Job) -> None:
    """Compiles the deployment, exports its graphs, and loads them back.

    An artifact that the deployment names is what this makes anew, so it is not looked at.

    Raises:
        ConfigError: If the deployment can't be compiled.
    """
    folder = job.folder.path / FOLDER
    job.config = replace(job.config, deployment=replace(job.config.deployment, artifact=None))
    if job.config.deployment.devices.kind is DeviceKind.virtual:
        _compile_for_target(job, folder)
        return
    plan = job.plan()
    compiled = job.compile(plan)
    from builder.artifact import export

    artifacts = compiled.model.compiled_artifacts
    roles = compiled.model.roles
    with job.step("export", f"exporting {', '.join(roles)}"):
        export(plan, {role: artifacts.artifact(role) for role in roles}, folder)
    deployment = replace(plan.deployment, artifact=str(folder))
    job.compile(replace(plan, deployment=deployment))
    _print_summary(job, compiled, folder)


def _compile_for_target(job: Job, folder: Path) -> None:
    plan = job.plan(only_plan=True)
    assert plan.capacity is not None
    arch = plan.capacity.accelerator.arch
    name = f"{plan.model.name} for {plan.deployment.name}"
    with job.step("compile", f"compiling {name}, for {arch} (minutes the first time)"):
        compiled = compile_virtual(plan, folder, lambda: job.interrupts.requested)
    for stage in plan.stages:
        taken = compiled.inputs[stage_role(stage.config.placement)]
        assert taken == [type_json(leaf.type) for leaf in stage.contract.leaves]
    table = _summary(job, plan, folder, f"not loaded: there is no {arch} here")
    table.add_row("took", f"at most {human_bytes(compiled.peak_bytes)} of memory")
    print_table(table, job.out)


def _print_summary(job: Job, compiled: Compiled, folder: Path) -> None:
    table = _summary(job, compiled.registration.plan, folder, "loaded back")
    table.add_row("compile cache", compiled.found)
    print_table(table, job.out)


def _summary(job: Job, plan: Plan, folder: Path, loaded: str) -> Table:
    table = summary_table(plan)
    size = sum(file.stat().st_size for file in folder.iterdir())
    table.add_row("artifact", f"{human_bytes(size)}, {loaded}; the weights are not in it")
    table.add_row("steps", ", ".join(f"{name} {took:.2f} s" for name, took in job.seconds.items()))
    table.add_row("use it with", f"deployment.artifact={folder}")
    return table
