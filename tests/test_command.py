"""The command: one clear message for each mistake, and the files it leaves."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REFERENCE

from builder.compose import compose
from builder.schema import TASKS
from builder.sources import fetch

PROCESS_LIMIT = 300
TINY = ("model=tiny_llama", "task.prompts=[[5,6,7]]")


def rolecall(
    tmp_path: Path,
    *arguments: str,
    status: int = 0,
    timeout: float = PROCESS_LIMIT,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs the command with a job folder of the test's own."""
    done = subprocess.run(
        [sys.executable, "-m", "builder", f"hydra.run.dir={tmp_path / 'job'}", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=tmp_path,
        # MAX puts PYTHONEXECUTABLE into a process's environment, behind os.environ.
        env={**os.environ, **environment},
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
    "unknown choice": (
        ["deployment=cpuu"],
        "deployment=cpuu: no such choice",
        "did you mean deployment=cpu?",
    ),
    "wrong type": (
        ["deployment.batch.max_batch_size=many"],
        "deployment.batch.max_batch_size",
        "many is not a whole number",
    ),
    "missing value": (["model=local"], "model.source: missing", "model.source=VALUE"),
    "unknown device kind": (
        ["deployment.devices.kind=tpu"],
        "deployment.devices.kind",
        "cpu, gpu, virtual",
    ),
    "devices that are not named": (
        ["deployment.devices.kind=gpu"],
        "deployment.devices.api: missing, and no accelerator is named that says it",
        "deployment.devices.accelerator=a100 or h100",
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
    "images for a model of text": (
        ["deployment.vision=true"],
        "deployment.vision: true, but llama takes text alone",
        "deployment.vision=false",
    ),
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
    "sampling that greedy ignores": (
        ["task.sampling.top_k=5"],
        "task.sampling.top_k: 5 has no effect at temperature 0",
        "task.sampling.temperature=1",
    ),
    "key added to the schema": (
        ["+deployment.page_size=64"],
        "deployment.page_size: unknown key",
        "did you mean deployment.kv.page_size?",
    ),
    "interpolation in a prompt": (
        ["task.prompts=['${HOME}']"],
        "Interpolation key 'HOME' not found",
        "task.prompts_file",
    ),
    "page size that no kernel takes": (
        ["deployment.kv.page_size=96"],
        "deployment.kv.page_size: 96",
        "1, 8, 16, 64, 128, 256",
    ),
    "revision of a folder": (
        ["model.revision=main"],
        "model.revision: only a Hugging Face repository",
        "",
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


def cut(source: Path, target: Path) -> Path:
    target.write_bytes(source.read_bytes()[:-1000])
    return target


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "digest", "architecture", "network"])
def test_unusable_checkpoint_is_refused_before_anything_is_built(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(REFERENCE / "tiny_llama", folder)
    source, more, environment = folder, [], {}
    if kind == "gguf":
        source, problem = cut(fetch(compose([]).model), tmp_path / "cut.gguf"), "is truncated"
    elif kind == "safetensors":
        cut(folder / "model.safetensors", folder / "model.safetensors")
        problem = "is truncated"
    elif kind == "digest":
        source = fetch(compose([]).model)
        more, problem = [f"model.sha256={'0' * 64}"], "has another digest"
    elif kind == "architecture":
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = ["FalconForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config))
        problem = "supported: LlamaForCausalLM"
    else:
        source = "nobody/nothing-here"
        environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")}
        problem = "neither a local path nor in the Hugging Face cache"
    done = rolecall(
        tmp_path, "model=local", f"model.source={source}", *more, status=2, **environment
    )
    assert problem in done.stderr
    assert "compiling" not in done.stderr
    assert "Traceback" not in done.stderr
    assert files(tmp_path) == {"status.json"}


BROKEN_YAML = {
    "syntax": ("name: [unclosed", "", "while parsing"),
    "unknown key": (
        "defaults: [base, _self_]\nname: mine\nbatch: {max_batch_sise: 2}",
        "",
        "did you mean deployment.batch.max_batch_size?",
    ),
    "wrong type": ("defaults: [base, _self_]\nmax_length: long", "", "deployment.max_length"),
    "none": ("defaults: [base, _self_]", "elsewhere", "deployment=elsewhere: no such choice"),
}


@pytest.mark.parametrize("name", BROKEN_YAML)
def test_mistake_in_a_users_file_is_one_message(tmp_path: Path, name: str) -> None:
    contents, choice, wanted = BROKEN_YAML[name]
    folder = tmp_path / "conf" / "deployment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(contents)
    done = rolecall(
        tmp_path,
        *("--config-dir", str(tmp_path / "conf"), "task=plan", "model=tiny_llama"),
        f"deployment={choice or 'mine'}",
        status=2,
    )
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr


def test_a_users_own_deployment_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "conf" / "deployment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("defaults: [tp2, _self_]\nname: mine\nmax_length: 300\n")
    rolecall(
        tmp_path,
        *("--config-dir", str(tmp_path / "conf"), "task=plan", "model=tiny_llama"),
        "deployment=mine",
    )
    plan = read(tmp_path, "plan.json")
    assert (plan["deployment"]["name"], plan["max_length"], len(plan["devices"])) == (
        *("mine", 300),
        2,
    )


def test_a_folder_used_again_keeps_nothing_of_the_job_before(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "generations.jsonl").write_text("{}")
    (tmp_path / "job" / "mine.txt").write_text("kept")
    rolecall(tmp_path, *TINY, "deployment.vision=true", status=2)
    assert files(tmp_path) == {"status.json", "mine.txt"}


def test_square_brackets_in_names_are_printed_as_they_are(tmp_path: Path) -> None:
    done = rolecall(tmp_path, "task=plan", "model=tiny_llama", "model.name='[/x] [bold]'")
    assert "[/x] [bold] on cpu" in done.stdout


def test_sweep_goes_on_after_a_job_that_is_refused(tmp_path: Path) -> None:
    done = rolecall(
        tmp_path,
        *("-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", "task=plan"),
        *("model=smollm2", "deployment=tp2,cpu,tp4"),
        status=2,
    )
    assert "job 0" in done.stderr
    assert "9 heads do not divide over tensor=2" in done.stderr
    assert "9 heads do not divide over tensor=4" in done.stderr
    assert "3 jobs: 2 error, 1 ok" in done.stdout
    status = [
        json.loads((tmp_path / "sweep" / str(job) / "status.json").read_text())["status"]
        for job in range(3)
    ]
    assert status == ["error", "ok", "error"]


def test_verbose_shows_the_traceback(tmp_path: Path) -> None:
    done = rolecall(tmp_path, "-v", *TINY, "deployment.vision=true", status=2)
    assert "Traceback" in done.stderr
    assert "deployment.vision: true, but llama takes text alone" in done.stderr


def test_plan_writes_its_files_without_a_session_and_at_once(tmp_path: Path) -> None:
    done = rolecall(tmp_path, "task=plan")
    assert "16 fields" in done.stdout
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
    # Beside another test that compiles, only the processor's time says whether it got slower, and
    # that is the machine's: what MAX's graphs take to import is 0.5 to 1.2 s, and a plan 1.7 times
    # that. Importing MAX's pipelines would add as much again, twice.
    program = [sys.executable, "-c", "import max.graph, max.nn.kv_cache, hydra, gguf"]
    importing, planning = [], []
    for _ in range(5):
        importing.append(processor_seconds(lambda: subprocess.run(program, check=True)))
        planning.append(processor_seconds(lambda: rolecall(tmp_path, "task=plan")))
    assert min(planning) < 2.5 * min(importing)


def processor_seconds(run: Callable[[], object]) -> float:
    """The processor's time of what runs in processes of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_plan_imports_no_engine_session_and_no_pipelines() -> None:
    code = (
        "import sys, builder.cli; from builder.tasks import task_runner; task_runner('plan'); "
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
    assert done.stdout.endswith("\nfiles: job\n")


def test_refused_prompt_changes_nothing_of_the_others(tmp_path: Path) -> None:
    def rows(first: str, status: int) -> list[dict]:
        prompts = f"task.prompts=[{first},[5,6,7],[9],[9]]"
        sampled = ("task.max_new_tokens=6", "task.sampling.temperature=1")
        done = rolecall(tmp_path, TINY[0], prompts, *sampled, status=status)
        printed.append(sorted(line[:5] for line in done.stdout.splitlines() if line[:1] == "["))
        return [json.loads(line) for line in (tmp_path / "job" / "generations.jsonl").open()]

    printed: list[list[str]] = []
    computed = rows("[4],[4]", status=0)
    found = rows("[],{prompt: [4], adapter: mine, images: [a.png]}", status=2)
    assert printed == [[f"[{place}/5]" for place in range(first, 6)] for first in (1, 3)]
    assert [row["finish"] for row in found] == ["error", "error", "length", "length", "length"]
    assert [row["ids"] for row in found[2:]] == [row["ids"] for row in computed[2:]]
    # The same prompt twice, with a generator of its own each time.
    assert found[3]["ids"] != found[4]["ids"]
    assert {tuple(row) for row in found} == {tuple(computed[0])}
    assert [(row["adapter"], row["images"]) for row in found[:3]] == [
        (None, []),
        ("mine", ["a.png"]),
        (None, []),
    ]


def test_last_line_says_where_the_files_are(tmp_path: Path) -> None:
    for task in (["plan"], ["diff", "task.against=tp2"], ["check", "deployment=cpu"]):
        done = rolecall(tmp_path, TINY[0], *(f"task={task[0]}", *task[1:]))
        assert done.stdout.splitlines()[-1] == "files: job"
    elsewhere = tmp_path / ("elsewhere" * 20)
    done = rolecall(tmp_path, TINY[0], "task=plan", f"hydra.run.dir={elsewhere}")
    assert done.stdout.splitlines()[-1] == f"files: {elsewhere.name}"
    refused = rolecall(tmp_path, TINY[0], "task=plan", "deployment.vision=true", status=2)
    assert not refused.stdout
    # One that fails has written why.
    failed = rolecall(tmp_path, TINY[0], "task=check", "task.deployments=[vision_tp2]", status=1)
    assert failed.stdout.splitlines()[-1] == "files: job"


def test_help_is_about_this_tool(tmp_path: Path) -> None:
    mine = tmp_path / "conf" / "deployment" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("defaults: [base, _self_]\nname: mine\n")
    done = rolecall(tmp_path, "--config-dir", str(tmp_path / "conf"), "--help")
    assert "usage: rolecall" in done.stdout
    groups = dict(re.findall(r"^  (\w+)= +([^=]+,[^=]+)$", done.stdout, re.M))
    choices = {group: names.split() for group, names in groups.items()}
    assert "mine," in choices["deployment"]
    assert "tiny_llama," in choices["model"]
    for task in TASKS:
        assert re.search(rf"^  task={task} +[A-Z].*\.?$", done.stdout, re.M)
    assert "schema" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_completion_gives_choices_and_keys(tmp_path: Path) -> None:
    def completed(line: str) -> list[str]:
        facts = {"COMP_LINE": line, "COMP_POINT": str(len(line))}
        return rolecall(tmp_path, "--shell-completion", "query=bash", **facts).stdout.split()

    assert completed("rolecall task=ver") == ["task=verify"]
    assert completed("rolecall deployment=tp") == ["deployment=tp2", "deployment=tp4"]
    assert completed("rolecall task.max_new") == ["task.max_new_tokens="]
    script = rolecall(tmp_path, "--shell-completion", "install=bash").stdout
    assert "complete -o nospace -o default -F hydra_bash_completion" in script
