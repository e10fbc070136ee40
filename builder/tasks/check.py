"""``task=check``: every deployment planned for every model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from hydra.core.hydra_config import HydraConfig
from rich import box
from rich.table import Table

from builder.compose import choices, compose_again
from builder.interrupt import InterruptedJob
from builder.loading import Composer, Request, running_request
from builder.provenance import with_provenance
from builder.report import human_bytes
from builder.resolve import Plan, resolve
from builder.schema import CheckTask, ModelConfig
from builder.sources import fetch
from builder.steps import FailedJob, Job
from builder.tables import print_table
from builder.words import check_choices
from models.checkpoints import Checkpoint, open_checkpoint
from models.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """One deployment of one model."""

    deployment: str
    """The deployment's name."""

    model: str
    """The model's name."""

    plan: Plan | None = None
    """What it resolves to; ``None`` where it is refused."""

    error: str | None = None
    """Why it is refused."""

    @property
    def fields(self) -> list[str]:
        """The fields of its contract, in canonical order."""
        stages = () if self.plan is None else self.plan.stages
        decisions = zip(*(stage.contract.fields for stage in stages), strict=True)
        return [same[0].name for same in decisions if any(field.present for field in same)]

    def as_json(self) -> dict[str, Any]:
        """The row of check.json."""
        plan = self.plan
        return {
            "deployment": self.deployment,
            "model": self.model,
            "ok": plan is not None,
            "error": self.error,
            "fields": self.fields,
            "device_bytes": [] if plan is None else [share.total for share in plan.devices],
            "obstacles": [] if plan is None else list(plan.obstacles),
        }


def run(job: Job) -> None:
    """Plans each pair and writes check.json.

    What this machine can't run is fine: a deployment is checked for the machine that it names.

    Raises:
        ConfigError: If the task names what does not exist.
        FailedJob: If a deployment is refused.
        InterruptedJob: If it was asked to stop.
    """
    task = job.config.task
    assert isinstance(task, CheckTask)
    chosen = HydraConfig.get().runtime.choices
    request = running_request()
    given = request.overrides
    check_choices("task.deployments", task.deployments, "deployment", request)
    check_choices("task.models", task.models, "model", request)
    composer = request.composer
    deployments = tuple(task.deployments) or (
        (str(chosen["deployment"]),)
        if any(word.startswith("deployment=") for word in given)
        else choices(composer, "deployment")
    )
    models = tuple(task.models) or (str(chosen["model"]),)
    # What the command line says beside its choices and the task holds for every pair.
    own = ("task=", "task.", "model=", "deployment=")
    others = [word for word in given if not word.lstrip("+~").startswith(own)]
    opened = cache(lambda model: open_checkpoint(fetch(model)))
    with job.step("check"):
        checked = []
        for model, name in product(models, deployments):
            if job.interrupts.requested:
                raise InterruptedJob
            checked.append(_check(composer, name, model, others, opened))
    refused = [one for one in checked if one.plan is None]
    results = [one.as_json() for one in checked]
    job.folder.write_json("check.json", {"pass": not refused, "results": results})
    _print(job, checked)
    if refused:
        raise FailedJob(f"{len(refused)} of {len(checked)} are refused")


def _check(
    composer: Composer,
    deployment: str,
    model: str,
    others: list[str],
    opened: Callable[[ModelConfig], Checkpoint],
) -> _Checked:
    words = [*others, f"deployment={deployment}", f"model={model}", "task=plan"]
    try:
        config = compose_again(composer, words)
        plan = resolve(config.model, config.deployment, opened(config.model))
    except ConfigError as error:
        told = with_provenance(error, Request(composer, tuple(words)))
        return _Checked(deployment=deployment, model=model, error=str(told))
    return _Checked(deployment=deployment, model=model, plan=plan)


def _print(job: Job, checked: list[_Checked]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("deployment", "model", "", "most on a device", "contract, or why not"):
        table.add_column(heading, no_wrap=heading in ("deployment", "model"))
    for one in checked:
        if one.plan is None:
            table.add_row(one.deployment, one.model, "refused", "", one.error, style="red")
        else:
            most = human_bytes(max(share.total for share in one.plan.devices))
            table.add_row(one.deployment, one.model, "ok", most, ", ".join(one.fields))
    print_table(table, job.out)
