"""What has to be seen on a machine with accelerators, in one go: ``make gpu-check``.

Each deployment that this machine has accelerators for computes what the decoder of the CPU, which
is held against Hugging Face, computes in float32. Models without weights get random ones. What each
check measured is in ``outputs/gpu_check``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import REFERENCE, plan_for
from max.driver import Accelerator, accelerator_count
from safetensors.numpy import save_file
from test_accelerators import GOLDEN
from test_command import rolecall

from builder.accelerators import KNOWN, MIB
from models.weights import FromCheckpoint, declared_weights, expected_shapes

OUTPUTS = REFERENCE.parent.parent / "outputs" / "gpu_check"
COMPILE_LIMIT = 3000


def here() -> list[str]:
    """The accelerators of this machine, as overrides."""
    device = Accelerator(0)
    total = int(device.stats["total_memory"])
    known = [
        name
        for name, accelerator in KNOWN.items()
        if accelerator.arch == device.architecture_name
        and abs(accelerator.memory - total) < 2048 * MIB
    ]
    facts = {"kind": "gpu", "accelerator": known[0] if known else "null"}
    if not known:
        memory = f"{total / 2**30:.1f}"
        facts |= {"api": device.api, "arch": device.architecture_name, "memory_gib": memory}
    return [f"deployment.devices.{key}={value}" for key, value in facts.items()]


def random_checkpoint(folder: Path, model: str) -> None:
    """Writes a model of tests/reference that has no weights with random ones.

    Args:
        folder: Where to.
        model: The model's name.
    """
    from models.decoder import CausalDecoder

    folder.mkdir(parents=True)
    shutil.copy(REFERENCE / model / "config.json", folder)
    plan = plan_for(f"model={model}")
    weights = declared_weights(CausalDecoder(plan.stages[0].config)).values()
    generator = np.random.default_rng(0)
    tensors = {}
    for name, shape in expected_shapes(
        [weight for weight in weights if isinstance(weight.source, FromCheckpoint)]
    ).items():
        scale = 0.02 if len(shape) == 1 else shape[-1] ** -0.5
        values = (scale * generator.standard_normal(shape)).astype(np.float32)
        if "norm" in name:
            values += 1
        tensors[name if name.startswith("lm_head") else f"model.{name}"] = values
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", autouse=True)
def _machine() -> None:
    assert accelerator_count() > 0, "this machine has no accelerator that MAX finds"


@pytest.mark.parametrize("deployment", GOLDEN)
def test_deployment_computes_what_the_cpu_computes(deployment: str, tmp_path: Path) -> None:
    model, _ = GOLDEN[deployment]
    name = model.removeprefix("model=")
    needed = plan_for(model, f"deployment={deployment}").deployment.devices.count
    if needed > accelerator_count():
        pytest.skip(f"{needed} accelerators, this machine has {accelerator_count()}")
    if "sm_90" in Accelerator(0).architecture_name and deployment.startswith("b200"):
        pytest.skip("MAX 26.7 can't compile experts and adapters for sm_90 (docs/gpu.md)")
    random_checkpoint(tmp_path / name, name)
    source = [f"model.source={tmp_path / name}", f"model.name={name}"]
    arguments = ["model=local", *source, f"deployment={deployment}", *here(), "task=verify"]
    try:
        done = rolecall(tmp_path, *arguments, timeout=COMPILE_LIMIT)
    finally:
        keep(tmp_path / "job", deployment)
    assert "pass" in done.stdout


def test_smollm2_answers(tmp_path: Path) -> None:
    wanted = json.loads((REFERENCE / "smollm2.json").read_text())["greedy"][1]
    try:
        rolecall(tmp_path, "deployment=h100_x1", *here(), timeout=COMPILE_LIMIT)
    finally:
        keep(tmp_path / "job", "smollm2")
    row = json.loads((tmp_path / "job" / "generations.jsonl").read_text())
    assert row["prompt_ids"] == wanted["prompt_ids"]
    # In bfloat16 a later token may be another.
    assert row["ids"][:4] == wanted["continuation_ids"][:4]


def test_exported_graphs_are_loaded_back(tmp_path: Path) -> None:
    try:
        arguments = ["deployment=h100_x1", *here(), "task=compile"]
        done = rolecall(tmp_path, *arguments, timeout=COMPILE_LIMIT)
    finally:
        keep(tmp_path / "job", "compile")
    assert "loaded back" in done.stdout


def keep(job: Path, name: str) -> None:
    """Keeps what a job wrote, its graphs apart."""
    shutil.rmtree(OUTPUTS / name, ignore_errors=True)
    if job.exists():
        shutil.copytree(job, OUTPUTS / name, ignore=shutil.ignore_patterns("*.mef"))
