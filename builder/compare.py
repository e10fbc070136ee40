"""Runs two deployments over the same tokens and compares their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from max.nn.transformer import ReturnLogits

from builder.compile import Compiled
from builder.images import Pixels
from builder.interrupt import InterruptedJob
from builder.run import Request, Runner
from builder.sampling import Logits, Sampler
from builder.schema import SamplingConfig
from models.settings import VisionSettings


@dataclass(frozen=True)
class Where:
    """One row of logits."""

    prompt: int
    """The prompt's position; counted on, for the rows that a graph returns beside these."""

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
        self.next_rows: list[Logits] = []
        self.own_rows: list[Logits] = []

    def choose(self, logits: Logits) -> int:
        """The given token of this step, or the most likely one."""
        self.next_rows.append(logits.copy())
        if self._tokens is None:
            return super().choose(logits)
        return self._tokens[len(self.next_rows) - 1]

    def keep(self, logits: Logits) -> None:
        """Keeps the rows that a graph returns beside the next-token logits."""
        self.own_rows.append(logits.copy())


def record(
    compiled: Compiled,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    max_batch_input_tokens: int,
    forced: Sequence[Sequence[int]] | None = None,
    adapters: Sequence[str] = ("",),
    crops: Sequence[Sequence[Pixels]] = ((),),
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[list[list[int]], list[Logits]]:
    """Continues all prompts at once and keeps every row of logits.

    Args:
        compiled: The deployment.
        prompts: Token ids.
        max_new_tokens: Decode steps.
        max_batch_input_tokens: Tokens of one step of a replica.
        forced: The continuations to feed; by default the greedy ones.
        adapters: The prompts' adapters in turn; empty for none.
        crops: The crops of the prompts' images in turn.
        should_stop: Asked before each step.

    Returns:
        The continuations; and per prompt float32 ``[1 + max_new_tokens, vocabulary]``, then, of a
        graph that returns more than next-token logits, per prompt those rows.

    Raises:
        InterruptedJob: If it was asked to stop.
    """
    recorders = [_Recorder(None if forced is None else tokens) for tokens in forced or prompts]
    plan = compiled.registration.plan
    returns_more = plan.stages[-1].config.return_logits is not ReturnLogits.LAST_TOKEN
    requests = [
        # The last row comes after the last decode step.
        Request(
            list(prompt),
            max_new_tokens + 1,
            recorder,
            adapter=adapters[number % len(adapters)],
            crops=crops[number % len(crops)],
            on_logits=recorder.keep if returns_more else None,
        )
        for number, (prompt, recorder) in enumerate(zip(prompts, recorders, strict=True))
    ]
    runner = Runner(compiled)
    runner.limit_step(max_batch_input_tokens)
    runner.run(requests, should_stop=should_stop)
    if should_stop():
        raise InterruptedJob
    rows = [np.stack(recorder.next_rows) for recorder in recorders]
    rows += [np.concatenate(r.own_rows) for r in recorders if r.own_rows]
    return [request.ids for request in requests], rows


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
        scale = np.maximum(np.abs(wanted).max(axis=-1, keepdims=True), 1e-30)
        relative = max(relative, float(_differences(wanted / scale, found / scale).max()))
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


def random_prompts(
    lengths: Sequence[int], vocab_size: int, vision: VisionSettings | None = None
) -> list[list[int]]:
    """Prompts of random token ids, the same every time, none of them an image's.

    Args:
        lengths: Their lengths.
        vocab_size: The ids end below it.
        vision: The encoder of a model that takes images.
    """
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, vocab_size, length) for length in lengths]
    if vision is not None:
        other = (vision.image_token_id + 1) % vocab_size
        prompts = [np.where(ids == vision.image_token_id, other, ids) for ids in prompts]
    return [ids.tolist() for ids in prompts]


def random_image_prompts(
    counts: Sequence[int], vocab_size: int, vision: VisionSettings
) -> list[tuple[list[int], tuple[Pixels, ...]]]:
    """Prompts of random token ids with random crops among them, the same every time.

    Args:
        counts: Each prompt's crops.
        vocab_size: The ids end below it.
        vision: The encoder.
    """
    generator = np.random.default_rng(1)
    shape = (vision.num_channels, vision.crop_size, vision.crop_size)
    prompts = []
    for count in counts:
        first, *others = random_prompts([3] + [4] * count, vocab_size, vision)
        image = [vision.image_token_id] * vision.tokens_per_crop
        ids = first + [token for text in others for token in (*image, *text)]
        crops = tuple(generator.standard_normal(shape, np.float32) for _ in range(count))
        prompts.append((ids, crops))
    return prompts
