"""The contracts of a sweep as a matrix: deployments by the sixteen fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from builder.summary import JobRow


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Graph inputs that differ in numbers of their paths alone: a layer's, a device's."""

    path: str
    """Their paths, with the numbers as ranges."""

    dtype: str
    """Their dtype, and whether they are buffers."""

    shape: str
    """Their shape."""

    device: str
    """Where they are."""

    count: int
    """How many they are."""

    max_bytes: int
    """What they take together, each symbolic dimension at its limit."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why some jobs have a field or not, and what it holds."""

    jobs: tuple[JobRow, ...]
    """The jobs."""

    because: str
    """The rule."""

    keys: tuple[str, ...]
    """The configuration keys that it follows from."""

    inputs: tuple[Inputs, ...]
    """The field's graph inputs."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One field of jobs that agree whether they have it."""

    field: str
    """Its name."""

    present: bool
    """Whether they have it."""

    reasons: tuple[Reason, ...]
    """Why: one, or one for each kind of job."""


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """The jobs of a deployment that have the same fields, or ended the same without a contract."""

    deployment: str
    """The deployment."""

    jobs: tuple[JobRow, ...]
    """The jobs."""

    cells: tuple[Cell, ...]
    """The sixteen fields; empty without a contract."""


def matrix(rows: Sequence[JobRow]) -> list[MatrixRow]:
    """The matrix; empty where no job has a contract.

    Args:
        rows: The jobs.
    """
    alike: dict[str, dict[Any, list[JobRow]]] = {}
    for row in rows:
        # A task that plans nothing ends well without a contract.
        if row.contract is not None or row.status != "ok":
            kind = tuple(row.fields) if row.contract is not None else (row.status, row.error)
            of_deployment = alike.setdefault(row.deployment, {})
            of_deployment.setdefault((row.contract is not None, kind), []).append(row)
    found = [
        MatrixRow(deployment=deployment, jobs=tuple(jobs), cells=tuple(_cells(jobs)))
        for deployment, kinds in alike.items()
        for jobs in kinds.values()
    ]
    return found if any(row.cells for row in found) else []


def _cells(jobs: Sequence[JobRow]) -> Iterable[Cell]:
    contracts = [job.contract for job in jobs if job.contract is not None]
    for fields in zip(*(contract["fields"] for contract in contracts), strict=True):
        alike: dict[Any, list[JobRow]] = {}
        for job, field in zip(jobs, fields, strict=True):
            reason = (field["because"], tuple(field["keys"]), tuple(_inputs(field["leaves"])))
            alike.setdefault(reason, []).append(job)
        yield Cell(
            field=fields[0]["name"],
            present=fields[0]["present"],
            reasons=tuple(
                Reason(jobs=tuple(who), because=because, keys=keys, inputs=inputs)
                for (because, keys, inputs), who in alike.items()
            ),
        )


def _inputs(leaves: Iterable[Mapping[str, Any]]) -> Iterable[Inputs]:
    """Leaves without their repetitions: adapters on thirty layers have hundreds."""
    alike: dict[Any, list[Mapping[str, Any]]] = {}
    for leaf in leaves:
        shape = [_unnumbered(dim) if isinstance(dim, str) else dim for dim in leaf["shape"]]
        names = (_unnumbered(leaf["path"]), _unnumbered(leaf["device"]))
        alike.setdefault((*names, leaf["dtype"], leaf["kind"], *shape), []).append(leaf)
    for same in alike.values():
        first = same[0]
        shapes = ([str(dim) for dim in leaf["shape"]] for leaf in same)
        yield Inputs(
            path=_together(leaf["path"] for leaf in same),
            dtype=first["dtype"] + (" buffer" if first["kind"] == "buffer" else ""),
            shape=f"[{', '.join(_together(dims) for dims in zip(*shapes, strict=True))}]",
            device=_together(leaf["device"] for leaf in same),
            count=len(same),
            max_bytes=sum(leaf["max_bytes"] for leaf in same),
        )


def _unnumbered(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def _together(texts: Iterable[str]) -> str:
    """Texts that differ in their numbers, as one: ``kv.0`` and ``kv.1`` become ``kv.0–1``."""
    parts = zip(*(re.split(r"(\d+)", text) for text in texts), strict=True)
    return "".join(
        ranges(map(int, part)) if index % 2 else part[0] for index, part in enumerate(parts)
    )


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in few words: ``0–3``, ``0, 2``, ``1, 3, … 59``.

    Args:
        numbers: The numbers, in any order.
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(texts) if len(texts) <= 4 else f"{texts[0]}, {texts[1]}, … {texts[-1]}"
