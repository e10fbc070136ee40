"""``task=verify``: the deployment against the plain one."""

from __future__ import annotations

from dataclasses import asdict

from rich import box
from rich.table import Table

from builder.prompts import gather, tokenize
from builder.resolve import Plan, resolve
from builder.schema import DeploymentConfig, DevicesConfig, ParallelConfig, VerifyTask
from builder.steps import FailedJob, Job
from builder.tokenizer import load_tokenizer
from models.errors import ConfigError

PROMPT_LENGTHS = (5, 1, 60, 130, 17, 33, 2)
"""Random prompts where none are given: within a chunk, over several, and over a page's edge."""


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
    for key, value in (
        ("max_new_tokens", task.max_new_tokens),
        ("max_batch_input_tokens", task.max_batch_input_tokens),
        ("tolerance", task.tolerance),
    ):
        if value <= 0:
            raise ConfigError(f"task.{key}: {value} is not above 0")
    plan = job.plan()
    plain = resolve(job.config.model, _plain(plan.deployment), plan.checkpoint)
    prompts = _prompts(task, plan)
    deployed = job.compile(plan)
    reference = job.compile(plain)
    from builder.compare import compare, record

    limits = (task.max_new_tokens, task.max_batch_input_tokens)
    with job.step("run", f"comparing {len(prompts)} prompts"):
        ids, wanted = record(reference, prompts, *limits)
        _, found = record(deployed, prompts, *limits, forced=ids)
        result = compare(wanted, found)
    passed = result.max_abs_diff <= task.tolerance and result.tokens_equal
    job.folder.write_json(
        "verify.json",
        {
            "pass": passed,
            "tolerance": task.tolerance,
            **asdict(result),
            "deployment": plan.deployment.name,
            "plain": plain.deployment.name,
            "prompts": [len(prompt) for prompt in prompts],
            "steps": 1 + task.max_new_tokens,
            "seconds": job.seconds,
        },
    )
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    where = result.where
    for name, text in (
        ("verify", f"{plan.model.name} on {plan.deployment.name}: {'pass' if passed else 'FAIL'}"),
        ("compared", f"{result.rows} rows of logits, {len(prompts)} prompts in one batch"),
        (
            "largest difference",
            f"{result.max_abs_diff:.2e} (tolerance {task.tolerance:.0e}), relative "
            f"{result.max_rel_diff:.2e}, at prompt {where.prompt}, step {where.step}, "
            f"token {where.token}",
        ),
        ("greedy tokens", "equal" if result.tokens_equal else f"differ: {result.first_unequal}"),
    ):
        table.add_row(name, text)
    job.out.print(table)
    if not passed:
        raise FailedJob(
            f"{plan.model.name} on {plan.deployment.name} does not compute what it does on "
            f"{plain.deployment.name}: largest difference {result.max_abs_diff:.2e}, "
            f"tolerance {task.tolerance:.0e}"
        )


def _plain(deployment: DeploymentConfig) -> DeploymentConfig:
    """One device, nothing divided; limits that the graph does not depend on stay."""
    return DeploymentConfig(
        name="cpu",
        devices=DevicesConfig(),
        parallel=ParallelConfig(),
        batch=deployment.batch,
        kv=deployment.kv,
        max_length=deployment.max_length,
        return_logits=deployment.return_logits,
    )


def _prompts(task: VerifyTask, plan: Plan) -> list[list[int]]:
    if not task.prompts:
        from builder.compare import random_prompts

        longest = plan.max_length - task.max_new_tokens - 1
        lengths = [min(length, longest) for length in PROMPT_LENGTHS]
        return random_prompts(lengths, plan.settings.vocab_size)
    tokenizer = load_tokenizer(plan.checkpoint, plan.model.tokenizer)
    given = tokenize(
        gather("task.prompts", task.prompts, None),
        tokenizer=tokenizer,
        encode=lambda text: tokenizer.encode(text) if tokenizer else [],
        vocab_size=plan.settings.vocab_size,
        max_length=plan.max_length,
        room=task.max_new_tokens + 1,
    )
    return [prompt.ids for prompt in given]
