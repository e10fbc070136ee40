"""Batches that are run for their times alone, and the figures of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from builder.run import Request, Runner
from builder.sampling import Sampler
from builder.schema import SamplingConfig
from builder.step_times import StepTime
from models.settings import ModelSettings


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """One run of a batch to its end."""

    began: float
    """When the batch was given, by ``time.perf_counter``."""

    first: tuple[float, ...]
    """Seconds from then to each sequence's first token."""

    total: float
    """Seconds from then to the last token of all."""

    steps: tuple[StepTime, ...]
    """Its steps."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A batch of prompts of one length, and the runs of it that count."""

    batch_size: int
    """Its sequences."""

    context: int
    """Tokens of each prompt."""

    new_tokens: int
    """Tokens generated per sequence."""

    runs: tuple[BatchRun, ...]
    """At least one."""

    @property
    def decode_steps(self) -> list[StepTime]:
        """The steps of all runs in which every sequence decodes.

        Not those in which a later prompt is still prefilled, nor those after the first sequence
        has all of its tokens: with many long prompts and few new tokens there is none.
        """
        every = [step for run in self.runs for step in run.steps]
        return [step for step in every if step.tokens == step.decoding == self.batch_size]

    @property
    def ttft_ms(self) -> float:
        """Milliseconds to the first token: the median over the sequences of all runs."""
        return 1e3 * median(first for run in self.runs for first in run.first)

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens per second until the last sequence has its first token."""
        return self.batch_size * self.context / median(max(run.first) for run in self.runs)

    @property
    def generated_tok_s(self) -> float:
        """Generated tokens per second of the whole run, prefill included."""
        return self.batch_size * self.new_tokens / median(run.total for run in self.runs)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens of the decode steps per second of them."""
        steps = self.decode_steps
        if not steps:
            return None
        return sum(step.tokens for step in steps) / sum(step.total for step in steps)

    @property
    def host_share(self) -> float | None:
        """The part of the decode steps' time that is spent outside the compiled graph."""
        steps = self.decode_steps
        if not steps:
            return None
        return 1 - sum(step.execute for step in steps) / sum(step.total for step in steps)

    def step_ms(self, percent: float) -> float | None:
        """A percentile of the decode steps' milliseconds.

        Args:
            percent: Which, from 0 to 100.
        """
        steps = [step.total for step in self.decode_steps]
        return float(1e3 * np.percentile(steps, percent)) if steps else None


def random_batch(
    batch_size: int, context: int, settings: ModelSettings, seed: int | Sequence[int]
) -> list[list[int]]:
    """Prompts of random token ids, none of them an image's, that differ from their first token.

    Args:
        batch_size: How many; where there are more than the vocabulary has ids, some begin alike.
        context: Tokens of each.
        settings: The model's settings.
        seed: The same prompts for the same seed.
    """
    generator = np.random.default_rng(seed)
    ids = np.arange(settings.vocab_size)
    if settings.vision is not None:
        ids = ids[ids != settings.vision.image_token_id]
    prompts = generator.choice(ids, (batch_size, context))
    prompts[:, 0] = np.resize(generator.permutation(ids), batch_size)
    return [row.tolist() for row in prompts]


def run_batch(
    runner: Runner,
    prompts: Sequence[list[int]],
    new_tokens: int,
    should_stop: Callable[[], bool],
) -> BatchRun | None:
    """Runs a batch once, greedily and past stop tokens.

    Args:
        runner: Runs it.
        prompts: The sequences.
        new_tokens: Tokens generated per sequence.
        should_stop: Asked before each step.

    Returns:
        ``None`` where it was stopped.
    """
    greedy = SamplingConfig()
    requests = [Request(ids, new_tokens, Sampler(greedy, n)) for n, ids in enumerate(prompts)]
    before = runner.times.steps
    began = time.perf_counter()
    runner.run(requests, should_stop=should_stop)
    if any(request.finish == "interrupted" for request in requests):
        return None
    return BatchRun(
        began=began,
        first=tuple(request.token_times[0] - began for request in requests),
        total=max(request.token_times[-1] for request in requests) - began,
        steps=tuple(runner.times.each[before:]),
    )
