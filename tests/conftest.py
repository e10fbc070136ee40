"""What the tests share: compiled deployments, one session, and drivers that feed given tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

os.environ.setdefault("MODULAR_TELEMETRY_ENABLED", "0")

from builder.compose import compose
from builder.resolve import Plan, resolve
from builder.sampling import Sampler
from builder.schema import SamplingConfig
from builder.sources import fetch
from models.checkpoints import open_checkpoint

if TYPE_CHECKING:
    from builder.compile import Compiled

REFERENCE = Path(__file__).parent / "reference"
FAMILIES = (
    *("tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral"),
    *("tiny_mixtral", "tiny_qwen3_moe", "tiny_olmoe", "tiny_deepseek_v2", "tiny_deepseek_v3"),
    *("tiny_lfm2", "tiny_gpt2"),
)

LFM2_STAGES = ("model=tiny_lfm2", "deployment=pp2", "deployment.parallel.stage_layers=[1,3]")
"""Two stages, in the first of which no layer attends."""


def plan_for(*overrides: str) -> Plan:
    """Steps 1 and 2."""
    config = compose(overrides)
    return resolve(config.model, config.deployment, open_checkpoint(fetch(config.model)))


def _deployments(model: str, *names: str) -> tuple[tuple[str, ...], ...]:
    return tuple((f"model={model}", f"deployment={name}") for name in names)


TOGETHER = (
    (
        *((f"model={family}",) for family in FAMILIES),
        *_deployments("tiny_lfm2", "tp2", "dp2"),
        LFM2_STAGES,
        *_deployments("tiny_gpt2", "dp2"),
    ),
    # The others are the command's too, which compiles each alone.
    _deployments("tiny_llama", "cpu_variable_logits", "tp4", "dp2", "dp4")
    + _deployments("tiny_llama", "pp2", "pp3_uneven", "pp2_tp2"),
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
    return dict(zip(group, compile_together(registrations, process_session()), strict=True))


@cache
def compiled_alone(*overrides: str) -> Compiled:
    """A deployment as the command compiles it, which then finds it in MAX's cache."""
    from builder.build import build
    from builder.compile import compile_registration, process_session

    return compile_registration(build(plan_for(*overrides)), process_session())


def limited(compiled: Compiled, *, num_pages: int = 0, max_batch_input_tokens: int = 0) -> Compiled:
    """The same compiled graph run with fewer pages, or fewer tokens per step."""
    registration = compiled.registration
    plan = registration.plan
    batch = plan.deployment.batch
    batch = replace(
        batch, max_batch_input_tokens=max_batch_input_tokens or batch.max_batch_input_tokens
    )
    plan = replace(
        plan,
        num_pages=num_pages or plan.num_pages,
        deployment=replace(plan.deployment, batch=batch),
    )
    return replace(compiled, registration=replace(registration, plan=plan))


class ForcedSampler(Sampler):
    """Chooses given tokens, and keeps the logits it was shown."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(SamplingConfig(), 0)
        self.tokens = list(tokens)
        self.seen: list[np.ndarray] = []

    def choose(self, logits: np.ndarray) -> int:
        self.seen.append(logits.copy())
        return self.tokens[min(len(self.seen), len(self.tokens)) - 1]


def forced_logits(
    compiled: Compiled, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[np.ndarray]:
    """The logits after each prompt and after each forced token, all sequences batched."""
    from builder.run import Request, Runner

    samplers = [ForcedSampler(forced) for _, forced in sequences]
    requests = [
        Request(list(prompt), len(forced) + 1, sampler)
        for (prompt, forced), sampler in zip(sequences, samplers, strict=True)
    ]
    Runner(compiled).run(requests)
    return [np.stack(sampler.seen) for sampler in samplers]


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
