"""Runs two deployments over the same tokens and compares their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from builder.compile import Compiled
from builder.run import Request, Runner
from builder.sampling import Logits, Sampler
from builder.schema import SamplingConfig


@dataclass(frozen=True)
class Where:
    """One row of logits."""

    prompt: int
    """The prompt's position."""

    step: int
    """0 after the prompt, then one per decode step."""

    token: int
    """The vocabulary entry."""


@dataclass(frozen=True)
class Comparison:
    """How far a deployment's logits are from the plain one's."""

    max_abs_diff: float
    """The largest absolute difference."""

    max_rel_diff: float
    """The largest difference relative to the largest logit of its row."""

    where: Where
    """Where the largest absolute difference is."""

    rows: int
    """Rows of logits compared."""

    tokens_equal: bool
    """Whether the greedy token is the same in every row."""

    first_unequal: Where | None
    """The first row whose greedy token differs."""


class _Recorder(Sampler):
    """Chooses greedily, or given tokens, and keeps the logits."""

    def __init__(self, tokens: Sequence[int] | None = None) -> None:
        super().__init__(SamplingConfig(), 0)
        self._tokens = tokens
        self.rows: list[Logits] = []

    def choose(self, logits: Logits) -> int:
        """The given token of this step, or the most likely one."""
        self.rows.append(logits.copy())
        if self._tokens is None:
            return super().choose(logits)
        return self._tokens[len(self.rows) - 1]


def record(
    compiled: Compiled,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    max_batch_input_tokens: int,
    forced: Sequence[Sequence[int]] | None = None,
) -> tuple[list[list[int]], list[Logits]]:
    """Continues all prompts at once and keeps every row of next-token logits.

    Args:
        compiled: The deployment.
        prompts: Token ids.
        max_new_tokens: Decode steps.
        max_batch_input_tokens: Tokens of one step of a replica.
        forced: The continuations to feed; by default the greedy ones.

    Returns:
        The continuations, and per prompt float32 ``[1 + max_new_tokens, vocabulary]``.
    """
    recorders = [_Recorder(None if forced is None else tokens) for tokens in forced or prompts]
    requests = [
        # The last row comes after the last decode step.
        Request(list(prompt), max_new_tokens + 1, recorder)
        for prompt, recorder in zip(prompts, recorders, strict=True)
    ]
    runner = Runner(compiled)
    runner.limit_step(max_batch_input_tokens)
    runner.run(requests)
    return [request.ids for request in requests], [np.stack(r.rows) for r in recorders]


def compare(plain: Sequence[Logits], deployed: Sequence[Logits]) -> Comparison:
    """Compares the logits of two deployments, prompt by prompt.

    A NaN is an infinite difference.

    Args:
        plain: Per prompt float32 ``[rows, vocabulary]`` of the plain deployment.
        deployed: The same of the other.
    """
    largest, where, relative = -1.0, Where(0, 0, 0), 0.0
    first_unequal: Where | None = None
    for prompt, (wanted, found) in enumerate(zip(plain, deployed, strict=True)):
        diff = _differences(wanted, found)
        scale = np.abs(wanted).max(axis=-1, keepdims=True)
        relative = max(relative, float((diff / np.maximum(scale, 1e-30)).max()))
        step, token = np.unravel_index(int(diff.argmax()), diff.shape)
        if diff[step, token] > largest:
            largest = float(diff[step, token])
            where = Where(prompt, int(step), int(token))
        unequal = np.flatnonzero(wanted.argmax(-1) != found.argmax(-1))
        if len(unequal) and first_unequal is None:
            at = int(unequal[0])
            first_unequal = Where(prompt, at, int(found[at].argmax()))
    return Comparison(
        max_abs_diff=largest,
        max_rel_diff=relative,
        where=where,
        rows=sum(len(rows) for rows in plain),
        tokens_equal=first_unequal is None,
        first_unequal=first_unequal,
    )


def _differences(wanted: Logits, found: Logits) -> npt.NDArray[np.float64]:
    diff = np.abs(found.astype(np.float64) - wanted.astype(np.float64))
    return np.where(np.isnan(diff), np.inf, diff)


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Prompts of random token ids, the same every time."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]
