"""``task=plan``: what the deployment needs, and why."""

from __future__ import annotations

from builder.report import print_plan
from builder.steps import Job


def run(job: Job) -> None:
    """Prints the contract and the memory plan."""
    print_plan(job.plan(only_plan=True), job.out)
