"""What the plots of a sweep show: memory per device, verified differences, speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from builder.page.matrix import ranges
from builder.page.scale import Scale, bytes_scale, decades_scale, figures_scale
from builder.summary import JobRow

PARTS = {
    "weights": "weights",
    "constants": "constants",
    "kv_pages": "KV pages",
    "signals": "signals",
    "exchange": "exchange",
    "scratch": "scratch",
    "state": "state",
    "lora": "LoRA",
    "vision": "vision",
    "activations": "activations",
}
"""The parts of a device's memory, in the order in which they are drawn."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a device's memory."""

    key: str
    """What plan.json calls it."""

    name: str
    """What people call it."""

    size: int
    """Its bytes."""

    at: float
    """Where it begins, in percent."""

    width: float
    """How wide it is, in percent."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Devices that hold the same."""

    devices: str
    """Their numbers."""

    count: int
    """How many they are."""

    parts: tuple[Part, ...]
    """What each holds."""

    total: int
    """The sum."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Jobs whose devices hold the same."""

    jobs: tuple[JobRow, ...]
    """The jobs."""

    bars: tuple[Bar, ...]
    """Their devices."""

    capacity: dict[str, Any] | None
    """What plan.json says of accelerators."""


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """The jobs of a model on devices of a kind, on one scale."""

    model: str
    """The model."""

    capacity: dict[str, Any] | None
    """What plan.json says of the accelerators; ``None`` on the host."""

    scale: Scale
    """An accelerator's memory, or what the fullest device holds."""

    holdings: tuple[Holding, ...]
    """The jobs."""


def memory(rows: Sequence[JobRow]) -> list[MemoryGroup]:
    """Memory per device, by model and kind of device.

    Args:
        rows: The jobs.
    """
    groups: dict[Any, list[JobRow]] = {}
    for row in rows:
        if row.plan is not None and row.plan["devices"]:
            groups.setdefault((row.model, _kind(row.plan["capacity"])), []).append(row)
    # A model's groups stand together, whatever order the jobs are in.
    models = list(dict.fromkeys(model for model, _ in groups))
    return [
        _memory_group(model, jobs)
        for model, jobs in sorted(
            ((model, jobs) for (model, _), jobs in groups.items()),
            key=lambda pair: models.index(pair[0]),
        )
    ]


def _kind(capacity: Mapping[str, Any] | None) -> Any:
    if capacity is None:
        return None
    accelerator = capacity["accelerator"]
    return accelerator["name"], accelerator["memory"], capacity["usable"]


def _memory_group(model: str, jobs: Sequence[JobRow]) -> MemoryGroup:
    capacity = (jobs[0].plan or {})["capacity"]
    totals = [total for job in jobs for total in job.device_bytes]
    full = capacity["accelerator"]["memory"] if capacity else max(totals)
    # What does not fit has to be seen, too.
    scale = bytes_scale(max(full, *totals))
    alike: dict[Any, list[JobRow]] = {}
    for job in jobs:
        alike.setdefault(tuple(map(_held, (job.plan or {})["devices"])), []).append(job)
    holdings = [
        Holding(
            jobs=tuple(who),
            bars=tuple(_bars((who[0].plan or {})["devices"], scale)),
            capacity=(who[0].plan or {})["capacity"],
        )
        for who in alike.values()
    ]
    return MemoryGroup(model=model, capacity=capacity, scale=scale, holdings=tuple(holdings))


def _held(device: dict[str, Any]) -> tuple[int, ...]:
    return tuple(device[key] for key in PARTS)


def _bars(devices: Sequence[dict[str, Any]], scale: Scale) -> Iterable[Bar]:
    alike: dict[tuple[int, ...], list[int]] = {}
    for device in devices:
        alike.setdefault(_held(device), []).append(device["device"])
    for sizes, numbers in alike.items():
        parts, before = [], 0
        for (key, name), size in zip(PARTS.items(), sizes, strict=True):
            at, end = scale.at(before), scale.at(before + size)
            if size:
                width = round(end - at, 2)
                parts.append(Part(key=key, name=name, size=size, at=at, width=width))
            before += size
        yield Bar(devices=ranges(numbers), count=len(numbers), parts=tuple(parts), total=before)


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a job that was verified came to."""

    job: JobRow
    """The job."""

    passed: bool
    """Whether it computes the same."""

    relative: bool
    """Whether differences are relative to the largest logit of their row."""

    largest: float | None
    """The largest difference; ``None`` is not a number."""

    tolerance: float
    """What is allowed."""

    tokens_equal: bool
    """Whether every greedy token is the same."""

    at: float | None
    """The place of the difference, in percent."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Differences as parts of what is allowed, so that one axis holds them all."""

    scale: Scale
    """From parts of the tolerance to multiples of it."""

    models: dict[str, list[Verified]]
    """The jobs, by model."""


def verification(rows: Sequence[JobRow]) -> Verification | None:
    """Verified jobs; ``None`` where there is none.

    Args:
        rows: The jobs.
    """
    found = [(row, row.verify, *_largest(row.verify)) for row in rows if row.verify is not None]
    if not found:
        return None
    parts = [(largest or 0.0) / verify["tolerance"] for _, verify, largest, _ in found]
    scale = decades_scale([1.0, 10.0, *parts])
    models: dict[str, list[Verified]] = {}
    for row, verify, largest, relative in found:
        tolerance = verify["tolerance"]
        one = Verified(
            job=row,
            passed=verify["pass"],
            relative=relative,
            largest=largest,
            tolerance=tolerance,
            tokens_equal=verify["tokens_equal"],
            at=None if largest is None else scale.at(largest / tolerance),
        )
        models.setdefault(row.model, []).append(one)
    return Verification(scale=scale, models=models)


def _largest(verify: Any) -> tuple[float | None, bool]:
    # In float32 the tolerance is absolute.
    relative = verify["relative"]
    return verify["max_rel_diff" if relative else "max_abs_diff"], relative


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over the prompts of a job."""

    least: float
    """The least."""

    median: float
    """The one in the middle."""

    most: float
    """The most."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a job was."""

    job: JobRow
    """The job."""

    prompts: int
    """How many prompts it computed."""

    first: Spread | None
    """Milliseconds to the first token."""

    decode: Spread | None
    """Tokens a second after the first."""

    cells: tuple[Mapping[str, Any], ...]
    """What ``task=bench`` measured, as in metrics.json."""


@dataclass(frozen=True, kw_only=True)
class SpeedGroup:
    """The jobs of a model, on one scale."""

    model: str
    """The model."""

    first: Scale | None
    """Milliseconds to the first token."""

    decode: Scale | None
    """Tokens a second after the first."""

    jobs: tuple[Speed, ...]
    """The jobs."""


def speed(rows: Sequence[JobRow]) -> list[SpeedGroup]:
    """The speed of jobs that measured it, by model.

    Args:
        rows: The jobs.
    """
    models: dict[str, list[Speed]] = {}
    for row in rows:
        first, decode = _spread(row, "ttft_ms"), _spread(row, "decode_tok_s")
        measured = {(row.metrics or {}).get(name) for name in ("generated_tok_s", "step_ms")}
        if first or decode or measured - {None}:
            prompts = sum(one.get("error") is None for one in row.generations)
            cells = tuple((row.metrics or {}).get("cells", ()))
            one = Speed(job=row, prompts=prompts, first=first, decode=decode, cells=cells)
            models.setdefault(row.model, []).append(one)
    return [
        SpeedGroup(
            model=model,
            first=figures_scale(_ends(job.first for job in jobs)),
            decode=figures_scale(_ends(job.decode for job in jobs)),
            jobs=tuple(jobs),
        )
        for model, jobs in models.items()
    ]


def _spread(row: JobRow, name: str) -> Spread | None:
    found = row.spread(name)
    return None if found is None else Spread(least=found[0], median=found[1], most=found[2])


def _ends(spreads: Iterable[Spread | None]) -> list[float]:
    return [end for spread in spreads if spread for end in (spread.least, spread.most)]
