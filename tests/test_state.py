"""Per-request state, layers that do not attend, and learned positions."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import (
    LFM2_STAGES,
    assert_refused,
    compiled_for,
    expected,
    forced_logits,
    plan_for,
)
from max import tree
from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorType
from test_contract import assert_every_input_is_used
from test_parallel import LENGTHS, STEPS, TOKENS_PER_STEP, assert_equal

from builder.compare import compare, random_prompts, record
from builder.run import Request, Runner
from builder.sampling import Sampler
from builder.schema import SamplingConfig
from models.state import RequestStateStore, StateRow, state_types

MODEL = "model=tiny_lfm2"
CPU = DeviceRef.CPU()
PARALLEL = (
    (MODEL, "deployment=tp2"),
    (MODEL, "deployment=dp2"),
    LFM2_STAGES,
    ("model=tiny_gpt2", "deployment=dp2"),
    ("model=tiny_qwen3_next", "deployment=tp2"),
)
KEEPING_STATE = ((MODEL,), *PARALLEL[:3], ("model=tiny_qwen3_next",), PARALLEL[4])


@pytest.mark.parametrize("overrides", PARALLEL, ids=" ".join)
def test_logits_equal_the_plain_deployments_in_a_chunked_mixed_batch(
    overrides: tuple[str, ...],
) -> None:
    prompts = random_prompts(LENGTHS, 256)
    plain = compiled_for(overrides[0])
    ids, wanted = record(plain, prompts, STEPS, TOKENS_PER_STEP)
    _, found = record(compiled_for(*overrides), prompts, STEPS, TOKENS_PER_STEP, forced=ids)
    assert_equal(compare(wanted, found))


@pytest.mark.parametrize("overrides", KEEPING_STATE, ids=" ".join)
def test_requests_that_replace_others_get_the_ids_of_one_by_one(overrides: tuple[str, ...]) -> None:
    compiled = compiled_for(*overrides)
    prompts = random_prompts((3, 40, 7, 90, 21, 5, 2, 33, 64, 1, 12, 130, 4), 256)

    def continued(numbers: range) -> list[list[int]]:
        requests = [
            Request(prompts[n], 1 + (5 * n) % 7, Sampler(SamplingConfig(), 0)) for n in numbers
        ]
        Runner(compiled).run(requests)
        return [request.ids for request in requests]

    alone = [continued(range(n, n + 1))[0] for n in range(len(prompts))]
    assert continued(range(len(prompts))) == alone


def test_only_attending_layers_have_keys_and_values() -> None:
    (stage,) = plan_for(MODEL).stages
    (device,) = stage.contract.inputs.kv
    assert int(device.kv_blocks.shape[2]) == 2
    assert plan_for(MODEL).kv_bytes_per_token == 2 * 2 * 2 * 64 * 4


def test_a_stage_in_which_nothing_attends_has_an_empty_tree_of_keys_and_values() -> None:
    first, second = plan_for(*LFM2_STAGES).stages
    assert first.contract.inputs.kv == ()
    assert len(tree.leaves(second.contract.inputs.kv)) == 6
    field = next(field for field in first.contract.fields if field.name == "kv")
    assert field.present
    assert field.leaves == ()


def test_state_is_declared_per_device_of_the_stages_that_convolve() -> None:
    for name, devices, channels in (("cpu", 1, 64), ("tp2", 2, 32), ("dp2", 2, 64)):
        (stage,) = plan_for(MODEL, f"deployment={name}").stages
        state = stage.contract.inputs.state
        assert state is not None
        assert len(state) == devices
        for device in state:
            assert device.pools == (BufferType(DType.float32, [8, channels, 3], CPU),) * 2
    assert plan_for("model=tiny_llama").stages[0].contract.inputs.state is None


def test_delta_rule_keeps_a_convolution_and_a_memory_per_layer() -> None:
    for name, channels, heads in (("cpu", 160, 4), ("tp2", 80, 2)):
        (stage,) = plan_for("model=tiny_qwen3_next", f"deployment={name}").stages
        state = stage.contract.inputs.state
        assert state is not None
        conv = BufferType(DType.float32, [8, channels, 3], CPU)
        memory = BufferType(DType.float32, [8, heads, 16, 24], CPU)
        assert all(device.pools == (conv, memory) * 2 for device in state)


@pytest.mark.parametrize("model", ["tiny_lfm2", "tiny_qwen3_next"])
def test_long_decode_matches_hugging_face(model: str) -> None:
    values = expected(model)
    sequence = (values["long_prompt"], values["long_forced"])
    (found,) = forced_logits(compiled_for(f"model={model}"), [sequence])
    np.testing.assert_allclose(found, values["long_logits"], atol=1e-4, rtol=0)


def test_learned_positions_are_taken_by_the_first_stage_only() -> None:
    first, second = plan_for("model=tiny_gpt2", "deployment=pp2").stages
    assert first.contract.inputs.token_positions == TensorType(DType.int64, ["total_seq_len"], CPU)
    assert second.contract.inputs.token_positions is None
    assert plan_for("model=tiny_llama").stages[0].contract.inputs.token_positions is None


@pytest.mark.parametrize("deployment", ["cpu", "tp2", "dp2", "pp2", "pp3_uneven"])
@pytest.mark.parametrize("model", ["tiny_lfm2", "tiny_gpt2", "tiny_qwen3_next"])
def test_every_input_has_a_use(model: str, deployment: str) -> None:
    assert_every_input_is_used(f"model={model}", f"deployment={deployment}")


def test_slots_are_kept_by_request_and_reused_after_release() -> None:
    config = plan_for(MODEL).stages[0].config
    declared = state_types(config.settings, config.placement, DType.float32, 2)
    store = RequestStateStore([declared], num_replicas=1, num_slots=2)

    def slots(*requests: str) -> list[int]:
        rows = [StateRow(request, started=False) for request in requests]
        inputs = store.inputs(0, config.placement, [rows])
        assert inputs is not None
        return [int(slot) for slot in inputs[0].slots.to_numpy()]

    a, b = slots("a", "b")
    assert slots("b", "a") == [b, a]
    store.release("a")
    assert slots("b", "c") == [b, a]
    store.release("a")  # It holds none.
    assert slots("c") == [a]


def test_plan_shows_the_bytes_of_state() -> None:
    (share,) = plan_for(MODEL).devices
    # Two layers, eight sequences, 64 channels, the last 3 inputs.
    assert share.state == 2 * 8 * 64 * 3 * 4


def test_what_does_not_divide_is_refused() -> None:
    for model, devices, message in (
        ("tiny_lfm2", 3, "4 heads do not divide over tensor=3"),
        ("tiny_qwen3_next", 4, "the delta rule's 2 key heads do not divide over tensor=4"),
    ):
        parallel = f"deployment.parallel.tensor={devices}"
        count = f"deployment.devices.count={devices}"
        assert_refused([f"model={model}", parallel, count], message)


@pytest.mark.parametrize("model", [MODEL, "model=tiny_qwen3_next"])
def test_state_starts_at_zero_whatever_the_slot_held(model: str) -> None:
    compiled = compiled_for(model)
    prompts = random_prompts((9,), 256)
    ids, wanted = record(compiled, prompts, 3, 48)
    for pools in compiled.model.state._pools[0] or []:
        for pool in pools:
            pool.to_numpy()[:] = np.nan
    again, found = record(compiled, prompts, 3, 48)
    assert again == ids
    np.testing.assert_array_equal(found[0], wanted[0])
