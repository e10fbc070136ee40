"""Compiled graphs are found by everything that they were made from, and by nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import (
    DEPLOYMENTS,
    ON_HOST,
    compiled_alone,
    expected,
    greedy_ids,
    one_process,
    plan_for,
)
from test_contract import assert_takes

from builder import graph_cache
from builder.artifact import DESCRIPTION
from builder.build import build
from builder.compile import Compiled, compile_registration, process_session
from builder.report import contract_json
from models.errors import ConfigError

MODELS = ("tiny_llama", "tiny_deepseek_v3", "tiny_idefics3", "tiny_qwen3_next")
STAGES = ("model=tiny_llama", "deployment=pp2")

KEYS = """
import sys
from conftest import plan_for
from builder.graph_cache import made_from
for line in sys.stdin:
    print(made_from(plan_for(*line.split())))
"""
"""Says what deployments are made from, in a process of its own."""


@cache
def _planned() -> dict[str, str]:
    """What every host deployment of some models is made from, by its overrides."""
    found = {}
    for deployment in ON_HOST:
        for model in MODELS:
            overrides = (f"model={model}", f"deployment={deployment}")
            try:
                found[" ".join(overrides)] = graph_cache.made_from(plan_for(*overrides))
            except ConfigError:
                # Not every model is served by every deployment.
                continue
    return found


def _again(overrides: tuple[str, ...]) -> Compiled:
    """The deployment as another job of this process would load it."""
    return compile_registration(build(plan_for(*overrides)), process_session())


def test_another_process_finds_what_this_one_made() -> None:
    planned = _planned()
    assert len(planned) > len(DEPLOYMENTS)
    # Sets of strings are in another order there.
    done = subprocess.run(
        [sys.executable, "-c", KEYS],
        input="\n".join(planned),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == list(planned.values())


def test_deployments_that_differ_find_different_graphs() -> None:
    planned = _planned()
    # base is the deployment that the others begin with: the CPU's.
    apart = [text for overrides, text in planned.items() if not overrides.endswith("=base")]
    assert len(set(apart)) == len(apart)


def test_encodings_of_kept_weights_tell_graphs_apart() -> None:
    kept, converted = (
        graph_cache.made_from(plan_for(f"model.encoding={encoding}"))
        for encoding in ("stored", "float32")
    )
    assert kept != converted
    assert "Q4_1" in kept


def test_settings_of_max_in_the_environment_tell_graphs_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_for("model=tiny_llama")
    before = graph_cache.made_from(plan)
    monkeypatch.setenv("MODULAR_CACHE_DIR", "elsewhere")
    assert graph_cache.made_from(plan) == before
    monkeypatch.setenv("MODULAR_MAX_DEBUG_ASSERT_LEVEL", "all")
    assert graph_cache.made_from(plan) != before


def test_other_layers_and_other_processors_find_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = plan_for("model=tiny_llama")
    texts = {graph_cache.made_from(plan)}
    changed = tmp_path / "models"
    changed.mkdir()
    (changed / "decoder.py").write_text("# Other layers.\n")
    monkeypatch.setattr(graph_cache, "SOURCES", changed)
    graph_cache.sources_version.cache_clear()
    texts.add(graph_cache.made_from(plan))
    described = tmp_path / "cpuinfo"
    described.write_text("model name\t: Another\nflags\t\t: sse2\n")
    monkeypatch.setattr(graph_cache, "PROCESSOR", described)
    graph_cache.processor.cache_clear()
    texts.add(graph_cache.made_from(plan))
    monkeypatch.undo()
    graph_cache.sources_version.cache_clear()
    graph_cache.processor.cache_clear()
    assert len(texts) == 3
    assert graph_cache.made_from(plan) in texts


@pytest.mark.parametrize("overrides", [("model=tiny_llama", "deployment=tp2"), STAGES])
def test_found_graphs_take_the_contract_and_give_the_same_ids(overrides: tuple[str, ...]) -> None:
    compiled_alone(*overrides)
    found = _again(overrides)
    assert found.cache_hit
    assert graph_cache.find(found.registration.plan) is not None
    contract = contract_json(found.registration.plan)
    for model, stage in zip(found.model.models, contract["stages"], strict=True):
        assert_takes(model, [leaf for field in stage["fields"] for leaf in field["leaves"]])
    values = expected("tiny_llama")
    prompts = [values[f"prompt_{i}"] for i in range(4)]
    assert greedy_ids(found, prompts, 16) == [values[f"greedy_{i}"].tolist() for i in range(4)]


def test_graphs_that_are_kept_stay_as_they_are() -> None:
    overrides = ("model=tiny_llama", "deployment=tp2")
    compiled = compiled_alone(*overrides)
    plan = compiled.registration.plan
    folder = graph_cache.find(plan)
    assert folder is not None
    before = (folder / DESCRIPTION).stat()
    with one_process(repr(overrides)):
        graph_cache.keep(plan, {})
    assert (folder / DESCRIPTION).stat() == before


def test_a_cache_that_cannot_be_written_is_told_and_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = compiled_alone("model=tiny_llama", "deployment=tp2")
    plan, artifacts = compiled.registration.plan, compiled.model.compiled_artifacts
    (tmp_path / "rolecall").write_text("A file where a folder belongs.")
    monkeypatch.setenv("MODULAR_CACHE_DIR", str(tmp_path))
    graph_cache.keep(plan, {"decoder": artifacts.artifact("decoder")})
    assert "can't keep compiled graphs: " in capsys.readouterr().err
    assert graph_cache.find(plan) is None


def test_graphs_for_accelerators_and_of_artifacts_are_not_looked_for() -> None:
    for overrides in (["deployment=h100_x1"], ["deployment.artifact=nowhere"]):
        assert graph_cache.find(plan_for("model=tiny_llama", *overrides)) is None
