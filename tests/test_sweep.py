"""Sweeps: one summary, complete whatever launches the jobs and however they end."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import REFERENCE
from test_command import PROCESS_LIMIT, rolecall

from builder.job import JobFolder, read_json
from builder.processes import is_alive, process_facts
from builder.summary import as_markdown, read_rows

LAUNCHERS = {
    "basic": (),
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    "submitit_local": ("hydra/launcher=submitit_local",),
}
DEPLOYMENTS = (
    *("cpu", "cpu_all_logits", "cpu_variable_logits", "tp2", "tp4", "dp2", "dp4"),
    *("pp2", "pp3_uneven", "pp2_tp2", "thirds", "endless"),
)
MODELS = ("tiny_llama", "tiny_qwen3", "mine")
KILLED = MODELS.index("mine") * len(DEPLOYMENTS) + DEPLOYMENTS.index("endless")
"""The job that plans more layers than it has time for."""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A user's folder: a deployment that no model fits, and a job that takes minutes."""
    deployments, models = tmp_path / "conf" / "deployment", tmp_path / "conf" / "model"
    deployments.mkdir(parents=True)
    models.mkdir()
    devices = "defaults: [base, /devices@devices: cpu_x3, _self_]"
    (deployments / "thirds.yaml").write_text(f"{devices}\nname: thirds\nparallel: {{tensor: 3}}\n")
    (deployments / "endless.yaml").write_text("defaults: [cpu, _self_]\nname: endless\n")
    for name in DEPLOYMENTS:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        config = json.loads((REFERENCE / "tiny_qwen2" / "config.json").read_text())
        if name == "endless":
            config["num_hidden_layers"] = 20_000
            config.pop("layer_types", None)
        (tmp_path / "checkpoints" / name / "config.json").write_text(json.dumps(config))
    (models / "mine.yaml").write_text(
        "defaults: [/schema/model@_here_, _self_]\nname: mine\n"
        f"source: {tmp_path}/checkpoints/${{deployment.name}}\n"
    )
    return tmp_path / "conf"


@contextmanager
def sweep(conf: Path, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    # Into files: what it prints is more than a pipe holds.
    with said(folder).open("w") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "builder", "-m", "--config-dir", str(conf)),
                *(f"hydra.sweep.dir={folder}", "task=plan", *arguments),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder.parent,
            env=dict(os.environ),
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said(folder: Path) -> Path:
    """Where a sweep's output goes."""
    return folder.with_suffix(".txt")


def worker_of(job: Path) -> int:
    """The process of a job that has begun."""
    waited = time.monotonic()
    while time.monotonic() - waited < PROCESS_LIMIT:
        begun = read_json(job / JobFolder.BEGUN)
        if begun is not None:
            pid = int(begun["process"]["pid"])
            if "builder.worker" in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
        time.sleep(0.01)
    raise AssertionError(f"{job} did not begin")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_sweep_has_one_table_whatever_launches_it(conf: Path, tmp_path: Path) -> None:
    tables, pages = {}, {}
    for launcher, words in LAUNCHERS.items():
        folder = tmp_path / launcher
        choices = (f"model={','.join(MODELS)}", f"deployment={','.join(DEPLOYMENTS)}")
        with sweep(conf, folder, *choices, *words) as process:
            os.kill(worker_of(folder / str(KILLED)), signal.SIGKILL)
            status = process.wait(PROCESS_LIMIT)
        output = said(folder).read_text()
        # A deployment that is refused is the user's mistake.
        assert status == 2, output
        assert "36 jobs: 32 ok, 3 error, 1 killed" in output
        tables[launcher] = (folder / "summary.csv").read_text()
        pages[launcher] = (folder / "summary.md").read_text()
        assert (folder / "report.html").is_file()
        assert not list(folder.rglob(JobFolder.BEGUN))
    assert set(tables.values()) == {tables["basic"]}
    assert set(pages.values()) == {pages["basic"]}
    found = rows(tmp_path / "basic")
    pairs = [(row["model"], row["deployment"]) for row in found]
    assert pairs == [(model, name) for model in MODELS for name in DEPLOYMENTS]
    assert {row["job"] for row in found if row["status"] == "error"} == {"10", "22", "34"}
    assert all("heads do not divide" in row["error"] for row in found if row["status"] == "error")
    assert found[KILLED]["error"] == "its process ended without a word"
    assert found[3]["fields"].split() == [
        "tokens",
        "input_row_offsets",
        "return_n_logits",
        "signals",
        "kv",
    ]


def test_a_sweep_that_is_killed_is_reported_from_its_files(conf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    with sweep(conf, folder, "model=mine", "deployment=cpu,endless,tp2") as process:
        worker = worker_of(folder / "1")
        process.kill()
    gone = time.monotonic()
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() - gone < 30, "the worker outlives its sweep"
        time.sleep(0.05)
    done = rolecall(tmp_path, "task=report", f"task.folder={folder}")
    assert "3 jobs: 1 ok, 1 killed, 1 not run" in done.stdout
    assert [row["status"] for row in rows(folder)] == ["ok", "killed", "not run"]


def test_a_sweep_that_is_interrupted_says_so(conf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    with sweep(conf, folder, "model=mine", "deployment=cpu,endless,tp2") as process:
        worker_of(folder / "1")
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        # Planning is Python, which stops at the second.
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(PROCESS_LIMIT) == 130
    assert [row["status"] for row in rows(folder)] == ["ok", "interrupted", "not run"]
    assert "3 jobs: 1 ok, 1 interrupted, 1 not run" in said(folder).read_text()


def test_a_verification_that_fails_is_a_row(tmp_path: Path) -> None:
    rolecall(
        tmp_path,
        *("-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", "task=verify", "model=tiny_llama"),
        # With no prompts sharing pages shared the first is its own reference.
        *("deployment=cpu,tp2", "deployment.kv.prefix_caching=false", "task.tolerance=1e-12"),
        status=1,
    )
    plain, halves = rows(tmp_path / "sweep")
    assert (plain["status"], plain["verified"]) == ("ok", "True")
    assert (halves["status"], halves["verified"]) == ("failed", "False")
    assert float(halves["max_abs_diff"]) > 1e-12
    assert "does not compute what it does on cpu" in halves["error"]


def test_report_takes_every_run_below_a_folder(tmp_path: Path) -> None:
    for name in ("a", "b/c"):
        rolecall(
            tmp_path, f"hydra.run.dir={tmp_path / 'runs' / name}", "task=plan", "model=tiny_gpt2"
        )
    rolecall(tmp_path, "task=report", f"task.folder={tmp_path / 'runs'}")
    assert [(row["job"], row["model"]) for row in rows(tmp_path / "runs")] == [
        ("a", "tiny_gpt2"),
        ("b/c", "tiny_gpt2"),
    ]


def test_report_of_nothing_is_a_mistake(tmp_path: Path) -> None:
    done = rolecall(tmp_path, "task=report", f"task.folder={tmp_path}/none", status=2)
    assert "task.folder:" in done.stderr


@pytest.fixture
def ended_process() -> dict:
    code = "import json; from builder.processes import process_facts as f; print(json.dumps(f()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env=dict(os.environ)
    )
    facts: dict = json.loads(done.stdout)
    return facts


def test_a_process_is_known_by_more_than_its_number(ended_process: dict) -> None:
    own = process_facts()
    assert is_alive(own)
    assert not is_alive(ended_process)
    assert not is_alive({**own, "began": ended_process["began"]})
    assert is_alive({**ended_process, "host": "another"})


def test_search_finds_a_deployment_within_the_memory(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    done = rolecall(
        tmp_path,
        *("-m", "experiment=fastest", "model=tiny_llama", f"hydra.sweep.dir={folder}"),
        *("task.new_tokens=4", "deployment.devices.memory_gib=0.01", "hydra.sweeper.n_trials=4"),
        "deployment.batch.max_batch_size=choice(1,2,64)",
        status=2,
    )
    found = rows(folder)
    best = (folder / "optimization_results.yaml").read_text()
    assert len(found) == 4, done.stderr
    refused = [row for row in found if row["status"] == "error"]
    assert refused
    assert all("memory_gib allows 0.0" in row["error"] for row in refused)
    speeds = [float(row["generated_tok_s"]) for row in found if row["status"] == "ok"]
    assert f"best_value: {max(speeds)}" in best


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("launcher", ["basic", "submitit_local"])
def test_a_sweep_that_is_stopped_at_once_begins_no_other_job(
    conf: Path, tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    folder = tmp_path / "sweep"
    choices = ("model=mine", "deployment=endless,cpu,tp2,dp2")
    with sweep(conf, folder, *choices, *LAUNCHERS[launcher]) as process:
        waited = time.monotonic()
        while not (folder / "0" / JobFolder.BEGUN).is_file():
            assert time.monotonic() - waited < PROCESS_LIMIT
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(PROCESS_LIMIT) == 130
    found = [row["status"] for row in rows(folder)]
    if launcher == "basic":
        assert found == ["interrupted", "not run", "not run", "not run"]
    else:
        # All began at once, and any of them may have been waiting for its turn.
        assert found[0] in ("interrupted", "not run")
    assert "Traceback" not in said(folder).read_text()
    time.sleep(3)
    rolecall(tmp_path, "task=report", f"task.folder={folder}")
    assert [row["status"] for row in rows(folder)] == found


def test_a_folder_used_again_has_the_jobs_of_its_last_sweep_alone(
    conf: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    other = folder / "other" / JobFolder.BEGUN
    other.parent.mkdir(parents=True)
    other.write_text(json.dumps({"job": {"num": 0, "sweep": None}, "process": process_facts()}))
    with sweep(conf, folder, "model=mine", "deployment=cpu,thirds,tp2") as process:
        assert process.wait(PROCESS_LIMIT) == 2
    with sweep(conf, folder, "model=mine", "deployment=tp2,cpu", "hydra.job.chdir=true") as process:
        assert process.wait(PROCESS_LIMIT) == 0
    found = [(row["job"], row["deployment"], row["status"]) for row in rows(folder)]
    assert found == [("0", "tp2", "ok"), ("1", "cpu", "ok")]
    # Another run is no job of the sweep, and is left alone.
    assert other.is_file()


@pytest.mark.parametrize(
    ("file", "contents"),
    [
        ("status.json", b'{"status": "o'),
        ("status.json", b"[]"),
        ("status.json", b'{"status": "well"}'),
        ("status.json", b"\xff\xfe"),
        ("job.json", b'{"job": {}, "process": {}}'),
        ("plan.json", b"{}"),
        ("generations.jsonl", b'{"prompt'),
    ],
)
def test_a_run_whose_files_are_damaged_has_a_row(
    tmp_path: Path, file: str, contents: bytes
) -> None:
    run = tmp_path / "run"
    (run / "status.json").parent.mkdir()
    if file != "job.json":
        (run / "status.json").write_text('{"status": "ok", "error": null}')
    (run / file).write_bytes(contents)
    (row,) = read_rows(tmp_path)
    assert row.status == "unreadable"
    assert row.error is not None
    (tmp_path / "summary.md").write_text(as_markdown([row]))


def test_what_looks_like_an_interpolation_may_be_a_prompt(tmp_path: Path) -> None:
    done = rolecall(
        tmp_path,
        *("-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", "task=generate", "model=tiny_llama"),
        *("deployment=cpu,tp2", "task.prompts=['${b}']"),
        status=2,
    )
    assert "UserWarning" not in done.stderr
    assert "2 jobs: 2 error" in done.stdout


def test_a_sweep_of_nothing_is_a_mistake(tmp_path: Path) -> None:
    sweep_dir = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    words = ("-m", sweep_dir, "task=plan", "model=tiny_llama")
    done = rolecall(tmp_path, *words, "deployment=glob(nothing*)", status=2)
    assert done.stderr == "error: the sweep has no job: its choices match nothing\n"
    done = rolecall(tmp_path, *words, "deployment=glob(cpu_all*)")
    assert "1 jobs: 1 ok" in done.stdout
