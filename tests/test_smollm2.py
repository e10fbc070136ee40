"""The real checkpoint: SmolLM2-135M-Instruct gives the ids that Hugging Face transformers gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REFERENCE, compiled_for, greedy_ids

SMOLLM2 = json.loads((REFERENCE / "smollm2.json").read_text())


@pytest.mark.parametrize("case", SMOLLM2["greedy"], ids=["text", "chat"])
def test_sixty_four_greedy_ids_equal_hugging_faces(case: dict) -> None:
    (found,) = greedy_ids(compiled_for(), [case["prompt_ids"]], 64)
    assert found == case["continuation_ids"]


def test_both_prompts_in_one_batch_give_the_same() -> None:
    found = greedy_ids(compiled_for(), [case["prompt_ids"] for case in SMOLLM2["greedy"]], 64)
    assert found == [case["continuation_ids"] for case in SMOLLM2["greedy"]]


def test_command_answers_in_english(tmp_path: Path) -> None:
    compiled_for()  # so that the command finds the graph in the cache
    done = _start(tmp_path, "task.max_new_tokens=64")
    output, errors = done.communicate(timeout=300)
    assert done.returncode == 0, errors
    (line,) = (tmp_path / "job" / "generations.jsonl").read_text().splitlines()
    generation = json.loads(line)
    wanted = SMOLLM2["greedy"][1]["continuation_ids"]
    # The chat prompt of the defaults is the second reference, up to its stop token.
    assert generation["prompt_ids"] == SMOLLM2["greedy"][1]["prompt_ids"]
    assert generation["ids"] == wanted[: wanted.index(2) + 1]
    assert generation["finish"] == "stop"
    assert generation["text"].startswith("A KV cache is a type of cache that")
    assert generation["text"] in output
    assert "compile cache   hit" in output


def test_interrupted_run_ends_soon_and_keeps_what_it_has(tmp_path: Path) -> None:
    compiled_for()
    started = _start(
        tmp_path, "task.max_new_tokens=1900", "task.ignore_eos=true", "task.chat=false"
    )
    assert started.stdout is not None
    # The first text on standard output is the first token.
    assert started.stdout.read(1)
    time.sleep(1)
    began = time.perf_counter()
    started.send_signal(signal.SIGINT)
    started.stdout.read()
    assert started.wait(timeout=30) == 130
    assert time.perf_counter() - began < 2
    assert json.loads((tmp_path / "job" / "status.json").read_text())["status"] == "interrupted"
    (line,) = (tmp_path / "job" / "generations.jsonl").read_text().splitlines()
    generation = json.loads(line)
    assert generation["finish"] == "interrupted"
    assert 1 <= len(generation["ids"]) < 1900
    assert generation["text"]


def test_interrupt_while_compiling_ends_at_once(tmp_path: Path) -> None:
    started = _start(
        tmp_path,
        "model=tiny_llama",
        "task.prompts=[[5]]",
        environment={"MODULAR_CACHE_DIR": str(tmp_path / "cold")},
    )
    assert started.stderr is not None
    while "compiling" not in started.stderr.readline():
        pass
    time.sleep(2)
    began = time.perf_counter()
    started.send_signal(signal.SIGINT)
    assert started.wait(timeout=30) == 130
    assert time.perf_counter() - began < 2
    assert json.loads((tmp_path / "job" / "status.json").read_text())["status"] == "interrupted"


def _start(
    tmp_path: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "builder", f"hydra.run.dir={tmp_path / 'job'}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # MAX puts PYTHONEXECUTABLE into a process's environment, behind os.environ.
        env={**os.environ, **(environment or {})},
    )
