"""A sweep of jobs as one page that needs nothing else: no network, no script."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from builder.page.labels import labels_of
from builder.page.matrix import matrix
from builder.page.plots import PARTS, memory, speed, verification
from builder.report import human_bytes
from builder.summary import NOT_RUN, RUNNING, JobRow, count_by_status
from models.role_contracts import FIELD_NAMES

LONGEST = 5
"""How many of the longest steps the head has."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Jobs that ended badly in the same words."""

    jobs: tuple[JobRow, ...]
    """The jobs."""

    status: str
    """How they ended."""

    summary: str
    """What went wrong, in one line."""

    more: tuple[str, ...]
    """The lines after it."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a job."""

    job: JobRow
    """The job."""

    name: str
    """The step."""

    seconds: float
    """How long it took."""


def as_html(rows: Sequence[JobRow], title: str) -> str:
    """report.html: the jobs as a page that is complete in itself.

    Args:
        rows: The jobs.
        title: Its heading.
    """
    environment = _environment()
    style = environment.get_template("style.css").render(parts=list(PARTS))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    page = environment.get_template("page.html").render(
        title=title,
        rows=rows,
        # Ours, with nothing of the jobs in it.
        style=Markup(style),
        style_hash=f"sha256-{digest}",
        fields=FIELD_NAMES,
        anchors={id(row): f"job-{number}" for number, row in enumerate(rows, 1)},
        labels=labels_of(rows),
        counts=count_by_status(rows),
        models=list(dict.fromkeys(row.model for row in rows)),
        deployments=list(dict.fromkeys(row.deployment for row in rows)),
        tasks=list(dict.fromkeys(row.task for row in rows if row.task)),
        steps=list(dict.fromkeys(name for row in rows for name in row.seconds)),
        longest=longest_steps(rows),
        failures=failures(rows),
        matrix=matrix(rows),
        memory=memory(rows),
        verification=verification(rows),
        speed=speed(rows),
    )
    # A job's text may hold half of a character, which no file can.
    return page.encode(errors="replace").decode()


def failures(rows: Sequence[JobRow]) -> list[Failure]:
    """What went wrong, each once.

    Args:
        rows: The jobs.
    """
    alike: dict[tuple[str, str], list[JobRow]] = {}
    for row in rows:
        if row.status not in ("ok", RUNNING, NOT_RUN):
            alike.setdefault((row.status, (row.error or "").strip()), []).append(row)
    found = []
    for (status, error), jobs in alike.items():
        first, *more = error.splitlines() or ["It left no message."]
        found.append(Failure(jobs=tuple(jobs), status=status, summary=first, more=tuple(more)))
    return found


def longest_steps(rows: Sequence[JobRow]) -> list[Step]:
    """The steps that took the longest, of all jobs.

    Args:
        rows: The jobs.
    """
    steps = [
        Step(job=row, name=name, seconds=seconds)
        for row in rows
        for name, seconds in row.seconds.items()
    ]
    return sorted(steps, key=lambda step: -step.seconds)[:LONGEST]


def result(row: JobRow) -> str:
    """What a job computed, in few words; empty where it has not.

    Args:
        row: The job.
    """
    parts = []
    if row.verify is not None:
        parts.append("computes the same" if row.verify["pass"] else "computes something else")
    if row.metrics and row.metrics.get("generated_tokens") is not None:
        parts.append(f"{row.metrics['generated_tokens']:,} tokens")
    if row.scores:
        total = sum(score["logprob"] for score in row.scores)
        parts.append(f"{len(row.scores)} texts, log-likelihood {total:,.2f}")
    return "; ".join(parts)


def figure(value: float) -> str:
    """A figure with three digits that count.

    Args:
        value: The figure.
    """
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A time for people: ``0.42 s``, ``2 min 5 s``.

    Args:
        seconds: The time.
    """
    if seconds < 99.5:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def breakable(text: str) -> Markup:
    """A name that breaks at its joints before it breaks anywhere.

    Args:
        text: The name.
    """
    return Markup("<wbr>").join(re.split(r"(?<=[._/=,:-])", text))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("builder.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=human_bytes,
        figure=figure,
        duration=duration,
        breakable=breakable,
        result=result,
        id=id,
        own=lambda row, labels: labels.own(row),
    )
    return environment
