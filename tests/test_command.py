"""The command: one clear message for each mistake, and the files it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROCESS_LIMIT = 300
TINY = ("model=tiny_llama", "task.prompts=[[5,6,7]]")


def rolecall(tmp_path: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the command with a job folder of the test's own."""
    done = subprocess.run(
        [sys.executable, "-m", "builder", f"hydra.run.dir={tmp_path / 'job'}", *arguments],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        cwd=tmp_path,
        # MAX puts PYTHONEXECUTABLE into a process's environment, behind os.environ.
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def files(tmp_path: Path) -> set[str]:
    job = tmp_path / "job"
    return {path.name for path in job.iterdir()} if job.exists() else set()


def read(tmp_path: Path, name: str) -> dict:
    return json.loads((tmp_path / "job" / name).read_text())


MISTAKES = {
    "unknown key": (
        ["deployment.batch.max_batch_sise=4"],
        "deployment.batch.max_batch_sise: unknown key",
        "did you mean deployment.batch.max_batch_size?",
    ),
    "unknown key in a task": (
        ["task.max_tokens=4"],
        "task.max_tokens: unknown key",
        "max_new_tokens",
    ),
    "unknown choice": (["deployment=cpuu"], "deployment/cpuu", "cpu"),
    "wrong type": (
        ["deployment.batch.max_batch_size=many"],
        "deployment.batch.max_batch_size",
        "could not be converted to Integer",
    ),
    "missing value": (["model=local"], "model.source: missing", "model.source=VALUE"),
    "unknown device kind": (
        ["deployment.devices.kind=tpu"],
        "deployment.devices.kind",
        "cpu, gpu, virtual",
    ),
    "device kind that is not there": (
        ["deployment.devices.kind=gpu"],
        "deployment.devices.kind",
        "deployment.devices.kind=cpu",
    ),
    "checkpoint that does not exist": (
        ["model=local", "model.source=/no/such/folder"],
        "model.source: no such file or folder: /no/such/folder",
        "what works",
    ),
    "prompt longer than max_length": (
        ["deployment.max_length=16", f"task.prompts=[{list(range(3, 40))}]"],
        "37 tokens + 1 to generate exceed max_length 16",
        "deployment.max_length",
    ),
    "empty prompt": (["task.prompts=['']"], "task.prompts[0]: empty", ""),
    "no prompt": (["task.prompts=[]"], "task.prompts: empty", "task.prompts_file"),
    "max_length beyond the model": (
        ["deployment.max_length=9000"],
        "deployment.max_length: 9000",
        "512",
    ),
    "cache too small for one sequence": (
        ["deployment.kv.num_pages=3"],
        "3 pages of 128 tokens hold 384; one sequence of max_length 512 needs 4",
        "deployment.kv.num_pages=4",
    ),
    "feature of later": (["deployment.vision=true"], "deployment.vision: not supported", ""),
    "encoding the host does not compute": (
        ["model.encoding=bfloat16"],
        "model.encoding: bfloat16 is not computed on the CPU",
        "model.encoding=float32",
    ),
    "sampling out of range": (
        ["task.sampling.top_p=2"],
        "task.sampling.top_p: 2.0 is not",
        "above 0",
    ),
    "chat without a template": (
        ["task.chat=true"],
        "task.chat: the checkpoint has no chat template",
        "task.chat=false",
    ),
    "scoring without all logits": (
        ["task=score", "task.texts=[[4,5]]", "deployment.return_logits=last_token"],
        "deployment.return_logits: last_token",
        "deployment.return_logits=all",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_message_and_leaves_only_the_status(tmp_path: Path, name: str) -> None:
    arguments, problem, remedy = MISTAKES[name]
    base = [] if any(a.startswith("model=") for a in arguments) else ["model=tiny_llama"]
    if not any(a.startswith("task") for a in arguments):
        base.append("task.prompts=[[5,6,7]]")
    done = rolecall(tmp_path, *base, *arguments, status=2)
    assert problem in done.stderr
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr
    assert files(tmp_path) <= {"status.json"}
    if files(tmp_path):
        assert read(tmp_path, "status.json")["status"] == "error"
        assert problem in read(tmp_path, "status.json")["error"]


def test_verbose_shows_the_traceback(tmp_path: Path) -> None:
    done = rolecall(tmp_path, "-v", *TINY, "deployment.vision=true", status=2)
    assert "Traceback" in done.stderr
    assert "deployment.vision: not supported" in done.stderr


def test_plan_writes_its_files_without_a_session_and_within_a_second(tmp_path: Path) -> None:
    rolecall(tmp_path, "task=plan")
    fields = read(tmp_path, "contract.json")["fields"]
    assert len(fields) == 16
    assert [field["name"] for field in fields if field["present"]] == [
        "tokens",
        "input_row_offsets",
        "return_n_logits",
        "kv",
    ]
    assert all(field["because"] for field in fields)
    assert read(tmp_path, "plan.json")["settings"]["num_layers"] == 30
    assert read(tmp_path, "status.json")["status"] == "ok"
    # The median of a few, with room for a busy machine; measured alone it is 0.85 s.
    took = []
    for _ in range(5):
        began = time.perf_counter()
        done = rolecall(tmp_path, "task=plan")
        took.append(time.perf_counter() - began)
    assert "16 fields" in done.stdout
    assert sorted(took)[0] < 1.0


def test_plan_imports_no_engine_session_and_no_pipelines() -> None:
    code = (
        "import sys; from builder.compose import compose; from builder.cli import task_runner; "
        "task_runner('plan'); import builder.resolve; "
        "assert 'max.pipelines.lib' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_generate_writes_every_file(tmp_path: Path) -> None:
    done = rolecall(
        tmp_path, "model=tiny_llama", "task.prompts=[[5,6,7],[9]]", "task.max_new_tokens=4"
    )
    assert {"generations.jsonl", "metrics.json", "plan.json", "contract.json", "status.json"} <= (
        files(tmp_path)
    )
    lines = (tmp_path / "job" / "generations.jsonl").read_text().splitlines()
    generations = [json.loads(line) for line in lines]
    assert [generation["prompt_ids"] for generation in generations] == [[5, 6, 7], [9]]
    assert all(len(generation["ids"]) == 4 for generation in generations)
    assert all(generation["finish"] == "length" for generation in generations)
    assert read(tmp_path, "metrics.json")["generated_tokens"] == 8
    assert "4 of 16 fields" in done.stdout


def test_help_is_about_this_tool(tmp_path: Path) -> None:
    done = rolecall(tmp_path, "--help")
    assert "usage: rolecall" in done.stdout
    for choice in ("smollm2", "tiny_llama", "generate", "score"):
        assert choice in done.stdout
