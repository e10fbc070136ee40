"""What all engines are given: the model, its prompts, and room for the largest case."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from builder.compose import compose
from builder.machine import memory_bytes
from builder.resolve import Plan, resolve
from builder.sources import fetch
from builder.tokenizer import load_tokenizer
from models.checkpoints import open_checkpoint

_PAGES = Path(__file__).resolve().parent.parent / "docs"
_BLOCK = 1024


@dataclass(frozen=True)
class Case:
    """One thing that every engine does."""

    batch: int
    """Sequences at once."""

    context: int
    """Tokens of each prompt."""

    new: int
    """Tokens generated of each."""


@dataclass(frozen=True)
class Workload:
    """The cases, and the deployment that they are run on."""

    overrides: tuple[str, ...]
    """What our command line would say of it."""

    cases: tuple[Case, ...]
    """The cases, in order."""

    @property
    def batch(self) -> int:
        """The largest batch."""
        return max(case.batch for case in self.cases)

    @property
    def max_length(self) -> int:
        """Room for the longest sequence."""
        return _rounded(max(case.context + case.new for case in self.cases))

    @property
    def limits(self) -> tuple[str, ...]:
        """Overrides that make room where our defaults have less, which other cases do without."""
        default, batch = compose(self.overrides).deployment, self.plan.batch
        limits = []
        if self.batch > batch.max_batch_size:
            limits.append(f"deployment.batch.max_batch_size={self.batch}")
        # While the last prompts of a batch are prefilled the first ones go on.
        step = batch.max_batch_input_tokens - self.batch
        needed = max(
            case.context + case.new + (case.batch > 1) * (case.batch * case.context // step + 1)
            for case in self.cases
        )
        if needed > (default.max_length or self.plan.max_length):
            limits.append(f"deployment.max_length={_rounded(needed)}")
        return tuple(limits)

    @cached_property
    def plan(self) -> Plan:
        """The deployment, resolved; the model is fetched where it is not here."""
        return self._resolved()

    def _resolved(self, *more: str, keeps: bool = True) -> Plan:
        config = compose((*self.overrides, *more))
        checkpoint = open_checkpoint(fetch(config.model))
        return resolve(config.model, config.deployment, checkpoint, keeps=keeps)

    @property
    def threads(self) -> int:
        """The cores that this process may use, and so every engine."""
        return len(os.sched_getaffinity(0))

    def memory_share(self, batch: int) -> float:
        """The part of the machine's memory for the weights and a batch's KV cache.

        MAX fills all the pages that it is given with zeros as it starts: more only take longer.

        Args:
            batch: Sequences at once.
        """
        # Peers hold float32, whatever we do.
        plan = self._resolved("model.encoding=float32", keeps=False)
        needed = plan.weights.total + (batch + 1) * self.max_length * plan.kv_bytes_per_token
        return min(0.9, 1.2 * needed / memory_bytes())

    def prompts(self, case: Case) -> list[list[int]]:
        """The prompts of a case: text of our pages from different places, or random ids.

        Args:
            case: The case.
        """
        plan = self.plan
        tokenizer = load_tokenizer(plan.checkpoint, plan.model.tokenizer)
        if tokenizer is None:
            draw = np.random.default_rng(0)
            size = (case.batch, case.context)
            return draw.integers(3, plan.settings.vocab_size, size).tolist()
        text = "".join(page.read_text(encoding="utf-8") for page in sorted(_PAGES.glob("*.md")))
        return windows(tokenizer.encode(text), case.batch, case.context)


def windows(ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Evenly spaced stretches of some ids, which go on from the beginning where they end.

    Args:
        ids: The ids.
        count: How many stretches.
        length: Ids of each.
    """
    starts = [at * len(ids) // count for at in range(count)]
    return [[ids[(start + at) % len(ids)] for at in range(length)] for start in starts]


def _rounded(tokens: int) -> int:
    return -(-tokens // _BLOCK) * _BLOCK
