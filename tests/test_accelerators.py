"""Accelerators that are not here: what their graphs take, and that they compile."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import ON_ACCELERATORS, plan_for
from max import tree
from max.driver import accelerator_count
from max.dtype import DType
from max.engine import read as read_mef
from max.graph import BufferType, DeviceRef, TensorType
from test_command import read, rolecall

from builder.accelerators import max_reason
from builder.artifact import check_artifact, describe
from models.contract import named_leaves
from models.decoder import CausalDecoder
from models.errors import ConfigError
from models.placement import stage_role
from models.role_contracts import FIELD_NAMES
from models.weights import declared_weights

LLAMA, DEEPSEEK = "model=two_layer_llama", "model=two_layer_deepseek_v3"
BASE = {"tokens", "input_row_offsets", "return_n_logits", "kv"}
REPLICAS = {"host_input_row_offsets", "data_parallel_splits", "signals"}
EXPERTS = {"signals", "batch_context_lengths", "ep"}

GOLDEN = {
    "h100_x1": (LLAMA, BASE),
    "h100_x2_tp2": (LLAMA, BASE | {"signals"}),
    "h100_x2_dp2": (LLAMA, BASE | REPLICAS),
    "h100_x4_pp2_tp2": (LLAMA, BASE | {"signals", "stage_boundary"}),
    "b200_x2_dp2_ep2": (DEEPSEEK, BASE | REPLICAS | EXPERTS),
    "b200_x8_ep8": (DEEPSEEK, BASE | EXPERTS),
    "b200_x8_ep8_tp8": (DEEPSEEK, BASE | EXPERTS),
    "b200_lora": (LLAMA, BASE | {"lora"}),
    "mi300x_x2_tp2": (LLAMA, BASE | {"signals"}),
}
"""The golden deployments, each with a model for it and the fields of its contract."""

GPU, CPU = DeviceRef.GPU, DeviceRef.CPU()


def overrides(deployment: str) -> tuple[str, str]:
    return GOLDEN[deployment][0], f"deployment={deployment}"


def test_golden_deployments_are_all_here() -> None:
    assert set(ON_ACCELERATORS) == set(GOLDEN)


@pytest.mark.parametrize("deployment", GOLDEN)
def test_contract_has_exactly_the_fields_that_the_deployment_needs(deployment: str) -> None:
    stages = plan_for(*overrides(deployment)).stages
    present = {f.name for stage in stages for f in stage.contract.fields if f.present}
    assert present == GOLDEN[deployment][1]


def test_inputs_of_two_h100_are_in_canonical_order_on_their_devices() -> None:
    (stage,) = plan_for(*overrides("h100_x2_tp2")).stages
    pages = ["total_num_pages", 2, 2, 128, 1, 128]

    def kv(device: DeviceRef) -> list[TensorType | BufferType]:
        return [
            BufferType(DType.bfloat16, pages, device),
            TensorType(DType.uint32, ["replica_0_batch_size"], device),
            TensorType(DType.uint32, ["replica_0_batch_size", "replica_0_max_num_pages"], device),
            TensorType(DType.uint32, [1], CPU),
            TensorType(DType.uint32, [1], CPU),
            TensorType(DType.int64, [1], CPU),
            # How the kernel divides the batch's attention.
            TensorType(DType.int64, [4], CPU),
        ]

    assert [leaf.type for leaf in stage.contract.leaves] == [
        TensorType(DType.int64, ["total_seq_len"], GPU(0)),
        TensorType(DType.uint32, ["input_row_offsets_len"], GPU(0)),
        TensorType(DType.int64, [1], CPU),
        BufferType(DType.uint8, [294387728], GPU(0)),
        BufferType(DType.uint8, [294387728], GPU(1)),
        *kv(GPU(0)),
        *kv(GPU(1)),
    ]


def test_exchange_of_two_b200_takes_what_max_declares() -> None:
    (stage,) = plan_for(*overrides("b200_x2_dp2_ep2")).stages
    field = next(field for field in stage.contract.fields if field.name == "ep")
    counters = [BufferType(DType.int32, [10 * 64 + 320], GPU(n)) for n in (0, 1)]
    # Of two groups: counters on each device, then addresses to send to, receive at and count at.
    addresses = [TensorType(DType.uint64, [2], CPU)] * 6
    assert [leaf.type for leaf in field.leaves] == [*counters, *counters, *addresses]


def test_latent_caches_of_accelerators_say_how_to_divide() -> None:
    (stage,) = plan_for(*overrides("b200_x2_dp2_ep2")).stages
    leaves = {leaf.path: leaf.type for leaf in stage.contract.leaves}
    for holder in (0, 1):
        assert leaves[f"kv.{holder}.attention_dispatch_metadata"] == TensorType(
            DType.int64, [3], GPU(holder)
        )
        assert leaves[f"kv.{holder}.mla_num_partitions"] == TensorType(DType.int64, [1], CPU)
    # MAX's kernels allocate their own workspace.
    assert stage.contract.inputs.scratch is None


def test_stages_are_on_devices_of_their_own() -> None:
    first, second = plan_for(*overrides("h100_x4_pp2_tp2")).stages
    assert first.config.placement.devices == (GPU(0), GPU(1))
    assert second.config.placement.devices == (GPU(2), GPU(3))
    assert second.contract.inputs.stage_boundary == (
        TensorType(DType.bfloat16, ["total_seq_len", 512], GPU(2)),
    )
    assert second.contract.inputs.tokens.device == GPU(2)


def test_adapter_stacks_are_in_the_dtype_of_activations() -> None:
    (stage,) = plan_for(*overrides("b200_lora")).stages
    assert stage.contract.inputs.lora is not None
    *routing, down, up = stage.contract.inputs.lora[:5]
    assert [leaf.device for leaf in routing] == [GPU(0), GPU(0), CPU]
    assert down.dtype == up.dtype == DType.bfloat16


@pytest.mark.parametrize(
    "model_and_deployment",
    [
        *(overrides(name) for name in GOLDEN),
        ("model=tiny_mixtral", "deployment=b200_x2_dp2_ep2"),
        ("model=tiny_olmoe", "deployment=h100_x2_tp2"),
        ("model=tiny_gpt2", "deployment=h100_x2_dp2"),
        ("model=tiny_qwen3_moe", "deployment=h100_x1"),
        ("model=tiny_deepseek_v2", "deployment=h100_x2_tp2"),
    ],
    ids=" ".join,
)
def test_every_input_has_a_use_on_accelerators(model_and_deployment: tuple[str, str]) -> None:
    for stage in plan_for(*model_and_deployment).stages:
        decoder = CausalDecoder(stage.config)
        declared_weights(decoder)
        graph = decoder.trace(*tree.leaves(decoder.inputs))
        idle = [
            leaf.path
            for leaf, value in zip(named_leaves("", decoder.inputs), graph.inputs, strict=True)
            if value._mlir_value.num_uses == 0
        ]
        # MAX's exchange declares counters of a second group, which its kernels of 26.7 leave.
        count = len(stage.config.placement.devices)
        spare = range(count, 2 * count)
        assert idle == (
            [] if stage.config.placement.expert == 1 else [f"ep.atomic_counters.{n}" for n in spare]
        )


@pytest.mark.parametrize("deployment", GOLDEN)
def test_plan_needs_no_device_and_no_weights(tmp_path: Path, deployment: str) -> None:
    model, chosen = overrides(deployment)
    done = rolecall(tmp_path, model, chosen, "task=plan")
    assert "cannot be run on this machine" in done.stdout
    contract = read(tmp_path, "contract.json")
    assert [field["name"] for field in contract["fields"]] == list(FIELD_NAMES)
    plan = read(tmp_path, "plan.json")
    assert plan["capacity"]["fits"]
    assert plan["capacity"]["needed"] == max(share["total"] for share in plan["devices"])


@pytest.mark.parametrize("limit", ["batch.max_batch_input_tokens=1024", "batch.max_batch_size=16"])
def test_graphs_for_other_limits_are_others_on_accelerators(tmp_path: Path, limit: str) -> None:
    # They are constants of the graph, and in no input.
    there = describe(plan_for(*overrides("b200_x2_dp2_ep2")))
    (tmp_path / "graphs_0.mef").touch()
    contents = {"roles": {"decoder": "graphs_0.mef"}, **there}
    (tmp_path / "artifact.json").write_text(json.dumps(contents))
    named = (*overrides("b200_x2_dp2_ep2"), f"deployment.artifact={tmp_path}")
    assert check_artifact(plan_for(*named)) == tmp_path
    with pytest.raises(ConfigError, match=limit.split("=")[0]):
        check_artifact(plan_for(*named, f"deployment.{limit}"))


def test_virtual_accelerators_run_nothing(tmp_path: Path) -> None:
    done = rolecall(tmp_path, "model=tiny_llama", "deployment=h100_x1", status=2)
    assert "virtual accelerators are compiled for, and run nothing" in done.stderr


def test_accelerators_that_are_not_here_are_missed(tmp_path: Path) -> None:
    degrees = ("deployment.parallel.data=8", "deployment.parallel.pipeline=4")
    many = ("deployment.devices.count=32", *degrees)
    arguments = ["model=tiny_llama", "deployment=h100_x2_dp2", *many]
    done = rolecall(tmp_path, *arguments, "deployment.devices.kind=gpu", status=2)
    missed = "deployment.devices.count: 32 accelerators, this machine has "
    assert f"{missed}{accelerator_count() or 'none'}\n" in done.stderr
    assert "deployment.devices.kind=virtual with task=compile" in done.stderr


@pytest.mark.skipif(accelerator_count() > 0, reason="there is one")
def test_one_accelerator_is_told_in_the_singular() -> None:
    (missed,) = plan_for(
        "model=tiny_llama", "deployment=h100_x1", "deployment.devices.kind=gpu"
    ).obstacles
    assert missed.startswith("deployment.devices.count: 1 accelerator, this machine has none\n")


def assert_compiles(tmp_path: Path, deployment: str) -> None:
    """The command compiles a golden deployment, and what it exports takes the contract."""
    done = rolecall(tmp_path, *overrides(deployment), "task=compile", timeout=3000)
    target = plan_for(*overrides(deployment)).capacity
    assert target is not None
    assert f"there is no {target.accelerator.arch} here" in done.stdout
    stages = read(tmp_path, "contract.json")["stages"]
    contracts = [[leaf for f in stage["fields"] for leaf in f["leaves"]] for stage in stages]
    folder = tmp_path / "job" / "artifact"
    description = json.loads((folder / "artifact.json").read_text())
    assert description["target"] == target.accelerator.target
    kept = ("path", "dtype", "shape", "device")
    assert description["inputs"]["decoder"] == [
        [{key: leaf[key] for key in kept} for leaf in leaves] for leaves in contracts
    ]
    assert set(description["roles"]) == {
        stage_role(stage.config.placement) for stage in plan_for(*overrides(deployment)).stages
    }
    for file in set(description["roles"].values()):
        graphs = read_mef(folder / file)
        assert graphs is not None
        # MAX names a graph's inputs by position.
        names = set(re.findall(rb"(?<![\w])input(\d+)(?![\w])", (folder / file).read_bytes()))
        assert {int(name) for name in names} == set(range(max(map(len, contracts))))


def test_cheapest_golden_deployment_compiles(tmp_path: Path) -> None:
    assert_compiles(tmp_path, "h100_x1")


def test_reason_is_what_the_compiler_came_to() -> None:
    # As 26.7 words the failure of its grouped products on H100.
    cause = RuntimeError(
        "Graph compilation failed:\n"
        "error: failed to run the pass manager for offload functions\n"
        "error: function instantiation failed\n"
        "max/kernels/src/linalg/grouped_matmul.mojo:1:5: note: call expansion failed\n"
        "Mojo/stdlib/std/utils/coord.mojo:410:9: note: constraint failed: Coord is not a value\n"
        "error: The graph compiler could not elaborate the generated KGEN"
    )
    error = RuntimeError("Failed to compile the model. Please file an issue.")
    error.__cause__ = cause
    assert max_reason(error).endswith("constraint failed: Coord is not a value")
    assert max_reason(ValueError("no such kernel\nmore")) == "no such kernel"
    assert max_reason(MemoryError()) == "MemoryError"


KERNELS = {
    "h100_x1": {"mo.rope_split_store.ragged.paged", "mo.mha.ragged.paged"},
    "h100_x2_tp2": {"mo.distributed.allreduce.sum", "mo.distributed.broadcast"},
    "h100_x2_dp2": {"mo.distributed.broadcast"},
    "b200_x2_dp2_ep2": {
        *("mo.mla.prefill.ragged.plan", "mo.mla.graph.prefill.decode.paged"),
        *("mo.distributed.ep.dispatch", "mo.grouped.matmul.ragged", "mo.distributed.ep.combine"),
    },
    "b200_lora": {"mo.lora_sgmv.ragged"},
}
"""Kernels and collectives of MAX's that a deployment's graph is made of."""


@pytest.mark.parametrize("deployment", KERNELS)
def test_layers_are_made_of_maxs_kernels_on_accelerators(deployment: str) -> None:
    (stage,) = plan_for(*overrides(deployment)).stages
    decoder = CausalDecoder(stage.config)
    declared_weights(decoder)
    graph = str(decoder.trace(*tree.leaves(decoder.inputs)))
    assert {name for name in KERNELS[deployment] if name not in graph} == set()
    # Ours are the host's.
    assert "rolecall_" not in graph
