"""Compiled graphs as files: what they were compiled for is what they are loaded for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import compiled_alone, expected, greedy_ids, plan_for
from test_command import read, rolecall
from test_contract import assert_takes

from builder.artifact import DESCRIPTION, check_artifact, export
from builder.build import build
from builder.compile import compile_registration, process_session
from builder.report import contract_json
from models.errors import ConfigError

MODEL, DEPLOYMENT = "model=tiny_llama", "deployment=tp2"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of two devices, as files."""
    compiled = compiled_alone(MODEL, DEPLOYMENT)
    artifacts = compiled.model.compiled_artifacts
    roles = compiled.model.roles
    folder = tmp_path_factory.mktemp("compiled") / "artifact"
    plan = compiled.registration.plan
    export(plan, {role: artifacts.artifact(role) for role in roles}, folder)
    return folder


def test_loaded_graphs_take_the_contract_and_give_the_same_ids(artifact: Path) -> None:
    plan = plan_for(MODEL, DEPLOYMENT, f"deployment.artifact={artifact}")
    loaded = compile_registration(build(plan), process_session())
    leaves = [leaf for field in contract_json(plan)["fields"] for leaf in field["leaves"]]
    assert_takes(loaded.model.model, leaves)
    values = expected("tiny_llama")
    prompts = [values[f"prompt_{i}"] for i in range(4)]
    assert greedy_ids(loaded, prompts, 16) == [values[f"greedy_{i}"].tolist() for i in range(4)]


def test_artifact_says_what_it_was_compiled_for(artifact: Path) -> None:
    description = json.loads((artifact / DESCRIPTION).read_text())
    assert description["roles"] == {"decoder": "graphs_0.mef"}
    assert description["deployment"]["parallel"]["tensor"] == 2
    assert [leaf["path"] for leaf in description["inputs"]["decoder"][0]][:2] == [
        "tokens",
        "input_row_offsets",
    ]
    assert not list(artifact.parent.glob("tmp*"))


OTHERS = {
    "devices": (
        [MODEL, "deployment=tp4"],
        "deployment.devices.count is 2 there, 4 here",
    ),
    "model": (["model=tiny_qwen3", DEPLOYMENT], "settings.family is llama there, qwen3 here"),
    "length": (
        [MODEL, DEPLOYMENT, "deployment.max_length=256"],
        "deployment.max_length is 512 there, 256 here",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_graphs_of_something_else_are_refused(artifact: Path, name: str) -> None:
    overrides, message = OTHERS[name]
    with pytest.raises(ConfigError) as caught:
        check_artifact(plan_for(*overrides, f"deployment.artifact={artifact}"))
    assert message in str(caught.value)


def _changed(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / DESCRIPTION
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "version": (_changed(max="26.6.0"), "max is 26.6.0 there, "),
    "kernels": (_changed(kernels="0"), "kernels is 0 there, "),
    "target": (_changed(target="cuda:sm_90a"), "target is cuda:sm_90a there, cpu here"),
    "no description": (lambda folder: (folder / DESCRIPTION).unlink(), f"has no {DESCRIPTION}"),
    "no graph": (lambda folder: (folder / "graphs_0.mef").unlink(), "has no graphs_0.mef"),
    "no JSON": (lambda folder: (folder / DESCRIPTION).write_text("{") and None, "is damaged"),
    "no roles": (lambda folder: (folder / DESCRIPTION).write_text("{}") and None, "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_other_versions_and_damaged_artifacts_are_refused(
    artifact: Path, tmp_path: Path, name: str
) -> None:
    change, message = DAMAGED[name]
    folder = tmp_path / "artifact"
    shutil.copytree(artifact, folder)
    change(folder)
    with pytest.raises(ConfigError) as caught:
        check_artifact(plan_for(MODEL, DEPLOYMENT, f"deployment.artifact={folder}"))
    assert message in str(caught.value)


def test_command_exports_and_uses_an_artifact(tmp_path: Path) -> None:
    compiled_alone(MODEL, DEPLOYMENT)
    done = rolecall(tmp_path, MODEL, DEPLOYMENT, "task=compile")
    assert "loaded back" in done.stdout
    kept = tmp_path / "kept"
    shutil.move(tmp_path / "job" / "artifact", kept)
    prompt = ["task.prompts=[[5,6,7]]", "task.max_new_tokens=4", "task.ignore_eos=true"]
    used = rolecall(tmp_path, MODEL, DEPLOYMENT, f"deployment.artifact={kept}", *prompt)
    assert f"loading tiny_llama for tp2 from {kept}" in used.stderr
    assert "compiling" not in used.stderr
    assert "not asked: loaded from the artifact" in used.stdout
    row = json.loads((tmp_path / "job" / "generations.jsonl").read_text())
    assert [row["ids"]] == greedy_ids(compiled_alone(MODEL, DEPLOYMENT), [[5, 6, 7]], 4)


def test_command_refuses_an_artifact_before_anything_is_built(
    artifact: Path, tmp_path: Path
) -> None:
    rolecall(tmp_path, MODEL, DEPLOYMENT, f"deployment.artifact={artifact}", "task=plan")
    other = (MODEL, "deployment=tp4", f"deployment.artifact={artifact}")
    for task in ("task=plan", "task.prompts=[[5,6,7]]", "task=verify"):
        refused = rolecall(tmp_path, *other, task, status=2)
        assert refused.stderr.startswith(f"error: deployment.artifact: {artifact} was compiled for")
        assert read(tmp_path, "status.json")["status"] == "error"


def test_artifact_that_is_to_be_made_anew_is_not_looked_at(tmp_path: Path) -> None:
    compiled_alone(MODEL, DEPLOYMENT)
    rolecall(tmp_path, MODEL, DEPLOYMENT, "task=compile", "deployment.artifact=nowhere")
    assert (tmp_path / "job" / "artifact" / DESCRIPTION).is_file()
