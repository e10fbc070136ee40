"""``task=diff``: what another deployment would change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

from builder.compose import compose_again
from builder.loading import Request, running_request
from builder.provenance import with_provenance
from builder.report import as_json, contract_json, human_bytes
from builder.resolve import Plan, resolve
from builder.schema import DiffTask
from builder.steps import Job
from builder.tables import print_table
from builder.words import check_choices
from models.errors import ConfigError

Difference = dict[str, Any]
"""One thing that differs: what it is, and its value ``here`` and ``there``; ``None`` is none."""

MEMORY = (
    *("weights", "constants", "kv_pages", "signals", "exchange", "scratch", "state", "lora"),
    *("vision", "activations", "total"),
)
"""The bytes of a device, as plan.json names them."""

PLACED = (
    *("stage", "replica", "rank", "layers", "heads", "kv_heads", "inner_columns", "experts"),
    *("expert_columns", "vocabulary"),
)
"""What a device holds, as plan.json names it."""


def run(job: Job) -> None:
    """Plans both deployments of the model, tells what differs, and writes diff.json.

    Raises:
        ConfigError: If one of them can't be planned.
    """
    task = job.config.task
    assert isinstance(task, DiffTask)
    request = running_request()
    check_choices("task.against", [task.against], "deployment", request)
    here = job.plan(only_plan=True)
    # Everything else of the command line is this deployment's, fragments too.
    others = [word for word in request.overrides if word.lstrip("+~").startswith("model")]
    with job.step("resolve"):
        words = [*others, f"deployment={task.against}", "task=plan"]
        config = compose_again(request.composer, words)
        try:
            there = resolve(config.model, config.deployment, here.checkpoint)
        except ConfigError as error:
            told = with_provenance(error, Request(request.composer, tuple(words)))
            raise ConfigError(f"task.against: {task.against}: {told}") from error
    found = {
        "keys": _keys(here, there),
        "inputs": _inputs(here, there),
        "placement": _devices(here, there, PLACED),
        "memory": _devices(here, there, MEMORY),
    }
    names = {"here": here.deployment.name, "there": there.deployment.name}
    job.folder.write_json("diff.json", {"model": here.model.name, **names, **found})
    for title, differences in found.items():
        _print(job, title, differences, names)


def _keys(here: Plan, there: Plan) -> list[Difference]:
    """The configuration keys that differ."""
    return _differences(
        "key",
        dict(_leaves("deployment", as_json(here.deployment))),
        dict(_leaves("deployment", as_json(there.deployment))),
        ignored=("deployment.name",),
    )


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, child in value.items():
        yield from _leaves(f"{path}.{key}", child)


def _inputs(here: Plan, there: Plan) -> list[Difference]:
    """The graphs' inputs that differ, in canonical order."""
    return _differences("input", _taken(here), _taken(there))


def _taken(plan: Plan) -> dict[str, str]:
    contract = contract_json(plan)
    several = len(contract["stages"]) > 1
    return {
        f"stage {leaf['stage']}: {leaf['path']}" if several else leaf["path"]: (
            f"{leaf['dtype']} [{', '.join(map(str, leaf['shape']))}] {leaf['device']}"
        )
        for field in contract["fields"]
        for leaf in field["leaves"]
    }


def _devices(here: Plan, there: Plan, names: tuple[str, ...]) -> list[Difference]:
    """What differs of each device."""

    def of(plan: Plan) -> dict[str, Any]:
        shares = [{**as_json(share), "total": share.total} for share in plan.devices]
        return {
            f"device {share['device']}: {name}": share[name] for share in shares for name in names
        }

    return _differences("what", of(here), of(there))


def _differences(
    name: str, here: Mapping[str, Any], there: Mapping[str, Any], ignored: tuple[str, ...] = ()
) -> list[Difference]:
    every = [*here, *(key for key in there if key not in here)]
    return [
        {name: key, "here": here.get(key), "there": there.get(key)}
        for key in every
        if key not in ignored and here.get(key) != there.get(key)
    ]


def _print(job: Job, title: str, differences: list[Difference], names: Mapping[str, str]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (title, names["here"], names["there"]):
        table.add_column(heading)
    for found in differences:
        what, here, there = found.values()
        shown = (_shown(title, value) for value in (here, there))
        table.add_row(str(what), *shown)
    if not differences:
        table.add_row("the same", "", "")
    print_table(table, job.out)


def _shown(title: str, value: Any) -> str:
    if value is None:
        return "-"
    if title == "memory":
        return human_bytes(value)
    if isinstance(value, Mapping):
        return f"{value['start']}-{value['stop'] - 1}" if value["stop"] > value["start"] else "-"
    return str(value)
