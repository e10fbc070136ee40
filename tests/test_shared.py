"""What the jobs of one process share: tensors are read once, graphs loaded once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import REFERENCE, one_process, plan_for
from test_command import rolecall

from builder import shared as shared_module
from builder.shared import Shared
from models.checkpoints import SafetensorsCheckpoint, open_checkpoint
from models.checkpoints.kept import KeptTensors

TINY = REFERENCE / "tiny_llama"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the reads of each tensor of a folder."""
    counts: Counter[str] = Counter()
    read = SafetensorsCheckpoint.read

    def counted(self: SafetensorsCheckpoint, name: str, rows: slice = slice(None)) -> np.ndarray:
        counts[name] += 1
        return read(self, name, rows)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", counted)
    return counts


def test_two_deployments_of_a_checkpoint_read_each_tensor_once(reads: Counter[str]) -> None:
    from builder.build import build
    from builder.compile import compile_registration, process_session

    shared = Shared(several=True)
    checkpoint = shared.checkpoint(TINY)
    for name in ("cpu", "tp2", "cpu"):
        overrides = ("model=tiny_llama", f"deployment={name}")
        plan = plan_for(*overrides, checkpoint=checkpoint, keeps=False)
        with one_process(repr((overrides, False))):
            compiled = compile_registration(build(plan), process_session(), shared)
    assert compiled.reused
    assert set(reads) == set(checkpoint.tensors)
    assert set(reads.values()) == {1}


def test_kept_tensors_are_the_checkpoints(reads: Counter[str]) -> None:
    checkpoint = open_checkpoint(TINY)
    kept = KeptTensors(checkpoint, max_bytes=1 << 30)
    for name in checkpoint.tensors:
        whole = kept.read(name)
        np.testing.assert_array_equal(whole, checkpoint.read(name))
        assert np.shares_memory(kept.read(name, slice(1, 3)), whole)


def test_beyond_the_limit_tensors_are_read_again(reads: Counter[str]) -> None:
    checkpoint = open_checkpoint(TINY)
    kept = KeptTensors(checkpoint, max_bytes=0)
    (name, *_) = checkpoint.tensors
    for _ in range(2):
        np.testing.assert_array_equal(kept.read(name, slice(0, 2)), checkpoint.read(name)[:2])
    assert reads[name] == 4


def test_a_checkpoint_whose_files_change_is_opened_anew(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(TINY, folder)
    shared = Shared(several=True)
    before = shared.checkpoint(folder)
    assert shared.checkpoint(folder) is before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 77}))
    assert shared.checkpoint(folder).settings.max_position_embeddings == 77


def test_graphs_used_longest_ago_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "KEPT_PART", 0)
    shared = Shared(several=True)
    checkpoint = shared.checkpoint(TINY)
    plans = [
        plan_for("model=tiny_llama", f"deployment={name}", checkpoint=checkpoint)
        for name in ("cpu", "tp2")
    ]
    for plan in plans:
        shared.keep(plan, graphs=object())
    assert [shared.graphs(plan) is None for plan in plans] == [True, False]


def test_second_of_two_jobs_that_differ_in_the_task_compiles_nothing(tmp_path: Path) -> None:
    rolecall(
        tmp_path,
        *("-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", "task=generate,verify"),
        *("model=tiny_llama", "deployment=cpu", "task.max_new_tokens=2", "task.prompts=[[5,6,7]]"),
    )
    status = json.loads((tmp_path / "sweep" / "1" / "status.json").read_text())
    # The plain one's weights are converted, and so its graph is another.
    deployed, plain = status["compiled"]
    assert deployed == {"deployment": "cpu", "cache_hit": True, "reused": True}
    assert plain["deployment"] == "cpu"
    assert not plain["reused"]
