"""LoRA adapters: read as PEFT writes them, routed per request, exchanged without compiling."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    LORA,
    LORA_PARALLEL,
    REFERENCE,
    assert_refused,
    compiled_for,
    expected,
    plan_for,
)
from max import tree
from max.dtype import DType
from max.graph import DeviceRef, TensorType
from safetensors.numpy import load_file, save_file
from test_command import rolecall
from test_contract import assert_every_input_is_used
from test_parallel import LENGTHS, STEPS, TOKENS_PER_STEP, assert_equal

from builder.compare import compare, random_prompts, record
from builder.report import contract_json
from models.checkpoints.peft import open_adapter
from models.errors import ConfigError
from models.lora import routing_of

ADAPTERS = REFERENCE / "tiny_llama_adapters"
MODEL = "model=tiny_llama"
CPU = DeviceRef.CPU()
IN_TURN = ("", "all", "some")


def test_a_batch_of_adapters_and_base_requests_matches_peft() -> None:
    values = expected("tiny_llama")
    wanted: dict[str, Mapping[str, np.ndarray]] = {"": values}
    for name in IN_TURN[1:]:
        with np.load(ADAPTERS / name / "expected.npz") as loaded:
            wanted[name] = dict(loaded)
    # Each prompt with no adapter and with each.
    numbers = [n for n in range(4) for _ in IN_TURN]
    prompts = [values[f"prompt_{n}"].tolist() for n in numbers]
    forced = [[*values[f"forced_{n}"].tolist(), 0] for n in numbers]
    compiled = compiled_for(*LORA)
    _, found = record(compiled, prompts, 6, 64, forced=forced, adapters=IN_TURN)
    for at, (number, rows) in enumerate(zip(numbers, found, strict=True)):
        logits = wanted[IN_TURN[at % 3]][f"logits_{number}"]
        np.testing.assert_allclose(rows, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("overrides", LORA_PARALLEL, ids=lambda o: o[1])
def test_logits_equal_the_plain_deployments(overrides: tuple[str, ...]) -> None:
    prompts = random_prompts(LENGTHS, 256)
    more: dict[str, Any] = {"adapters": IN_TURN}
    ids, wanted = record(compiled_for(*LORA), prompts, STEPS, TOKENS_PER_STEP, **more)
    deployed = compiled_for(*overrides)
    _, found = record(deployed, prompts, STEPS, TOKENS_PER_STEP, forced=ids, **more)
    assert_equal(compare(wanted, found))


def test_adapters_come_and_go_without_compiling() -> None:
    adapters = compiled_for(*LORA).model.adapters
    assert adapters is not None
    prompts = random_prompts((9, 9), 256)
    prompts[1] = prompts[0]

    def rows(name: str) -> np.ndarray:
        _, found = record(compiled_for(*LORA), prompts, 2, 48, adapters=("", name))
        assert np.isfinite(found[1]).all()
        return found[1] - found[0]

    some = rows("some")
    assert np.abs(some).max() > 1e-2
    adapters.unload("some")
    assert np.abs(rows("some")).max() == 0
    adapters.load("again", open_adapter(ADAPTERS / "some"))
    np.testing.assert_array_equal(rows("again"), some)
    adapters.unload("again")
    adapters.load("some", open_adapter(ADAPTERS / "some"))
    with pytest.raises(ConfigError, match="there is an adapter 'some' already"):
        adapters.load("some", open_adapter(ADAPTERS / "some"))


def test_contract_has_routing_then_stacks_of_every_target_slot() -> None:
    (stage,) = plan_for(MODEL, "deployment=lora", "deployment.lora.targets=[v_proj,q_proj]").stages
    assert stage.contract.inputs.lora is not None
    routing, stacks = stage.contract.inputs.lora[:3], stage.contract.inputs.lora[3:]
    assert routing == (
        TensorType(DType.int32, ["lora_groups"], CPU),
        TensorType(DType.uint32, ["lora_grouped_offsets_len"], CPU),
        TensorType(DType.int64, [1], CPU),
    )
    sizes = [[int(dim) for dim in stack.shape] for stack in stacks]
    # q and v of four layers: A [adapters, rank, in], B [adapters, out, rank].
    assert sizes == [[4, 16, 64], [4, 256, 16], [4, 16, 64], [4, 128, 16]] * 4
    assert stage.contract.inputs.constants is None


def test_devices_have_their_part_of_each_stack() -> None:
    (stage,) = plan_for(MODEL, "deployment=lora_tp2", "deployment.lora.targets=[o_proj]").stages
    assert stage.contract.inputs.lora is not None
    stacks = stage.contract.inputs.lora[3:]
    # Two devices, four layers: half the inputs, and every output.
    assert [[int(d) for d in s.shape] for s in stacks] == [[4, 16, 128], [4, 64, 16]] * 8


def test_plan_shows_the_bytes_of_stacks() -> None:
    plan = plan_for(MODEL, "deployment=lora")
    stacks = [
        leaf
        for field in contract_json(plan)["fields"]
        if field["name"] == "lora"
        for leaf in field["leaves"][3:]
    ]
    assert plan.devices[0].lora == sum(leaf["max_bytes"] for leaf in stacks) > 0


@pytest.mark.parametrize("parallel", ["tensor: 2", "data: 2", "pipeline: 2"])
def test_every_input_has_a_use(parallel: str) -> None:
    more = [f"deployment.parallel={{{parallel}}}", "deployment.devices.count=2"]
    assert_every_input_is_used(MODEL, "deployment=lora", *more)


def test_routing_groups_neighbours_and_ends_with_the_last_adapter() -> None:
    routing = routing_of([-1, 2, 2, 0, -1, -1], [5, 1, 3, 2, 4, 1])
    assert routing.ids.tolist() == [-1, 2, 0, -1]
    assert routing.offsets.tolist() == [0, 5, 9, 11, 16]
    assert routing.end.tolist() == [11]
    assert routing_of([-1], [3]).end.tolist() == [0]


def test_rank_stabilized_adapters_are_scaled_by_the_root_of_the_rank() -> None:
    assert open_adapter(ADAPTERS / "all").scale == 12 / 6
    assert open_adapter(ADAPTERS / "some").scale == 8 / 16**0.5


def _change_config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def _change_tensors(
    change_tensors: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file(change_tensors(load_file(file)), file)

    return change


def _renamed(tensors: dict[str, np.ndarray], old: str, new: str) -> dict[str, np.ndarray]:
    return {name.replace(old, new): values for name, values in tensors.items()}


def _without(tensors: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    return {name: values for name, values in tensors.items() if part not in name}


def _cut(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name: np.ascontiguousarray(values[:-1]) if "q_proj.lora_B" in name else values
        for name, values in tensors.items()
    }


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "layer": (
        _change_tensors(lambda t: _renamed(t, "layers.2.", "layers.9.")),
        "adapts layers.9.",
    ),
    "product": (
        _change_tensors(lambda t: _renamed(t, "v_proj", "w_proj")),
        "self_attn.w_proj, which matches no layer",
    ),
    "tensor": (
        _change_tensors(lambda t: t | {"extra.weight": np.zeros(2, np.float32)}),
        "extra.weight is no A or B of a product, and would not be used",
    ),
    "half": (
        _change_tensors(lambda t: _without(t, "0.mlp.down_proj.lora_A")),
        "layers.0.mlp.down_proj has B alone",
    ),
    "shape": (_change_tensors(_cut), "rank 16 and the layer need [16, 64] and [256, 16]"),
    "rank": (_change_config(r=12), "rank 12 and the layer need"),
    "DoRA": (_change_config(use_dora=True), "use_dora: DoRA is not supported"),
    "bias": (_change_config(bias="lora_only"), "trained biases are not supported"),
    "kind": (_change_config(peft_type="IA3"), "peft_type IA3 is not supported"),
    "modules": (_change_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "pattern": (_change_config(rank_pattern={"q_proj": 4}), "rank_pattern"),
    "no configuration": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        "has no adapter_config.json",
    ),
    "no tensors": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "has no adapter_model.safetensors",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_would_not_be_computed_are_refused(tmp_path: Path, name: str) -> None:
    change, wanted = REFUSED[name]
    shutil.copytree(ADAPTERS / "some", tmp_path / "adapter")
    change(tmp_path / "adapter")
    with pytest.raises(ConfigError) as caught:
        plan_for(MODEL, "deployment=lora", f"+deployment.lora.adapters.mine={tmp_path / 'adapter'}")
    assert wanted in str(caught.value)


SETTINGS = {
    "rank": (["deployment.lora.max_rank=8"], "8, but"),
    "number": (["deployment.lora.max_adapters=1"], "1, but 2 are named"),
    "target": (["deployment.lora.targets=[q]"], "deployment.lora.targets: q"),
    "not a target": (["deployment.lora.targets=[q_proj]"], "which matches no layer"),
    "model": (["model=tiny_deepseek_v3"], "k_proj, which matches no layer"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_limits_that_do_not_hold_the_adapters_are_refused(name: str) -> None:
    overrides, wanted = SETTINGS[name]
    assert_refused([*LORA, *overrides], wanted)


def test_command_names_an_adapter_per_prompt(tmp_path: Path) -> None:
    adapter = f"+deployment.lora.adapters.all={ADAPTERS / 'all'}"
    arguments = [MODEL, "deployment=lora", adapter]
    prompt = "{prompt: [5, 6, 7], adapter: none_such}"
    done = rolecall(tmp_path, *arguments, f"task.prompts=[{prompt}]", status=2)
    assert "adapter 'none_such' is not served" in done.stderr
    assert "served: all" in done.stderr


def test_leaves_of_lora_are_the_graphs_inputs() -> None:
    (stage,) = plan_for(MODEL, "deployment=lora").stages
    assert stage.contract.inputs.lora is not None
    assert len(tree.leaves(stage.contract.inputs.lora)) == 3 + 4 * 7 * 2
