"""What the tests share: compiled deployments, one session, and drivers that feed given tokens."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

os.environ.setdefault("MODULAR_TELEMETRY_ENABLED", "0")

from builder.compose import compose
from builder.loading import config_folder
from builder.resolve import Plan, resolve
from builder.sampling import Sampler
from builder.schema import SamplingConfig
from builder.sources import fetch
from models.checkpoints import Checkpoint, open_checkpoint
from models.errors import ConfigError

# Importing MAX names another Python in the process's environment, behind os.environ, and the
# processes of a test run would take it for theirs.
os.unsetenv("PYTHONEXECUTABLE")

if TYPE_CHECKING:
    from builder.compile import Compiled

REFERENCE = Path(__file__).parent / "reference"
FAMILIES = (
    *("tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral"),
    *("tiny_mixtral", "tiny_qwen3_moe", "tiny_olmoe", "tiny_deepseek_v2", "tiny_deepseek_v3"),
    *("tiny_lfm2", "tiny_gpt2", "tiny_idefics3", "tiny_qwen3_next"),
)

DEPLOYMENTS = sorted((config_folder() / "deployment").glob("*.yaml"))
ON_ACCELERATORS = [
    file.stem for file in DEPLOYMENTS if re.search("/devices@devices: (?!cpu)", file.read_text())
]
ON_HOST = [file.stem for file in DEPLOYMENTS if file.stem not in ON_ACCELERATORS]
"""Our deployments, by what their devices are."""

SHARED_TABLE = (
    *("model=tiny_qwen2", "deployment=pp2"),
    "deployment.constants=[token_embedding]",
)
"""Two stages that share a tied table."""

LFM2_STAGES = ("model=tiny_lfm2", "deployment=pp2", "deployment.parallel.stage_layers=[1,3]")
"""Two stages, in the first of which no layer attends."""


def plan_for(*overrides: str, checkpoint: Checkpoint | None = None, keeps: bool = True) -> Plan:
    """Steps 1 and 2, of the model's checkpoint or one that is open."""
    config = compose(overrides)
    opened = checkpoint or open_checkpoint(fetch(config.model))
    return resolve(config.model, config.deployment, opened, keeps=keeps)


def assert_refused(overrides: Sequence[str], wanted: str) -> None:
    """Resolving is refused with a message that has some words."""
    with pytest.raises(ConfigError) as caught:
        plan_for(*overrides)
    assert wanted in str(caught.value)


def _deployments(model: str, *names: str) -> tuple[tuple[str, ...], ...]:
    return tuple((f"model={model}", f"deployment={name}") for name in names)


ADAPTERS = tuple(
    f"+deployment.lora.adapters.{name}={REFERENCE / 'tiny_llama_adapters' / name}"
    for name in ("all", "some")
)
"""Two adapters of tiny_llama, as overrides."""

LORA = ("model=tiny_llama", "deployment=lora", *ADAPTERS)
LORA_PARALLEL = (
    ("model=tiny_llama", "deployment=lora_tp2", *ADAPTERS),
    *(
        ("model=tiny_llama", f"deployment={name}", "deployment.lora.max_adapters=4", *ADAPTERS)
        for name in ("dp2", "pp2")
    ),
)
"""Deployments that serve two adapters."""

VISION = ("model=tiny_idefics3", "deployment=vision")
VISION_PARALLEL = (
    ("model=tiny_idefics3", "deployment=vision_tp2"),
    ("model=tiny_idefics3", "deployment=dp2", "deployment.vision=true"),
)
"""Deployments that take images."""


def family_overrides(family: str) -> tuple[str, ...]:
    """The deployment in which a family is compared with Hugging Face."""
    return VISION if family == "tiny_idefics3" else (f"model={family}",)


TOGETHER = (
    (
        *((f"model={family}",) for family in FAMILIES if family != "tiny_idefics3"),
        *_deployments("tiny_lfm2", "tp2", "dp2"),
        LFM2_STAGES,
        *_deployments("tiny_gpt2", "dp2"),
        *_deployments("tiny_qwen3_next", "tp2"),
    ),
    # The others are the command's too, which compiles each alone.
    (
        *_deployments("tiny_llama", "cpu_variable_logits", "tp4", "dp2", "dp4"),
        *_deployments("tiny_llama", "pp2", "pp3_uneven", "pp2_tp2"),
        SHARED_TABLE,
    ),
    (LORA, *LORA_PARALLEL, VISION, *VISION_PARALLEL),
    _deployments("tiny_deepseek_v3", "cpu", "ep2", "ep2_tp2", "ep4_dp4"),
)
"""Deployments that are compiled as one module, which takes a fraction of the time."""


@cache
def compiled_for(*overrides: str) -> Compiled:
    """Steps 1 to 4, once per test run for each deployment; together where that is faster."""
    for group in TOGETHER:
        if overrides in group:
            return compiled_together(group)[overrides]
    return compiled_alone(*overrides)


@cache
def compiled_together(group: tuple[tuple[str, ...], ...]) -> dict[tuple[str, ...], Compiled]:
    """The deployments of a group, compiled once per test run."""
    return load_together(group)


def load_together(group: tuple[tuple[str, ...], ...]) -> dict[tuple[str, ...], Compiled]:
    """The deployments of a group, loaded anew."""
    from builder.build import build
    from builder.compile import compile_together, process_session

    registrations = [build(plan_for(*overrides)) for overrides in group]
    with one_process(repr(group)):
        compiled = compile_together(registrations, process_session())
    return dict(zip(group, compiled, strict=True))


@cache
def compiled_alone(*overrides: str, keeps: bool = True) -> Compiled:
    """A deployment as the command compiles it, which then finds it compiled."""
    from builder.build import build
    from builder.compile import compile_registration, process_session

    with one_process(repr((overrides, keeps))):
        return compile_registration(build(plan_for(*overrides, keeps=keeps)), process_session())


@contextmanager
def one_process(what: str) -> Iterator[None]:
    """Lets one process of a test run compile something; the others then find it compiled."""
    name = hashlib.sha256(what.encode()).hexdigest()
    with (Path(tempfile.gettempdir()) / f"rolecall-tests-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def printed_by(code: str, given: str = "", **variables: str) -> list[str]:
    """The lines that Python code prints in a process of its own, which imports what tests do.

    Args:
        code: The code.
        given: Its standard input.
        variables: More of its environment.
    """
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=given,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def limited(
    compiled: Compiled,
    *,
    num_pages: int = 0,
    max_batch_input_tokens: int = 0,
    prefix_caching: bool | None = None,
) -> Compiled:
    """The same compiled graph run with fewer pages, fewer tokens per step, or none shared."""
    registration = compiled.registration
    plan = registration.plan
    batch = plan.deployment.batch
    batch = replace(
        batch, max_batch_input_tokens=max_batch_input_tokens or batch.max_batch_input_tokens
    )
    kv = plan.deployment.kv
    if prefix_caching is not None:
        kv = replace(kv, prefix_caching=prefix_caching)
    plan = replace(
        plan,
        num_pages=num_pages or plan.num_pages,
        deployment=replace(plan.deployment, batch=batch, kv=kv),
    )
    return replace(compiled, registration=replace(registration, plan=plan))


def forced_logits(
    compiled: Compiled, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[np.ndarray]:
    """The logits after each prompt and after each forced token, all sequences batched."""
    from builder.compare import record

    prompts, forced = zip(*sequences, strict=True)
    tokens = compiled.registration.plan.deployment.batch.max_batch_input_tokens
    # What follows the last row is never fed.
    continuations = [[*map(int, given), 0] for given in forced]
    rows = record(compiled, prompts, len(forced[0]), tokens, forced=continuations)[1]
    return rows[: len(prompts)]


def greedy_ids(compiled: Compiled, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Each prompt's greedy continuation, all prompts given at once."""
    from builder.run import Request, Runner

    requests = [Request(list(p), count, Sampler(SamplingConfig(), 0)) for p in prompts]
    Runner(compiled).run(requests)
    return [request.ids for request in requests]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def expected(model: str) -> dict[str, np.ndarray]:
    """Hugging Face's values of a tiny model (see tests/reference/make_reference.py)."""
    with np.load(REFERENCE / model / "expected.npz") as values:
        return dict(values)
