"""Compiled graphs are found by everything that they were made from, and by nothing else."""

from __future__ import annotations

import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    DEPLOYMENTS,
    ON_HOST,
    compiled_alone,
    expected,
    greedy_ids,
    one_process,
    plan_for,
    printed_by,
)
from max.engine import CompiledModel, InferenceSession
from test_contract import assert_takes

import models
from builder import graph_cache
from builder.artifact import DESCRIPTION
from builder.build import build
from builder.compile import Compiled, compile_registration, process_session
from builder.report import contract_json
from models.errors import ConfigError
from models.sources import sources_version

MODELS = ("tiny_llama", "tiny_deepseek_v3", "tiny_idefics3", "tiny_qwen3_next")
TWO = ("model=tiny_llama", "deployment=tp2")
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
    printed = printed_by(KEYS, given="\n".join(planned), PYTHONHASHSEED="7")
    assert printed == list(planned.values())


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


@pytest.fixture
def debug() -> Iterator[Any]:
    """MAX's settings of debugging, put back in the end."""
    yield InferenceSession.debug
    InferenceSession.debug.reset()


def test_settings_of_debugging_that_are_in_force_tell_graphs_apart(debug: Any) -> None:
    # A file, modular.cfg, may have set them.
    plan = plan_for("model=tiny_llama")
    before = graph_cache.made_from(plan)
    debug.assert_level = "all"
    assert graph_cache.made_from(plan) != before


def test_where_an_environment_is_does_not_tell_graphs_apart() -> None:
    assert sys.prefix not in graph_cache.made_from(plan_for("model=tiny_llama"))


def test_sources_tell_their_versions_apart(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    shutil.copytree(Path(models.__file__).parent, folder, ignore=shutil.ignore_patterns("*.pyc"))
    assert sources_version(folder) == models.SOURCES_VERSION
    # What an editor leaves is no source.
    (folder / ".#decoder.py").symlink_to(folder / "nowhere")
    assert sources_version(folder) == models.SOURCES_VERSION
    changed = folder / "layers" / "norm.py"
    changed.write_text(changed.read_text() + "\n")
    assert sources_version(folder) != models.SOURCES_VERSION


def test_other_layers_and_other_processors_find_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = plan_for("model=tiny_llama")
    texts = {graph_cache.made_from(plan)}
    monkeypatch.setattr(graph_cache, "SOURCES_VERSION", "0")
    texts.add(graph_cache.made_from(plan))
    described = tmp_path / "cpuinfo"
    described.write_text("model name\t: Another\nflags\t\t: sse2\n")
    monkeypatch.setattr(graph_cache, "PROCESSOR", described)
    graph_cache.processor.cache_clear()
    texts.add(graph_cache.made_from(plan))
    monkeypatch.undo()
    graph_cache.processor.cache_clear()
    assert len(texts) == 3
    assert graph_cache.made_from(plan) in texts


@pytest.mark.parametrize("overrides", [TWO, STAGES])
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
    plan = compiled_alone(*TWO).registration.plan
    folder = graph_cache.kept_in(plan)
    assert folder is not None
    before = (folder / DESCRIPTION).stat()
    with one_process(repr(TWO)):
        graph_cache.keep(plan, {})
    assert (folder / DESCRIPTION).stat() == before


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, where the next graph would be kept."""
    monkeypatch.setenv("MODULAR_CACHE_DIR", str(tmp_path))
    return tmp_path


def _artifacts(compiled: Compiled) -> dict[str, CompiledModel]:
    return {"decoder": compiled.model.compiled_artifacts.artifact("decoder")}


@pytest.mark.parametrize("damage", ["truncated graph", "no description"])
def test_damaged_graphs_are_dropped_and_told(
    damage: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = compiled_alone(*TWO)
    plan = compiled.registration.plan
    graph_cache.keep(plan, _artifacts(compiled))
    assert graph_cache.find(plan) is not None
    (kept,) = (elsewhere / "rolecall" / "graphs").iterdir()
    if damage == "no description":
        (kept / DESCRIPTION).unlink()
    else:
        graph = kept / "graphs_0.mef"
        graph.write_bytes(graph.read_bytes()[:-1000])
    assert graph_cache.find(plan) is None
    assert "are damaged: compiled anew" in capsys.readouterr().err
    assert not kept.exists()
    graph_cache.keep(plan, _artifacts(compiled))
    assert graph_cache.find(plan) is not None


def test_a_cache_that_cannot_be_written_is_told_and_harms_nothing(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = compiled_alone(*TWO)
    plan = compiled.registration.plan
    (elsewhere / "rolecall").write_text("A file where a folder belongs.")
    graph_cache.keep(plan, _artifacts(compiled))
    assert "can't keep compiled graphs: " in capsys.readouterr().err
    assert graph_cache.find(plan) is None


def test_a_graph_that_does_not_fit_the_disk_is_told_and_harms_nothing(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = compiled_alone(*TWO)
    plan = compiled.registration.plan
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        graph_cache.keep(plan, _artifacts(compiled))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "can't keep compiled graphs: " in capsys.readouterr().err
    assert not list((elsewhere / "rolecall" / "graphs").iterdir())


def test_graphs_for_accelerators_and_of_artifacts_are_not_looked_for() -> None:
    for overrides in (["deployment=h100_x1"], ["deployment.artifact=nowhere"]):
        assert graph_cache.find(plan_for("model=tiny_llama", *overrides)) is None
