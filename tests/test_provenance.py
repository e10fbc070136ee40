"""What set each value: files and their lines, overrides, and the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_command import read, rolecall

from builder.compose import compose, register_schema
from builder.loading import Composer, Request, folders
from builder.origin import CompositionError
from builder.provenance import provenance, with_provenance
from builder.steps import SomeRefused
from models.errors import ConfigError

FILES = {
    "deployment/mine.yaml": """\
defaults:
  - tp2
  - fragment
  - _self_
  - override /devices@devices: cpu_x4

name: mine
batch:
  # Two at once.
  max_batch_size: 2
kv: {page_size: 64, num_pages: 9}
lora:
  adapters:
    a: folders/a
""",
    # What comes before _self_ may be set again; what comes after it stays.
    "deployment/fragment.yaml": "max_length: 77\nbatch: {max_batch_size: 3}\n",
    "deployment/first.yaml": "defaults: [_self_, base]\nname: first\nmax_length: 9\n",
    "deployment/anchors.yaml": """\
defaults: [base, _self_]
name: anchors
batch: &sizes
  max_batch_size: 5
kv:
  page_size: 16
parallel:
  <<: {tensor: 2, data: 1}
  data: 1
""",
    "experiment/wide.yaml": """\
# @package _global_
defaults:
  # What is said to Hydra is no value of ours.
  - override /hydra/launcher: basic
hydra: {verbose: false}
deployment:
  batch: {max_batch_size: 16}
model: {name: renamed}
""",
}

BY_DEFAULT = (None, "default")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of configurations beside ours, as a person in the folder above types it."""
    for name, text in FILES.items():
        file = tmp_path / "my_conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    return "my_conf"


def request_for(words: tuple[str, ...], own: str | None) -> Request:
    register_schema()
    return Request(Composer(folders(own)), words)


def set_by(words: tuple[str, ...], own: str | None = None) -> dict[str, tuple[Any, str]]:
    settings = provenance(compose(words, own), request_for(words, own))
    return {key: (setting.value, str(setting.origin)) for key, setting in settings.items()}


CASES: dict[str, tuple[tuple[str, ...], dict[str, tuple[Any, str]]]] = {
    "ours": (
        ("model=local", "model.source=there", "deployment=tp2"),
        {
            "model.name": ("local", "conf/model/local.yaml:6"),
            "model.source": ("there", "model.source=there"),
            "model.revision": BY_DEFAULT,
            "deployment.name": ("tp2", "conf/deployment/tp2.yaml:7"),
            "deployment.devices.count": (2, "conf/devices/cpu_x2.yaml:7"),
            "deployment.parallel.tensor": (2, "conf/deployment/tp2.yaml:8"),
            "deployment.parallel.data": (1, "default"),
            "deployment.lora.adapters": ({}, "default"),
            "task.max_new_tokens": (64, "default"),
        },
    ),
    "a file of one's own, on top of others": (
        ("deployment=mine",),
        {
            "deployment.name": ("mine", "my_conf/deployment/mine.yaml:7"),
            "deployment.parallel.tensor": (2, "conf/deployment/tp2.yaml:8"),
            "deployment.devices.count": (4, "conf/devices/cpu_x4.yaml:7"),
            "deployment.batch.max_batch_size": (2, "my_conf/deployment/mine.yaml:10"),
            "deployment.max_length": (77, "my_conf/deployment/fragment.yaml:1"),
            "deployment.kv.num_pages": (9, "my_conf/deployment/mine.yaml:11"),
            "deployment.lora.adapters.a": ("folders/a", "my_conf/deployment/mine.yaml:14"),
        },
    ),
    "what comes after a file's own keys": (
        ("deployment=first",),
        {
            "deployment.name": ("base", "conf/deployment/base.yaml:6"),
            # The schema that base starts with sets it again.
            "deployment.max_length": BY_DEFAULT,
        },
    ),
    "anchors and merged keys": (
        ("deployment=anchors",),
        {
            "deployment.batch.max_batch_size": (5, "my_conf/deployment/anchors.yaml:4"),
            "deployment.parallel.tensor": (2, "my_conf/deployment/anchors.yaml:8"),
            "deployment.parallel.data": (1, "my_conf/deployment/anchors.yaml:9"),
        },
    ),
    "packages that files name": (
        ("+lora=rank16", "experiment=wide", "deployment=mine"),
        {
            "deployment.lora.max_rank": (16, "conf/lora/rank16.yaml:4"),
            "deployment.batch.max_batch_size": (16, "my_conf/experiment/wide.yaml:7"),
            "model.name": ("renamed", "my_conf/experiment/wide.yaml:8"),
        },
    ),
    "overrides": (
        (
            "deployment=mine",
            "deployment.kv={page_size: 16}",
            "++deployment.name=other",
            "deployment.max_length=40",
            "++deployment.batch.max_batch_size=6",
            "~deployment.lora.adapters.a",
            "+deployment.lora.adapters={b: x, c: y}",
            "deployment.lora.adapters.c=z",
            "deployment.parallel.stage_layers=[1,2]",
            "devices@deployment.devices=cpu_x3",
            "task.sampling.seed=4",
            "task.sampling.seed=5",
        ),
        {
            "deployment.kv.page_size": (16, "deployment.kv={page_size: 16}"),
            "deployment.kv.num_pages": (9, "my_conf/deployment/mine.yaml:11"),
            "deployment.name": ("other", "++deployment.name=other"),
            "deployment.max_length": (40, "deployment.max_length=40"),
            "deployment.batch.max_batch_size": (6, "++deployment.batch.max_batch_size=6"),
            "deployment.lora.adapters.b": ("x", "+deployment.lora.adapters={b: x, c: y}"),
            "deployment.lora.adapters.c": ("z", "deployment.lora.adapters.c=z"),
            "deployment.parallel.stage_layers": (
                [1, 2],
                "deployment.parallel.stage_layers=[1,2]",
            ),
            "deployment.devices.count": (3, "conf/devices/cpu_x3.yaml:7"),
            "task.sampling.seed": (5, "task.sampling.seed=5"),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_value_has_what_set_it(name: str, own: str) -> None:
    words, wanted = CASES[name]
    found = set_by(words, own)
    for key, (value, origin) in wanted.items():
        assert found[key] == (value, origin), key
    assert "deployment.lora.adapters.a" not in found or name != "overrides"


TOLD = {
    "a file": (
        "deployment.parallel.tensor: 9 heads do not divide\n  what works: 1",
        "\n  set in conf/deployment/tp2.yaml:8",
    ),
    "an override": (
        "task.prompts[0]: empty",
        "\n  set by task.prompts=[''] on the command line",
    ),
    "a default": ("deployment.kv.page_size: 128 is too small", ""),
    "a default that is the mistake": (
        "deployment.devices.api: missing, and nothing says it",
        "\n  by default: nothing sets it",
    ),
    "several keys": ("deployment.devices: two of four", "\n  set in conf/devices/cpu_x2.yaml:6"),
    "no key": ("device 0 needs 4 GiB", ""),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_later_mistake_says_what_set_its_key(name: str, own: str) -> None:
    message, line = TOLD[name]
    asked = request_for(("deployment=tp2", "task.prompts=['']"), own)
    assert str(with_provenance(ConfigError(message), asked)) == message + line


def test_a_mistake_stays_what_it_is(own: str) -> None:
    asked = request_for(("deployment=tp2",), own)
    refused = with_provenance(SomeRefused("deployment.name: refused"), asked)
    assert isinstance(refused, SomeRefused)
    # This one has said where it is.
    composed = CompositionError("deployment.name: missing")
    assert with_provenance(composed, asked) is composed


def test_plan_shows_what_is_set_and_writes_every_key(own: str, tmp_path: Path) -> None:
    words = ("--config-dir", own, "model=tiny_llama", "deployment=anchors", "task=plan")
    done = rolecall(tmp_path, *words, "devices@deployment.devices=cpu_x2", status=2)
    # Nothing chooses the devices of this one yet.
    assert "did you mean +devices@deployment.devices=cpu_x2?" in done.stderr
    done = rolecall(
        tmp_path, *words, "+devices@deployment.devices=cpu_x2", "deployment.max_length=96"
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["deployment.kv.page_size", "16", "my_conf/deployment/anchors.yaml:6"] in rows
    assert ["deployment.max_length", "96", "deployment.max_length=96"] in rows
    assert not any("deployment.vision" in row for row in rows)
    found = read(tmp_path, "plan.json")["provenance"]
    assert found["deployment.max_length"] == {
        "value": 96,
        "by": "override",
        "file": None,
        "line": None,
        "override": "deployment.max_length=96",
    }
    assert found["deployment.batch.max_batch_size"] == {
        "value": 5,
        "by": "file",
        "file": "my_conf/deployment/anchors.yaml",
        "line": 4,
        "override": None,
    }
    assert found["deployment.vision"] == {
        "value": False,
        "by": "default",
        "file": None,
        "line": None,
        "override": None,
    }
    assert {key.split(".")[0] for key in found} == {"model", "deployment"}
    assert len([key for key in found if key.startswith("model.")]) == 7


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_each_job_of_a_sweep_says_its_own(own: str, tmp_path: Path, launcher: str) -> None:
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    rolecall(
        tmp_path,
        *("-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", f"hydra/launcher={launcher}"),
        *("--config-dir", own, "model=smollm2", "task=plan", "deployment=mine"),
        "deployment.parallel.tensor=2,4",
        status=2,
    )
    for job, tensor in enumerate((2, 4)):
        status = json.loads((tmp_path / "sweep" / str(job) / "status.json").read_text())
        assert status["status"] == "error"
        last = status["error"].splitlines()[-1]
        assert last in (
            f"  set by deployment.parallel.tensor={tensor} on the command line",
            "  set in conf/devices/cpu_x4.yaml:7",
        )


def test_check_says_what_set_each_deployments_key(own: str, tmp_path: Path) -> None:
    names = "task.deployments=[mine,tp2]"
    words = ("--config-dir", own, "model=smollm2", "task=check", names)
    done = rolecall(tmp_path, *words, "deployment.lora.adapters={}", status=1)
    errors = [row["error"] for row in read(tmp_path, "check.json")["results"]]
    assert errors[0].endswith("\n  set in conf/devices/cpu_x4.yaml:7")
    assert errors[1].endswith("\n  set in conf/deployment/tp2.yaml:8")
    assert "set in conf/deployment/tp2.yaml:8" in done.stdout
