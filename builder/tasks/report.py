"""``task=report``: one summary of the runs at and below a folder."""

from __future__ import annotations

from pathlib import Path

from builder.schema import ReportTask
from builder.steps import Job
from builder.summary import print_rows
from builder.sweep import Sweep
from models.errors import ConfigError


def run(job: Job) -> None:
    """Writes summary.csv, summary.md and report.html into the folder, from what its jobs wrote.

    Raises:
        ConfigError: If there is no job.
    """
    task = job.config.task
    assert isinstance(task, ReportTask)
    sweep = Sweep(Path(task.folder).expanduser(), None)
    if not sweep.rows():
        raise ConfigError(
            f"task.folder: {task.folder} has no job in it or below\n  what works: the folder of a "
            "sweep, or one with many runs such as outputs"
        )
    with job.step("report"):
        rows = sweep.rebuild()
    print_rows(rows, job.out)
    job.out.print(f"report: {sweep.folder / 'report.html'}")
