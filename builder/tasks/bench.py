"""``task=bench``: how fast a deployment is, and what it takes."""

from __future__ import annotations

import tempfile
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from builder.interrupt import InterruptedJob
from builder.machine import peak_resident_bytes, read_bandwidth
from builder.processes import seconds_since_start
from builder.report import human_bytes, summary_table
from builder.resolve import Plan
from builder.schema import BenchTask
from builder.steps import Job
from builder.tables import print_table
from builder.traffic import step_weight_bytes
from models.errors import ConfigError

if TYPE_CHECKING:
    from builder.measure import BatchRun, Cell
    from builder.run import Runner


def run(job: Job) -> float | None:
    """Runs every batch size with every context, and writes metrics.json.

    Returns:
        The most tokens generated per second, prefill included.

    Raises:
        ConfigError: If a setting can't be used; nothing is compiled then.
        InterruptedJob: If it was asked to stop; what was measured is written.
    """
    task = job.config.task
    assert isinstance(task, BenchTask)
    plan = job.plan()
    check_task(task, plan)
    compiled = job.compile(plan)
    from builder.run import Runner

    runner = Runner(compiled)
    bench = _Bench(job, task, runner)
    cells = bench.cells()
    # Before the bandwidth is measured, which takes memory itself.
    peak = peak_resident_bytes()
    # An accelerator's own memory is none of the host's.
    bandwidth = read_bandwidth() if plan.capacity is None else None
    # In a sweep the process is older than the job, and has had other jobs' memory.
    is_alone = not job.shared.several
    metrics: dict[str, Any] = {
        "cells": [_cell(plan, cell, bandwidth) for cell in cells],
        "generated_tok_s": max((cell.generated_tok_s for cell in cells), default=None),
        "start_s": bench.start_s if is_alone else None,
        "peak_rss_mb": peak / 1e6 if is_alone else None,
        "compile_s": job.seconds["compile"],
        "compile_cache_hit": compiled.cache_hit,
        "graphs_reused": compiled.reused,
        "compile_cold_s": None,
        "compile_warm_s": None,
        "memory_bandwidth_gb_s": None if bandwidth is None else bandwidth / 1e9,
        "weight_bytes_per_step": step_weight_bytes(plan, 1),
        "seconds": job.seconds,
    }
    # Before it is compiled again, which takes minutes and may be interrupted.
    job.folder.write_json("metrics.json", metrics)
    _print(job, plan, metrics)
    if job.interrupts.requested:
        raise InterruptedJob
    if task.cold_compile:
        metrics |= _compile_again(job, plan)
        job.folder.write_json("metrics.json", metrics)
        cold, warm = metrics["compile_cold_s"], metrics["compile_warm_s"]
        job.out.print(f"compiling: {cold:.1f} s with an empty cache, {warm:.1f} s with a warm one")
    rate: float | None = metrics["generated_tok_s"]
    return rate


def check_task(task: BenchTask, plan: Plan) -> None:
    """Every batch can be run, at once, and the graphs be compiled where that is asked for.

    Args:
        task: What to measure.
        plan: The deployment.

    Raises:
        ConfigError: If not.
    """
    for name, values in (("batch_sizes", task.batch_sizes), ("contexts", task.contexts)):
        if not values:
            raise ConfigError(f"task.{name}: empty; give at least one")
        if min(values) < 1:
            raise ConfigError(f"task.{name}: {min(values)} is less than 1")
    if task.new_tokens < 2:
        raise ConfigError(
            f"task.new_tokens: {task.new_tokens} is less than 2: the first token comes of the "
            "prompt, and no step decodes"
        )
    if task.warmup < 0:
        raise ConfigError(f"task.warmup: {task.warmup} is less than 0")
    if task.repeats < 1:
        raise ConfigError(f"task.repeats: {task.repeats} is less than 1")
    if task.seed < 0:
        raise ConfigError(f"task.seed: {task.seed} is less than 0")
    if task.cold_compile and plan.deployment.artifact is not None:
        raise ConfigError(
            "task.cold_compile: true, but the graphs are loaded from deployment.artifact, not "
            "compiled\n  what works: task.cold_compile=false"
        )
    for context in task.contexts:
        _check_length(task, plan, context)
        for batch_size in task.batch_sizes:
            _check_batch(task, plan, batch_size, context)


def _check_length(task: BenchTask, plan: Plan, context: int) -> None:
    """A sequence fits the plan's length."""
    needed, room = context + task.new_tokens, plan.max_length - task.new_tokens
    if needed <= plan.max_length:
        return
    works = []
    if room >= 1:
        works.append(f"task.contexts=[{room}]")
    if context <= plan.max_length - 2:
        works.append(f"task.new_tokens={plan.max_length - context}")
    if needed <= plan.settings.max_position_embeddings:
        works.append(f"deployment.max_length={needed}")
    told = f"\n  what works: {', or '.join(works)}" if works else ""
    raise ConfigError(
        f"task.contexts: {context} tokens + {task.new_tokens} to generate = {needed} exceed "
        f"max_length {plan.max_length}{told}"
    )


def _check_batch(task: BenchTask, plan: Plan, batch_size: int, context: int) -> None:
    """All of a batch's sequences run at once: none waits for a slot or for pages."""
    replicas, limits = plan.num_replicas, plan.batch
    most = limits.max_batch_size * replicas
    own = -(-batch_size // replicas)
    if batch_size > most:
        raise ConfigError(
            f"task.batch_sizes: {batch_size} sequences, but max_batch_size "
            f"{limits.max_batch_size} x {replicas} replica{'s' if replicas > 1 else ''} = {most} "
            f"run at once\n  what works: at most {most}, or deployment.batch.max_batch_size={own}"
        )
    page_size = plan.deployment.kv.page_size
    length = context + task.new_tokens
    each = -(-length // page_size)
    if own * each > plan.num_pages:
        fitting = plan.num_pages // each * replicas
        raise ConfigError(
            f"task.batch_sizes: {batch_size} sequences of {length} tokens are {own} x {each} = "
            f"{own * each} pages of a replica, which has {plan.num_pages}\n  what works: at most "
            f"{fitting}, or deployment.kv.num_pages={own * each}"
        )


class _Bench:
    """Measures the batches of a job.

    Args:
        job: The job.
        task: What to measure.
        runner: Runs the batches.
    """

    def __init__(self, job: Job, task: BenchTask, runner: Runner) -> None:
        self.start_s: float | None = None
        """Seconds from the process's beginning to the first token that it computed."""
        self._job = job
        self._task = task
        self._runner = runner
        began = time.perf_counter()
        runner.touch_pages()
        # No part of starting: only what is measured needs it.
        self._touched_s = time.perf_counter() - began

    def cells(self) -> list[Cell]:
        """Every batch size with every context; where it is stopped, those it came to."""
        found = []
        every = list(product(self._task.contexts, self._task.batch_sizes))
        for number, (context, batch_size) in enumerate(every, 1):
            name = f"batch size {batch_size}, context {context} ({number} of {len(every)})"
            with self._job.step("run", f"measuring {name}"):
                cell = self._cell(batch_size, context)
            if cell is None:
                break
            found.append(cell)
        return found

    def _cell(self, batch_size: int, context: int) -> Cell | None:
        from builder.measure import Cell, random_batch

        task = self._task
        settings = self._runner.plan.settings
        runs: list[BatchRun] = []
        for number in range(task.warmup + task.repeats):
            # Others each time: what is cached of a prompt is not computed again.
            seed = (task.seed, batch_size, context, number)
            one = self._once(random_batch(batch_size, context, settings, seed))
            if one is None:
                break
            runs.append(one)
        counted = tuple(runs[task.warmup :])
        if not counted:
            return None
        facts = {"batch_size": batch_size, "context": context, "new_tokens": task.new_tokens}
        return Cell(**facts, runs=counted)

    def _once(self, prompts: list[list[int]]) -> BatchRun | None:
        from builder.measure import run_batch

        one = run_batch(
            self._runner,
            prompts,
            self._task.new_tokens,
            should_stop=lambda: self._job.interrupts.requested,
        )
        if one is not None and self.start_s is None:
            since = time.perf_counter() - one.began - min(one.first)
            self.start_s = seconds_since_start() - since - self._touched_s
        return one


def _cell(plan: Plan, cell: Cell, bandwidth: float | None) -> dict[str, Any]:
    """A cell as metrics.json has it."""
    weights = step_weight_bytes(plan, cell.batch_size)
    middle = cell.step_ms(50)
    ratio = None
    if bandwidth is not None and middle is not None:
        ratio = weights / (middle / 1e3) / bandwidth
    return {
        "batch_size": cell.batch_size,
        "context": cell.context,
        "new_tokens": cell.new_tokens,
        "ttft_ms": cell.ttft_ms,
        "prefill_tok_s": cell.prefill_tok_s,
        "decode_tok_s": cell.decode_tok_s,
        "generated_tok_s": cell.generated_tok_s,
        "step_ms": {"p50": middle, "p99": cell.step_ms(99)},
        "decode_steps": len(cell.decode_steps),
        "host_share": cell.host_share,
        "weight_bytes_per_step": weights,
        "bandwidth_ratio": ratio,
        "repeats": len(cell.runs),
    }


def _compile_again(job: Job, plan: Plan) -> dict[str, float]:
    """Compiles apart with an empty cache, and once more with what that left in it."""
    from builder.cold import compile_apart

    with tempfile.TemporaryDirectory(prefix="rolecall-cache-") as folder:
        seconds = {}
        for name, cache in (("cold", "an empty"), ("warm", "a warm")):
            with job.step(f"compile_{name}", f"compiling in a process of its own, {cache} cache"):
                found = compile_apart(plan, Path(folder), lambda: job.interrupts.requested)
            assert found.cache_hit == (name == "warm"), f"{cache} cache: hit is {found.cache_hit}"
            seconds[f"compile_{name}_s"] = found.seconds
    return seconds


COLUMNS = (
    *("batch", "context", "first token", "prefill", "decode"),
    *("step p50", "step p99", "host", "bandwidth"),
)
"""The headings of the table."""


def _print(job: Job, plan: Plan, metrics: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in metrics["cells"]:
        table.add_row(
            str(cell["batch_size"]),
            str(cell["context"]),
            _told(cell["ttft_ms"], ".1f", " ms"),
            _told(cell["prefill_tok_s"], ".0f", " tok/s"),
            _told(cell["decode_tok_s"], ".1f", " tok/s"),
            _told(cell["step_ms"]["p50"], ".2f", " ms"),
            _told(cell["step_ms"]["p99"], ".2f", " ms"),
            _told(cell["host_share"], ".1%"),
            _told(cell["bandwidth_ratio"], ".0%"),
        )
    print_table(table, job.out)
    facts = summary_table(plan)
    bandwidth = metrics["memory_bandwidth_gb_s"]
    read = human_bytes(metrics["weight_bytes_per_step"])
    facts.add_row(
        "bandwidth",
        f"{read} of weights per step" + _told(bandwidth, ".1f", " GB/s is read at most", ", "),
    )
    facts.add_row(
        "compile",
        f"{metrics['compile_s']:.1f} s, cache {'hit' if metrics['compile_cache_hit'] else 'miss'}",
    )
    if metrics["start_s"] is not None:
        facts.add_row("start", f"{metrics['start_s']:.1f} s to the first token")
    if metrics["peak_rss_mb"] is not None:
        facts.add_row("memory", f"{metrics['peak_rss_mb']:.0f} MB at most")
    print_table(facts, job.out)


def _told(value: float | None, form: str, unit: str = "", before: str = "") -> str:
    """A figure in its unit, or nothing."""
    return "" if value is None else f"{before}{value:{form}}{unit}"
