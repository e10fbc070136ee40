"""The contract: what the compiled model takes is what the plan says, and each rule has a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest import ADAPTERS, ON_HOST, VISION, VISION_PARALLEL, compiled_for, plan_for
from max import tree
from max.dtype import DType
from max.engine import Model
from max.graph import BufferType, DeviceRef, TensorType

from builder.report import contract_json, max_bytes
from models.config import Declarations
from models.contract import named_leaves, resolve_contract
from models.graph_api import RoleModule
from models.placement import Placement
from models.role_contracts import FIELD_NAMES, DecoderInputs

CPU = DeviceRef.CPU()

# The table of the reference document, in its order.
CANONICAL = [
    *("tokens", "vision", "input_row_offsets", "token_positions", "host_input_row_offsets"),
    *("return_n_logits", "data_parallel_splits", "signals", "kv", "batch_context_lengths"),
    *("ep", "lora", "constants", "state", "scratch", "stage_boundary"),
]


def model_for(deployment: str) -> str:
    """A dense model, or one with what the deployment divides or takes."""
    if deployment.startswith("vision"):
        return "model=tiny_idefics3"
    return "model=tiny_deepseek_v3" if deployment.startswith("ep") else "model=tiny_llama"


@pytest.mark.parametrize("deployment", ON_HOST)
def test_compiled_model_takes_exactly_the_contract(deployment: str) -> None:
    # With the adapters that other tests compile it with; they do not change what it takes.
    adapters = ADAPTERS if deployment.startswith("lora") else ()
    compiled = compiled_for(model_for(deployment), f"deployment={deployment}", *adapters)
    stages = contract_json(compiled.registration.plan)["stages"]
    for stage, model in zip(stages, compiled.model.models, strict=True):
        assert_takes(model, [leaf for field in stage["fields"] for leaf in field["leaves"]])


@pytest.mark.parametrize("overrides", [VISION, *VISION_PARALLEL], ids=lambda o: o[1])
def test_compiled_encoder_takes_exactly_what_the_plan_says(overrides: tuple[str, ...]) -> None:
    compiled = compiled_for(*overrides)
    model = compiled.model._models[f"{compiled.model.graph_prefix}vision"]
    assert_takes(model, contract_json(compiled.registration.plan)["vision"]["inputs"])


def assert_takes(model: Model, leaves: list[dict[str, Any]]) -> None:
    taken = model.input_metadata
    # MAX names a graph's inputs by position.
    assert [spec.name for spec in taken] == [f"input{i}" for i in range(len(leaves))]
    for spec, device, leaf in zip(taken, model.input_devices, leaves, strict=True):
        assert spec.dtype.name == leaf["dtype"], leaf["path"]
        static = [dim if isinstance(dim, int) else None for dim in leaf["shape"]]
        assert list(spec.shape) == static, leaf["path"]
        assert f"{device.label}:{device.id}" == leaf["device"], leaf["path"]


@pytest.mark.parametrize("deployment", ON_HOST)
def test_every_input_has_a_use_in_the_graph(deployment: str) -> None:
    # A tied table is read by the last stage too.
    more = ["deployment.constants=[token_embedding]"] if deployment.startswith("pp") else []
    model = model_for(deployment).replace("llama", "qwen2")
    assert_every_input_is_used(model, f"deployment={deployment}", *more)


@pytest.mark.parametrize("deployment", ["cpu", "tp2", "dp2", "pp2"])
@pytest.mark.parametrize("model", ["tiny_mixtral", "tiny_deepseek_v2"])
def test_every_input_has_a_use_with_experts_and_latents(model: str, deployment: str) -> None:
    assert_every_input_is_used(f"model={model}", f"deployment={deployment}")


def assert_every_input_is_used(*overrides: str) -> None:
    from models.decoder import CausalDecoder
    from models.vision import VisionEncoder
    from models.weights import declared_weights

    plan = plan_for(*overrides)
    modules: list[RoleModule] = [CausalDecoder(stage.config) for stage in plan.stages]
    if plan.vision is not None:
        modules.append(VisionEncoder(plan.vision))
    for module in modules:
        declared_weights(module)
        graph = module.trace(*tree.leaves(module.inputs))
        idle = [
            leaf.path
            for leaf, value in zip(named_leaves("", module.inputs), graph.inputs, strict=True)
            if value._mlir_value.num_uses == 0
        ]
        assert idle == []


def test_fields_are_sixteen_in_canonical_order() -> None:
    assert list(FIELD_NAMES) == CANONICAL
    contract = plan_for("model=tiny_llama").stages[0].contract
    assert [field.name for field in contract.fields] == CANONICAL


def test_single_device_needs_four_fields_and_says_why_not_the_others() -> None:
    contract = plan_for("model=tiny_llama").stages[0].contract
    present = [field.name for field in contract.fields if field.present]
    assert present == ["tokens", "input_row_offsets", "return_n_logits", "kv"]
    assert all(field.because for field in contract.fields)
    assert all(field.keys for field in contract.fields if not field.present)


def test_none_fields_vanish_and_order_is_declaration_order() -> None:
    inputs = DecoderInputs(
        tokens=1,
        input_row_offsets=2,
        return_n_logits=4,
        kv=(6, 7),
        data_parallel_splits=5,
        host_input_row_offsets=3,
    )
    leaves, structure = tree.flatten(inputs)
    assert leaves == [1, 2, 3, 4, 5, 6, 7]
    assert tree.unflatten(structure, leaves) == inputs


def _contract(placement: Placement | None = None, **declared: object) -> dict[str, list[object]]:
    config = plan_for("model=tiny_llama").stages[0].config
    config = replace(
        config,
        placement=placement or config.placement,
        declarations=Declarations(**declared),  # type: ignore[arg-type]
    )
    contract = resolve_contract(config)
    return {
        field.name: [leaf.type for leaf in field.leaves]
        for field in contract.fields
        if field.present
    }


BASE = {"tokens", "input_row_offsets", "return_n_logits", "kv"}


def test_data_parallel_adds_host_offsets_splits_and_signals() -> None:
    placement = Placement(devices=(CPU, CPU), data=2, layers=range(4))
    found = _contract(placement, signal_bytes=8)
    assert set(found) == BASE | {"host_input_row_offsets", "data_parallel_splits", "signals"}
    assert found["data_parallel_splits"] == [TensorType(DType.int64, [3], CPU)]
    assert found["host_input_row_offsets"] == [
        TensorType(DType.uint32, ["input_row_offsets_len"], CPU)
    ]


def test_many_devices_or_the_decoder_itself_ask_for_signals() -> None:
    placement = Placement(devices=(CPU, CPU), tensor=2, layers=range(4))
    found = _contract(placement, signal_bytes=8)
    assert found["signals"] == [BufferType(DType.uint8, [8], CPU)] * 2
    assert set(found) == BASE | {"signals"}
    assert len(_contract(always_signal_buffers=True, signal_bytes=8)["signals"]) == 1


def test_context_lengths_come_per_replica_or_per_device() -> None:
    placement = Placement(devices=(CPU,) * 4, tensor=2, data=2, layers=range(4))
    found = _contract(placement, takes_batch_context_lengths=True, signal_bytes=8)
    assert found["batch_context_lengths"] == [TensorType(DType.int32, [1], CPU)] * 2
    found = _contract(
        placement,
        takes_batch_context_lengths=True,
        device_context_length_dtype=DType.uint32,
        signal_bytes=8,
    )
    assert found["batch_context_lengths"] == [TensorType(DType.uint32, [1], CPU)] * 4


def test_vision_adds_embeddings_and_indices_per_device() -> None:
    found = _contract(vision=True)
    assert found["vision"] == [
        TensorType(DType.float32, ["num_image_tokens", 64], CPU),
        TensorType(DType.int32, ["num_image_tokens"], CPU),
    ]


def test_declared_trees_become_fields_in_their_own_structure() -> None:
    leaf = TensorType(DType.float32, [3], CPU)
    buffer = BufferType(DType.float32, [2], CPU)
    found = _contract(
        token_positions=True,
        ep={"b": leaf, "a": buffer},
        lora=(leaf, leaf),
        constants={"table": leaf},
        state=(buffer,),
        scratch=(buffer, buffer),
    )
    # A plain dict flattens in sorted key order.
    assert found["ep"] == [buffer, leaf]
    assert set(found) == BASE | {
        "token_positions",
        "ep",
        "lora",
        "constants",
        "state",
        "scratch",
    }


def test_only_stages_after_the_first_take_a_boundary() -> None:
    boundary = TensorType(DType.float32, ["total_seq_len", 64], CPU)
    first = Placement(devices=(CPU,), layers=range(2), stage=0, num_stages=2)
    second = Placement(devices=(CPU,), layers=range(2, 4), stage=1, num_stages=2)
    assert "stage_boundary" not in _contract(first)
    assert _contract(second, stage_boundary=(boundary,))["stage_boundary"] == [boundary]


def test_input_bytes_at_the_limits() -> None:
    plan = plan_for(
        "model=tiny_llama",
        "deployment.max_length=300",
        "deployment.batch.max_batch_size=3",
        "deployment.batch.max_batch_input_tokens=40",
    )
    found = {leaf.path: max_bytes(plan, leaf) for leaf in plan.stages[0].contract.leaves}
    assert found["tokens"] == 40 * 8
    assert found["input_row_offsets"] == 4 * 4
    # 300 tokens need 3 pages of 128; 3 sequences and the null page make 10.
    # A page: keys and values x 4 layers x 128 tokens x 2 heads x 64 x 4 bytes.
    assert found["kv.0.kv_blocks"] == 10 * 2 * 4 * 128 * 2 * 64 * 4
    assert plan.kv_bytes_per_token == 2 * 4 * 2 * 64 * 4
