"""``task=plan``: what the deployment needs, and why."""

from __future__ import annotations

from builder.provenance import provenance
from builder.report import plan_json, print_plan, print_settings
from builder.steps import Job


def run(job: Job) -> None:
    """Prints the contract, the memory plan and what set the values, which plan.json has too."""
    plan = job.plan(only_plan=True)
    settings = provenance(job.config)
    found = {key: setting.as_json() for key, setting in settings.items()}
    job.folder.write_json("plan.json", {**plan_json(plan), "provenance": found})
    print_plan(plan, job.out)
    print_settings(settings, job.out)
