"""``task=generate``: prompts to text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from builder.interrupt import InterruptedJob
from builder.prompts import Prompt, PromptReader, RefusedPrompt, gather
from builder.report import human_bytes, summary_table
from builder.resolve import Plan
from builder.sampling import Sampler, check_sampling
from builder.schema import GenerateTask
from builder.steps import Job, SomeRefused
from builder.tables import print_table
from builder.tokenizer import TextTokenizer, load_tokenizer, stop_ids
from models.errors import ConfigError

if TYPE_CHECKING:
    from builder.compile import Compiled
    from builder.run import Request, Runner


DEFAULT_PROMPT = "Explain what a KV cache is in two sentences."
"""What is asked where the user asks nothing."""


def run(job: Job) -> float | None:
    """Continues every prompt and writes generations.jsonl and metrics.json.

    Returns:
        Tokens generated per second, over all prompts.

    Raises:
        ConfigError: If a setting can't be used, or no prompt; nothing is compiled then. If some
            prompts can't be used the others are computed first.
        InterruptedJob: If it was asked to stop; what it had is written.
    """
    task = job.config.task
    assert isinstance(task, GenerateTask)
    check_sampling(task.sampling)
    if task.max_new_tokens < 1:
        raise ConfigError(f"task.max_new_tokens: {task.max_new_tokens} is less than 1")
    plan = job.plan()
    tokenizer = load_tokenizer(plan.checkpoint, plan.model.tokenizer)
    given = _prompts(task, plan, tokenizer)
    prompts = [prompt for prompt in given if isinstance(prompt, Prompt)]
    refused = [prompt for prompt in given if isinstance(prompt, RefusedPrompt)]
    if not prompts:
        raise refused[0].error
    if refused:
        told = f"{len(refused)} of {len(given)} prompts can't be computed; the others are"
        print(told, file=sys.stderr, flush=True)
    stops = frozenset[int]() if task.ignore_eos else stop_ids(plan.checkpoint)
    compiled = job.compile(plan)
    from builder.run import Request, Runner

    requests = [
        Request(
            prompt.ids,
            min(task.max_new_tokens, plan.max_length - len(prompt.ids)),
            Sampler(task.sampling, index),
            stops,
            adapter=prompt.adapter,
            crops=prompt.crops,
        )
        # By its place in what was given, which a refused prompt does not change.
        for index, prompt in enumerate(given)
        if isinstance(prompt, Prompt)
    ]
    runner = Runner(compiled)
    try:
        with job.step("run"):
            runner.run(
                requests,
                on_token=_printer(given, requests, tokenizer),
                should_stop=lambda: job.interrupts.requested,
            )
    finally:
        # Also where a step failed: what was generated before it is kept.
        computed = iter(zip(prompts, requests, strict=True))
        generations = [
            _refusal(prompt)
            if isinstance(prompt, RefusedPrompt)
            else _generation(*next(computed), tokenizer)
            for prompt in given
        ]
        job.folder.write_lines("generations.jsonl", generations)
    metrics = _metrics(job, compiled, runner, requests)
    job.folder.write_json("metrics.json", metrics)
    _print_summary(job, plan, compiled, metrics)
    if job.interrupts.requested:
        raise InterruptedJob
    if refused:
        raise SomeRefused("\n".join(str(prompt.error) for prompt in refused))
    rate: float | None = metrics["generated_tok_s"]
    return rate


def _prompts(
    task: GenerateTask, plan: Plan, tokenizer: TextTokenizer | None
) -> list[Prompt | RefusedPrompt]:
    given = task.prompts
    if given is None:
        given = [] if task.prompts_file else [DEFAULT_PROMPT]
    entries = gather("task.prompts", given, task.prompts_file)
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    if task.chat and not has_template:
        raise ConfigError("task.chat: the checkpoint has no chat template; set task.chat=false")
    if task.chat and any(isinstance(entry, list) for _, entry in entries):
        raise ConfigError("task.chat: token ids are put into no chat template; give texts")
    chat = has_template if task.chat is None else task.chat
    return PromptReader(plan, tokenizer, room=1, chat=chat).read_each(entries)


def _printer(
    given: list[Prompt | RefusedPrompt], requests: list[Request], tokenizer: TextTokenizer | None
) -> Callable[[Request, int], None]:
    """Prints the one request's text as it comes, or each of several when it is finished."""
    if len(given) == 1 and tokenizer is not None:
        stream = tokenizer.stream()

        def print_token(request: Request, token: int) -> None:
            print(stream.push(token), end="" if request.finish is None else "\n", flush=True)

        return print_token
    places = [place for place, prompt in enumerate(given, 1) if isinstance(prompt, Prompt)]

    def print_finished(request: Request, _token: int) -> None:
        if request.finish is None:
            return
        place = next(
            place for place, known in zip(places, requests, strict=True) if known is request
        )
        text = str(request.ids) if tokenizer is None else tokenizer.decode(request.ids)
        print(f"[{place}/{len(given)}] {text}", flush=True)

    return print_finished


def _generation(
    prompt: Prompt, request: Request, tokenizer: TextTokenizer | None
) -> dict[str, Any]:
    times = request.token_times
    first = request.started
    return {
        "prompt": prompt.given,
        "prompt_ids": prompt.ids,
        "adapter": prompt.adapter or None,
        "images": list(prompt.images),
        "ids": request.ids,
        "text": None if tokenizer is None else tokenizer.decode(request.ids),
        "finish": request.finish,
        "error": None,
        "cached_tokens": request.cached_tokens,
        "ttft_ms": (times[0] - first) * 1e3 if times and first is not None else None,
        "total_ms": (times[-1] - first) * 1e3 if times and first is not None else None,
        "decode_tok_s": _rate(len(times) - 1, times[-1] - times[0]) if len(times) > 1 else None,
    }


def _refusal(prompt: RefusedPrompt) -> dict[str, Any]:
    return {
        "prompt": prompt.given,
        "prompt_ids": [],
        "adapter": prompt.adapter,
        "images": prompt.images or [],
        "ids": [],
        "text": None,
        "finish": "error",
        "error": str(prompt.error),
        "cached_tokens": None,
        "ttft_ms": None,
        "total_ms": None,
        "decode_tok_s": None,
    }


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _metrics(
    job: Job, compiled: Compiled, runner: Runner, requests: list[Request]
) -> dict[str, Any]:
    generated = sum(len(request.ids) for request in requests)
    times = runner.times
    return {
        "prompts": len(requests),
        "prompt_tokens": sum(len(request.prompt_ids) for request in requests),
        "prefix_cached_tokens": sum(request.cached_tokens for request in requests),
        "generated_tokens": generated,
        "generated_tok_s": _rate(generated, job.seconds["run"]),
        "steps": times.steps,
        "step_ms": times.total / times.steps * 1e3 if times.steps else None,
        "host_share": 1 - times.execute / times.total if times.total else None,
        "compile_cache_hit": compiled.cache_hit,
        "graphs_reused": compiled.reused,
        "seconds": job.seconds,
    }


def _print_summary(job: Job, plan: Plan, compiled: Compiled, metrics: dict[str, Any]) -> None:
    table = summary_table(plan)
    table.add_row(
        "memory",
        f"{human_bytes(plan.weights.total)} of weights, "
        f"{human_bytes(sum(share.kv_pages for share in plan.devices))} of KV pages",
    )
    table.add_row("compile cache", compiled.found)
    table.add_row("steps", ", ".join(f"{name} {took:.2f} s" for name, took in job.seconds.items()))
    rate = metrics["generated_tok_s"]
    table.add_row(
        "speed",
        f"{metrics['generated_tokens']} tokens"
        + (f", {rate:.1f} tokens/s" if rate else "")
        + (f", {metrics['step_ms']:.1f} ms per step" if metrics["step_ms"] else ""),
    )
    print_table(table, job.out)
