"""What a job does once it is composed: one module per task, each with a ``run(job)``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from builder.steps import Job


def task_runner(name: str) -> Callable[[Job], float | None]:
    """The function that runs a task, and gives the figure that a search maximises, if it has one.

    Imported on demand: a plan needs neither a tokenizer nor templates.

    Args:
        name: A key of ``builder.schema.TASKS``.
    """
    run: Callable[[Job], float | None] = import_module(f"builder.tasks.{name}").run
    return run
