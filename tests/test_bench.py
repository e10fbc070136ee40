"""``task=bench``: its figures are what their definitions say, and it measures what can be run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import LORA, REFERENCE, SHARED_TABLE, compiled_alone, compiled_for, limited, plan_for
from safetensors import safe_open
from test_command import read, rolecall

from builder.compose import compose
from builder.interrupt import InterruptedJob, Interrupts
from builder.job import JobFolder, read_json
from builder.machine import read_bandwidth
from builder.page.page import as_html
from builder.resolve import Plan
from builder.shared import Shared
from builder.steps import Job
from builder.summary import JobRow
from builder.tables import console
from builder.tasks import bench
from builder.traffic import step_weight_bytes
from models.errors import ConfigError

MODEL = "model=tiny_llama"
BENCH = (MODEL, "task=bench", "task.contexts=[20]", "task.new_tokens=12")
CELL = {
    *("batch_size", "context", "new_tokens", "repeats", "ttft_ms", "prefill_tok_s", "step_ms"),
    *("decode_tok_s", "decode_steps", "generated_tok_s", "host_share", "bandwidth_ratio"),
    "weight_bytes_per_step",
}
METRICS = {
    *("cells", "generated_tok_s", "start_s", "peak_rss_mb", "compile_s", "compile_cache_hit"),
    *("graphs_reused", "compile_cold_s", "compile_warm_s", "memory_bandwidth_gb_s", "seconds"),
    "weight_bytes_per_step",
}


def test_command_writes_figures_that_agree(tmp_path: Path) -> None:
    rolecall(tmp_path, "task=compile", MODEL)
    began = time.monotonic()
    done = rolecall(tmp_path, *BENCH, "task.batch_sizes=[1,4]", "task.repeats=2")
    took = time.monotonic() - began
    metrics = read(tmp_path, "metrics.json")
    assert set(metrics) == METRICS
    assert 0 < metrics["compile_s"] < metrics["start_s"] < took
    assert metrics["compile_cache_hit"]
    assert metrics["compile_cold_s"] is metrics["compile_warm_s"] is None
    # Python and MAX alone take more than 100 MB.
    assert 100 < metrics["peak_rss_mb"] < peak_resident_bytes_of_children() / 1e6 + 1
    assert [cell["batch_size"] for cell in metrics["cells"]] == [1, 4]
    bandwidth = metrics["memory_bandwidth_gb_s"] * 1e9
    for cell in metrics["cells"]:
        assert set(cell) == CELL
        size, step = cell["batch_size"], cell["step_ms"]
        # All prompts fit one step, which gives the first of 12 tokens.
        assert cell["decode_steps"] == 2 * 11
        assert 0 < step["p50"] <= step["p99"]
        mean = 1e3 * size / cell["decode_tok_s"]
        # Half of the steps take the median or more.
        assert step["p50"] / 2 <= mean <= step["p99"]
        assert 0 < cell["host_share"] < 1
        assert cell["generated_tok_s"] < cell["decode_tok_s"] * 12 / 11
        prefill = 1e3 * size * 20 / cell["prefill_tok_s"]
        assert cell["ttft_ms"] <= prefill * (1 + 1e-9)
        ratio = cell["weight_bytes_per_step"] / (step["p50"] / 1e3) / bandwidth
        assert math.isclose(cell["bandwidth_ratio"], ratio)
    rates = [cell["generated_tok_s"] for cell in metrics["cells"]]
    assert metrics["generated_tok_s"] == max(rates)
    assert "measuring batch size 4, context 20 (2 of 2)" in done.stderr
    assert "bandwidth" in done.stdout


def peak_resident_bytes_of_children() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


MISTAKES = {
    "no batch": (["task.batch_sizes=[]"], "task.batch_sizes: empty", "give at least one"),
    "empty batch": (["task.batch_sizes=[1,0]"], "task.batch_sizes: 0 is less than 1", ""),
    "no prompt": (["task.contexts=[0]"], "task.contexts: 0 is less than 1", ""),
    "a batch that does not run at once": (
        ["task.batch_sizes=[17]", "deployment=dp2"],
        "task.batch_sizes: 17 sequences, but max_batch_size 8 x 2 replicas = 16 run at once",
        "at most 16, or deployment.batch.max_batch_size=9",
    ),
    "a batch that the pages do not hold": (
        ["task.batch_sizes=[8]", "deployment.kv.num_pages=15", "task.contexts=[128]"],
        "task.batch_sizes: 8 sequences of 140 tokens are 8 x 2 = 16 pages of a replica, which has",
        "at most 7, or deployment.kv.num_pages=16",
    ),
    "a sequence that is too long": (
        ["task.contexts=[20,200]", "deployment.max_length=210"],
        "task.contexts: 200 tokens + 12 to generate = 212 exceed max_length 210",
        "task.contexts=[198], or task.new_tokens=10, or deployment.max_length=212",
    ),
    "one that the model does not take": (
        ["task.contexts=[512]"],
        "task.contexts: 512 tokens + 12 to generate = 524 exceed max_length 512",
        "what works: task.contexts=[500]",
    ),
    "no step that decodes": (["task.new_tokens=1"], "task.new_tokens: 1 is less than 2", ""),
    "nothing that counts": (["task.repeats=0"], "task.repeats: 0 is less than 1", ""),
    "less than no warm-up": (["task.warmup=-1"], "task.warmup: -1 is less than 0", ""),
    "a seed that is none": (["task.seed=-1"], "task.seed: -1 is less than 0", ""),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_run_is_refused(name: str) -> None:
    overrides, problem, remedy = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    assert problem in str(caught.value)
    assert remedy in str(caught.value)


def check(*overrides: str) -> None:
    every = (*BENCH, *overrides)
    bench.check_task(compose(every).task, plan_for(*every))


def test_what_works_is_what_the_message_says() -> None:
    check("task.batch_sizes=[17]", "deployment=dp2", "deployment.batch.max_batch_size=9")
    check("task.contexts=[128]", "deployment.kv.num_pages=16")
    check("task.contexts=[500]")


def test_compiling_again_is_refused_of_an_artifact() -> None:
    plan = plan_for(*BENCH)
    plan = replace(plan, deployment=replace(plan.deployment, artifact="compiled"))
    with pytest.raises(ConfigError, match=r"task.cold_compile: true, but the graphs are loaded"):
        bench.check_task(compose((*BENCH, "task.cold_compile=true")).task, plan)


def test_figures_are_of_the_steps_in_which_all_decode() -> None:
    from builder.measure import BatchRun, Cell
    from builder.step_times import StepTime

    # A prompt beside a sequence that decodes, all decoding, and the last one alone.
    others = (StepTime(50, 0, 1, 2), StepTime(41, 1, 1, 2), StepTime(1, 1, 1, 2))
    took = [0.010, 0.011, 0.012, 0.013, 0.030, 0.014]
    steps = [StepTime(2, 2, seconds - 0.004, seconds) for seconds in took]
    runs = [
        BatchRun(began=0, first=(0.2, 0.5), total=1.0, steps=(*others, *steps[:3])),
        BatchRun(began=9, first=(0.3, 0.7), total=2.0, steps=(*others, *steps[3:])),
        BatchRun(began=11, first=(0.1, 0.6), total=4.0, steps=others),
    ]
    cell = Cell(batch_size=2, context=50, new_tokens=4, runs=tuple(runs))
    assert cell.decode_steps == steps
    assert math.isclose(cell.step_ms(50), 12.5)
    # Between the two slowest, at 0.99 of the five steps from the first to the last.
    assert math.isclose(cell.step_ms(99), 14 + (30 - 14) * 0.95)
    assert math.isclose(cell.step_ms(99), np.percentile(took, 99) * 1e3)
    assert math.isclose(cell.decode_tok_s, 2 * 6 / sum(took))
    assert math.isclose(cell.host_share, 6 * 0.004 / sum(took))
    assert math.isclose(cell.ttft_ms, 400)
    assert math.isclose(cell.prefill_tok_s, 2 * 50 / 0.6)
    assert math.isclose(cell.generated_tok_s, 2 * 4 / 2.0)
    none = replace(cell, runs=tuple(runs[2:]))
    assert none.decode_tok_s is none.host_share is none.step_ms(50) is None


def test_steps_are_recorded_as_they_are_scheduled() -> None:
    from builder.measure import random_batch, run_batch
    from builder.run import Runner

    compiled = compiled_for(MODEL)
    runner = Runner(limited(compiled, max_batch_input_tokens=16))
    prompts = random_batch(3, 20, runner.plan.settings, 0)
    one = run_batch(runner, prompts, 9, should_stop=lambda: False)
    assert one is not None
    # 16 tokens; 4 and 12; one that decodes, 8 and 7; two that decode and 13; then three.
    assert [(step.tokens, step.decoding) for step in one.steps] == [
        *((16, 0), (16, 0), (16, 1), (15, 2), (3, 3), (3, 3), (3, 3), (3, 3), (3, 3), (3, 3)),
        *((2, 2), (1, 1)),
    ]
    assert all(0 < step.execute < step.total for step in one.steps)
    assert one.first[0] < one.first[1] < one.first[2] < one.total
    assert sum(step.total for step in one.steps) <= one.total
    assert runner.free_pages() == compiled.registration.plan.num_pages
    assert run_batch(runner, prompts, 9, should_stop=lambda: True) is None


def test_prompts_differ_from_their_first_token_and_have_no_image() -> None:
    from builder.measure import random_batch

    settings = plan_for("model=tiny_idefics3").settings
    batch = random_batch(40, 200, settings, 3)
    assert batch == random_batch(40, 200, settings, 3) != random_batch(40, 200, settings, 4)
    assert len({prompt[0] for prompt in batch}) == len(batch) == 40
    tokens = {token for prompt in batch for token in prompt}
    assert {type(token) for token in tokens} == {int}
    assert tokens <= set(range(settings.vocab_size)) - {settings.vision.image_token_id}
    # More than there are ids.
    assert len(random_batch(settings.vocab_size + 5, 1, settings, 0)) == settings.vocab_size + 5


def sizes(model: str) -> dict[str, int]:
    """The values of each tensor of a reference checkpoint, in its file."""
    with safe_open(REFERENCE / model / "model.safetensors", "numpy") as file:
        return {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def float32(*overrides: str) -> Plan:
    """A plan that keeps nothing: each value takes four bytes."""
    return plan_for(*overrides, keeps=False)


def total(found: dict[str, int], wanted: Callable[[str], bool]) -> int:
    return sum(size for name, size in found.items() if wanted(name))


def test_a_step_of_llama_reads_its_products_and_a_row_of_each_table() -> None:
    # 4 layers of hidden 64, inner 96, 4 heads and 2 KV heads of 64; a vocabulary of 256.
    attention = 64 * (4 + 2 + 2 + 4) * 64
    matrices = 4 * (attention + 3 * 64 * 96) + 256 * 64
    norms = 4 * 2 * 64 + 64
    # A row of the embedding and one of cosines and sines, each of 64.
    for batch_size in (1, 8):
        found = step_weight_bytes(float32(MODEL), batch_size)
        assert found == 4 * (matrices + norms + batch_size * (64 + 64))
        # The file's bfloat16 matrices, kept.
        found = step_weight_bytes(plan_for(MODEL), batch_size)
        assert found == 2 * (matrices + batch_size * 64) + 4 * (norms + batch_size * 64)


def test_a_tied_table_is_read_whole_once() -> None:
    found = sizes("tiny_qwen2")
    assert "lm_head.weight" not in found
    row = plan_for("model=tiny_qwen2").settings.rotary_dim
    assert step_weight_bytes(float32("model=tiny_qwen2"), 3) == 4 * (sum(found.values()) + 3 * row)
    # The first stage looks up rows of the table, and each has rotations of its own.
    hidden = plan_for("model=tiny_qwen2").settings.hidden_size
    for overrides in (SHARED_TABLE, SHARED_TABLE[:2]):
        wanted = sum(found.values()) + 3 * (hidden + 2 * row)
        assert step_weight_bytes(float32(*overrides), 3) == 4 * wanted


def test_learned_positions_are_looked_up() -> None:
    found = sizes("tiny_gpt2")
    hidden = plan_for("model=tiny_gpt2").settings.hidden_size
    whole = total(found, lambda name: "wpe" not in name and not name.endswith(".attn.bias"))
    assert step_weight_bytes(float32("model=tiny_gpt2"), 2) == 4 * (whole + 2 * hidden)


@pytest.mark.parametrize("deployment", ["cpu", "ep2"])
def test_experts_are_read_as_many_as_can_be_chosen(deployment: str) -> None:
    plan = float32("model=tiny_olmoe", f"deployment={deployment}")
    found, experts = sizes("tiny_olmoe"), plan.settings.experts
    routed = total(found, lambda name: ".experts." in name)
    rest = total(found, lambda name: ".experts." not in name and "embed_tokens" not in name)
    row = plan.settings.hidden_size + plan.settings.rotary_dim
    # Both devices of the replica compute all but the experts, and one of them projects.
    head = found["lm_head.weight"]
    copies = len(plan.devices)
    for batch_size in (1, 2, 64):
        chosen = min(batch_size * experts.top_k, experts.num_experts)
        values = routed * chosen // experts.num_experts + head
        values += copies * (rest - head + batch_size * row)
        assert step_weight_bytes(plan, batch_size) == 4 * values


def test_each_replica_that_has_a_sequence_reads_its_own() -> None:
    one = step_weight_bytes(float32(MODEL), 1)
    replicas = float32(MODEL, "deployment=dp2")
    assert [step_weight_bytes(replicas, size) for size in (1, 2)] == [one, 2 * one]
    # Norms are on both devices; so are rotations. The vocabulary is divided.
    tensor = step_weight_bytes(float32(MODEL, "deployment=tp2"), 1)
    assert tensor == one + 4 * (9 * 64 + 2 * 64)


def test_adapters_and_encoders_are_not_counted() -> None:
    assert step_weight_bytes(plan_for(*LORA), 1) == step_weight_bytes(plan_for(MODEL), 1)
    with_images = plan_for("model=tiny_idefics3", "deployment=vision")
    alone = plan_for("model=tiny_idefics3")
    assert step_weight_bytes(with_images, 1) == step_weight_bytes(alone, 1)


def test_bandwidth_is_that_of_a_machine() -> None:
    assert 1e9 < read_bandwidth() < 1e13


def test_a_process_knows_how_old_it_is() -> None:
    code = (
        "import time; time.sleep(0.5); from builder.processes import seconds_since_start as s; "
        "print(s())"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env=dict(os.environ)
    )
    # The system counts in hundredths.
    assert 0.5 <= float(done.stdout) <= time.monotonic() - began + 0.02


def test_stopped_bench_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose((*BENCH, "task.batch_sizes=[1,4]", "task.cold_compile=true"))
    interrupts = Interrupts(on_exit=lambda: None)
    folder = JobFolder(tmp_path)
    job = Job(config, folder, interrupts, Shared(several=False), console())
    job.seconds["compile"] = 1.0
    monkeypatch.setattr(Job, "compile", lambda *_: compiled_for(MODEL))
    measured = bench._Bench._cell

    def stopped_after(self: bench._Bench, batch_size: int, context: int) -> object:
        found = measured(self, batch_size, context)
        interrupts._requested.set()
        return found

    monkeypatch.setattr(bench._Bench, "_cell", stopped_after)
    with pytest.raises(InterruptedJob):
        bench.run(job)
    metrics = read_json(tmp_path / "metrics.json")
    assert metrics is not None
    assert [(cell["batch_size"], cell["repeats"]) for cell in metrics["cells"]] == [(1, 3)]
    assert metrics["compile_cold_s"] is None


def test_compiling_apart_finds_the_cache_it_is_given() -> None:
    from builder.cold import compile_apart
    from builder.compile import compile_cache_folder

    compiled_alone(MODEL)
    found = compile_apart(plan_for(MODEL), compile_cache_folder().parents[2], lambda: False)
    assert 0 < found.seconds < 120
    assert found.cache_hit


def test_compiling_apart_is_stopped(tmp_path: Path) -> None:
    from builder.cold import compile_apart

    with pytest.raises(InterruptedJob):
        compile_apart(plan_for(MODEL), tmp_path, lambda: True)


def test_page_shows_what_was_measured() -> None:
    cell = {
        "batch_size": 4,
        "context": 99,
        "ttft_ms": 12.34,
        "decode_tok_s": 321.0,
        "step_ms": {"p50": 5.67, "p99": 8.91},
    }
    none = {**cell, "batch_size": 7, "decode_tok_s": None, "step_ms": {"p50": None, "p99": None}}
    metrics = json.loads(json.dumps({"cells": [cell, none], "generated_tok_s": 300.0}))
    facts = {"job": "0", "model": "tiny_llama", "deployment": "cpu", "task": "bench"}
    page = as_html([JobRow(**facts, overrides=(), status="ok", metrics=metrics)], "A sweep")
    for words in ("batch 4, context 99", "5.67 ms", "p99 8.91 ms", "321 tokens/s", "batch 7"):
        assert words in page
