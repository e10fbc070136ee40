"""What tells the jobs of a sweep from each other, in few words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from builder.summary import JobRow


@dataclass(frozen=True, kw_only=True)
class Labels:
    """How the jobs of a sweep are named."""

    shared: tuple[str, ...]
    """The overrides that every job has, which tell none from another."""

    several_tasks: bool
    """Whether the jobs' tasks differ."""

    tasks_tell: bool
    """Whether some jobs differ in nothing else."""

    def in_deployment(self, row: JobRow) -> str:
        """A job beside others of its deployment."""
        return " ".join([row.model, *self.more(row)])

    def in_model(self, row: JobRow) -> str:
        """A job beside others of its model."""
        return " ".join([row.deployment, *self.more(row)])

    def more(self, row: JobRow) -> list[str]:
        """What a job's model and deployment leave open."""
        return [*([row.task] if self.tasks_tell and row.task else []), *self.own(row)]

    def own(self, row: JobRow) -> list[str]:
        """The overrides that not every job has."""
        return [override for override in row.overrides if override not in self.shared]


def labels_of(rows: Sequence[JobRow]) -> Labels:
    """The labels of a sweep's jobs.

    Args:
        rows: All of its jobs.
    """
    first = rows[0].overrides if rows else ()
    others = {(row.model, row.deployment, row.overrides) for row in rows}
    tasks = {row.task for row in rows}
    return Labels(
        shared=tuple(o for o in first if all(o in row.overrides for row in rows)),
        several_tasks=len(tasks) > 1,
        tasks_tell=len(tasks) > 1 and len(others) < len(rows),
    )
