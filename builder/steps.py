"""The five steps of one job, in order, timed and told to the person who waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from builder.accelerators import compile_error, max_reason
from builder.artifact import check_artifact
from builder.checks import check_no_obstacle
from builder.interrupt import Interrupts
from builder.job import JobFolder
from builder.report import contract_json, plan_json
from builder.resolve import Plan, resolve
from builder.schema import Config, Logits
from builder.shared import Shared
from builder.sources import fetch
from models.errors import ConfigError

if TYPE_CHECKING:
    # Importing what compiles costs two seconds that planning does without.
    from builder.compile import Compiled


class FailedJob(Exception):  # noqa: N818 - the job failed, not the program
    """The task ran to its end, and its answer is no."""


class SomeRefused(ConfigError):  # noqa: N818 - the prompts were refused, not the program
    """Some prompts can't be computed; the others were, and their results are kept."""


@dataclass
class Job:
    """One job under way."""

    config: Config
    """Its configuration."""

    folder: JobFolder
    """Where it writes."""

    interrupts: Interrupts
    """Whether it is asked to stop."""

    shared: Shared
    """What it shares with the other jobs of its process."""

    out: Console
    """The terminal."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Each step's time."""

    compiled: list[dict[str, Any]] = field(default_factory=list)
    """Where the graphs of each deployment that it loaded came from."""

    @contextmanager
    def step(self, name: str, doing: str | None = None) -> Iterator[None]:
        """Times one step, and says what is being done while a person waits."""
        began = time.perf_counter()
        waiting = Console(stderr=True)
        if doing is not None and waiting.is_terminal:
            with waiting.status(doing):
                yield
        else:
            if doing is not None:
                print(doing, file=sys.stderr, flush=True)
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def plan(
        self,
        needed_logits: Logits = Logits.last_token,
        *,
        only_plan: bool = False,
        keeps: bool = True,
    ) -> Plan:
        """Steps 1 and 2: fetches what is missing, resolves, and writes plan and contract.

        Args:
            needed_logits: What the graph returns where the deployment does not say.
            only_plan: Whether a deployment may be planned that this machine cannot run.
            keeps: Whether weights may be kept as the checkpoint stores them.

        Raises:
            ConfigError: If it can't be planned, or has to run and can't.
        """
        with self.step("resolve"):
            checkpoint = self.shared.checkpoint(fetch(self.config.model))
            config = self.config
            plan = resolve(config.model, config.deployment, checkpoint, needed_logits, keeps=keeps)
            if not only_plan:
                check_no_obstacle(plan.obstacles)
            check_artifact(plan)
        self.folder.write_json("plan.json", plan_json(plan))
        self.folder.write_json("contract.json", contract_json(plan))
        return plan

    def compile(self, plan: Plan) -> Compiled:
        """Steps 3 and 4: builds and compiles the plan's graphs."""
        name = f"{plan.model.name} for {plan.deployment.name}"
        reused = self.shared.graphs(plan) is not None
        doing = f"compiling {name} (a minute or two the first time)"
        if reused:
            doing = f"taking {name} as a job before loaded it"
        elif plan.deployment.artifact is not None:
            doing = f"loading {name} from {plan.deployment.artifact}"
        with self.interrupts.uninterruptible(), self.shared.weights(plan) as weights:
            with self.step("build", None if reused else f"building {name}"):
                from builder.build import build
                from builder.compile import compile_registration, process_session

                registration = build(plan)
            with self.step("compile", doing):
                on_cpu = plan.capacity is None
                session = process_session(0 if on_cpu else plan.deployment.devices.count)
                try:
                    compiled = compile_registration(registration, session, self.shared, weights)
                except (RuntimeError, ValueError) as error:
                    if plan.capacity is None or isinstance(error, ConfigError):
                        raise
                    accelerator = plan.capacity.accelerator
                    raise compile_error(accelerator, max_reason(error)) from error
        facts = {"cache_hit": compiled.cache_hit, "reused": compiled.reused}
        self.compiled.append({"deployment": plan.deployment.name, **facts})
        return compiled
