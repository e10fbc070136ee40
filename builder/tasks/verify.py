"""``task=verify``: the deployment against the plain one."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from builder.checks import check_no_obstacle, obstacles
from builder.images import Pixels
from builder.prompts import Prompt, PromptReader, gather
from builder.resolve import Plan, resolve
from builder.schema import (
    DeploymentConfig,
    DevicesConfig,
    Encoding,
    ParallelConfig,
    VerifyTask,
)
from builder.steps import FailedJob, Job
from builder.tables import print_table
from builder.tokenizer import load_tokenizer
from models.errors import ConfigError

if TYPE_CHECKING:
    from builder.compare import Where

PROMPT_LENGTHS = (5, 1, 60, 130, 17, 33, 2)
"""Random prompts where none are given: within a chunk, over several, and over a page's edge."""


NUM_CROPS = (2, 1)
"""The crops of random prompts with images, beside those, where images are served."""


EXACT, BFLOAT16 = 1e-4, 0.03
"""The tolerances of what is computed in float32 with exact weights, absolute, and of bfloat16,
relative to the row's largest logit. SmolLM2's weights stored in BF16 were measured at 6e-5."""

ROUNDED = {"Q4_0": 0.12, "Q4_1": 0.12, "Q4_K": 0.14, "Q6_K": 0.13, "Q8_0": 0.15}
"""The same, relative, where products with weights kept in an encoding round activations to 8 bits.

Half as much again as SmolLM2 was measured at: 0.077, 0.076, 0.092, 0.081 and 0.094. Of the K
formats its file has what is a multiple of 256 wide, beside Q8_0."""


def run(job: Job) -> None:
    """Compares logits at prefill and at each decode step and writes verify.json.

    All prompts are batched, and prefilled in chunks beside those that decode already. The plain
    deployment decodes greedily; the other is fed the same tokens, so that each of its rows can
    be compared, and its own greedy tokens with them.

    Raises:
        ConfigError: If a setting can't be used; nothing is compiled then.
        FailedJob: If the logits differ by more than the tolerance, or a greedy token differs.
    """
    task = job.config.task
    assert isinstance(task, VerifyTask)
    if task.max_new_tokens < 1:
        raise ConfigError(f"task.max_new_tokens: {task.max_new_tokens} is less than 1")
    plan = job.plan()
    usual = _usual_tolerance(plan)
    exact = usual is None
    tolerance = task.tolerance
    if tolerance is None:
        tolerance = EXACT if usual is None else usual
    if not 0 < tolerance < math.inf:
        raise ConfigError(f"task.tolerance: {tolerance} is not a number above 0")
    step_tokens = _step_tokens(task, plan)
    # On the CPU, in float32, and with float32 weights.
    model = replace(job.config.model, encoding=None)
    plain = resolve(model, _plain(plan.deployment), plan.checkpoint, keeps=False)
    both = [(plain.weights, plain.devices)]
    if plan.capacity is None:
        both.insert(0, (plan.weights, plan.devices))
    check_no_obstacle(obstacles(plain.model, plain.deployment, plan.checkpoint, both))
    prompts = _prompts(task, plan)
    deployed = job.compile(plan)
    reference = job.compile(plain)
    from builder.compare import compare, record

    limits = (task.max_new_tokens, step_tokens)

    def should_stop() -> bool:
        return job.interrupts.requested

    with job.step("run", f"comparing {len(prompts)} prompts"):
        given = [prompt.ids for prompt in prompts]
        more: dict[str, Any] = {
            "adapters": [prompt.adapter for prompt in prompts],
            "crops": [prompt.crops for prompt in prompts],
            "should_stop": should_stop,
        }
        ids, wanted = record(reference, given, *limits, **more)
        _, found = record(deployed, given, *limits, forced=ids, **more)
        result = compare(wanted, found)
    largest = result.max_abs_diff if exact else result.max_rel_diff
    passed = largest <= tolerance and (result.tokens_equal or not exact)
    job.folder.write_json(
        "verify.json",
        {
            "pass": passed,
            "tolerance": tolerance,
            "encoding": plan.encoding.value,
            "relative": not exact,
            **asdict(result),
            # JSON has no infinity; a difference that is none is a NaN in the logits.
            "max_abs_diff": _finite(result.max_abs_diff),
            "max_rel_diff": _finite(result.max_rel_diff),
            "deployment": plan.deployment.name,
            "plain": plain.deployment.name,
            "prompts": [len(prompt.ids) for prompt in prompts],
            "crops": [len(prompt.crops) for prompt in prompts],
            "steps": 1 + task.max_new_tokens,
            "max_batch_input_tokens": step_tokens,
            "seconds": job.seconds,
        },
    )
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    unequal = result.first_unequal
    for name, text in (
        ("verify", f"{plan.model.name} on {plan.deployment.name}: {'pass' if passed else 'FAIL'}"),
        ("compared", f"{result.rows} rows of logits, {len(prompts)} prompts in one batch"),
        (
            "largest difference",
            f"{result.max_abs_diff:.2e}, relative {result.max_rel_diff:.2e} ("
            f"{'absolute' if exact else 'relative'} tolerance {tolerance:g}), at "
            f"{_place(result.where)}",
        ),
        ("greedy tokens", "equal" if unequal is None else f"differ, first at {_place(unequal)}"),
    ):
        table.add_row(name, text)
    print_table(table, job.out)
    if not passed:
        problems = []
        if largest > tolerance:
            problems.append(f"largest difference {largest:.2e}, tolerance {tolerance:g}")
        if exact and unequal is not None:
            problems.append(f"the greedy token differs, first at {_place(unequal)}")
        raise FailedJob(
            f"{plan.model.name} on {plan.deployment.name} does not compute what it does on "
            f"{plain.deployment.name}: {'; '.join(problems)}"
        )


def _place(where: Where) -> str:
    return f"prompt {where.prompt}, step {where.step}, token {where.token}"


def _plain(deployment: DeploymentConfig) -> DeploymentConfig:
    """One device, nothing divided; limits that the graph does not depend on stay."""
    return DeploymentConfig(
        name="cpu",
        devices=DevicesConfig(),
        parallel=ParallelConfig(),
        batch=deployment.batch,
        kv=replace(deployment.kv, prefix_caching=False),
        lora=deployment.lora,
        vision=deployment.vision,
        max_length=deployment.max_length,
        return_logits=deployment.return_logits,
    )


DEFAULT_STEP_TOKENS = 48
"""Small enough that the default prompts are prefilled in chunks."""


def _step_tokens(task: VerifyTask, plan: Plan) -> int:
    batch = plan.batch
    asked = task.max_batch_input_tokens
    if asked is None:
        return min(max(DEFAULT_STEP_TOKENS, batch.max_batch_size), batch.max_batch_input_tokens)
    if not batch.max_batch_size <= asked <= batch.max_batch_input_tokens:
        raise ConfigError(
            f"task.max_batch_input_tokens: {asked} is not between the deployment's max_batch_size, "
            f"{batch.max_batch_size}, and its max_batch_input_tokens, "
            f"{batch.max_batch_input_tokens}"
        )
    return asked


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _prompts(task: VerifyTask, plan: Plan) -> list[Prompt]:
    if task.prompts:
        tokenizer = load_tokenizer(plan.checkpoint, plan.model.tokenizer)
        reader = PromptReader(plan, tokenizer, room=task.max_new_tokens + 1)
        return reader.read_all(gather("task.prompts", task.prompts, None))
    from builder.compare import random_image_prompts, random_prompts

    settings = plan.settings
    longest = plan.max_length - task.max_new_tokens - 1
    if longest < 1:
        raise ConfigError(
            f"task.max_new_tokens: {task.max_new_tokens} + 1 leaves no room for a prompt in "
            f"max_length {plan.max_length}\n  what works: at most {plan.max_length - 2}"
        )
    lengths = [min(length, longest) for length in PROMPT_LENGTHS]
    found: list[tuple[list[int], tuple[Pixels, ...]]] = [
        (ids, ()) for ids in random_prompts(lengths, settings.vocab_size, settings.vision)
    ]
    if plan.vision is not None:
        pictured = random_image_prompts(NUM_CROPS, settings.vocab_size, plan.vision.settings)
        fitting = [prompt for prompt in pictured if len(prompt[0]) <= longest]
        if not fitting:
            shortest = min(len(ids) for ids, _ in pictured)
            raise ConfigError(
                f"deployment.max_length: {plan.max_length} has no room for an image of "
                f"{plan.vision.settings.tokens_per_crop} tokens and its text\n  what works: "
                f"at least {shortest + task.max_new_tokens + 1}"
            )
        found += fitting
    # Without an adapter and with each in turn.
    adapters = ("", *plan.adapters)
    prompts = [
        Prompt(ids, ids, adapters[number % len(adapters)], crops=crops)
        for number, (ids, crops) in enumerate(found)
    ]
    if plan.prefix_caching:
        # One that begins as the longest text, whose pages it takes.
        base = max(prompts[: len(lengths)], key=lambda prompt: len(prompt.ids))
        ids = (base.ids + prompts[0].ids)[:longest]
        prompts.append(replace(base, given=ids, ids=ids))
    return prompts


def _usual_tolerance(plan: Plan) -> float | None:
    """What a row may differ by, of its largest; ``None`` where nothing is rounded on the way."""
    if plan.encoding is Encoding.bfloat16:
        return BFLOAT16
    if not plan.stages[0].config.rounds_activations:
        return None
    return max((ROUNDED[name] for name in plan.weights.kept if name in ROUNDED), default=None)
