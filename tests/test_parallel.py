"""Tensor, data and pipeline parallel deployments compute what the plain one does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import (
    SHARED_TABLE,
    assert_refused,
    compiled_for,
    expected,
    greedy_ids,
    limited,
    plan_for,
)
from max.driver import Buffer
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType
from test_command import rolecall

from builder.checks import check_division
from builder.compare import Comparison, compare, random_prompts, record
from builder.compose import compose
from builder.report import contract_json
from models.collectives import collectives_for, signal_bytes
from models.decoder import constant_weights
from models.errors import ConfigError
from models.placement import Placement, even_counts, split_layers
from models.weights import DeclaredWeight, WeightLoader

MODEL = "model=tiny_llama"
PARALLEL = ("tp2", "tp4", "dp2", "dp4", "pp2", "pp3_uneven", "pp2_tp2")
LENGTHS = (5, 1, 60, 130, 17, 33, 2, 128, 9)
STEPS, TOKENS_PER_STEP = 6, 40


@pytest.fixture(params=PARALLEL)
def deployment(request: pytest.FixtureRequest) -> str:
    return f"deployment={request.param}"


def compared(
    deployment: str, lengths: Sequence[int] = LENGTHS, model: str = MODEL, *more: str
) -> Comparison:
    prompts = random_prompts(lengths, 256)
    ids, plain = record(compiled_for(model), prompts, STEPS, TOKENS_PER_STEP)
    deployed = compiled_for(model, deployment, *more)
    _, found = record(deployed, prompts, STEPS, TOKENS_PER_STEP, forced=ids)
    return compare(plain, found)


def assert_equal(result: Comparison) -> None:
    assert result.max_abs_diff < 1e-4, result
    assert result.tokens_equal, result


def test_logits_equal_the_plain_deployments_in_a_chunked_mixed_batch(deployment: str) -> None:
    assert_equal(compared(deployment))


def test_one_sequence_leaves_the_other_replicas_empty(deployment: str) -> None:
    assert_equal(compared(deployment, [70]))


def test_ids_match_hugging_face(deployment: str) -> None:
    values = expected("tiny_llama")
    prompts = [values[f"prompt_{i}"] for i in range(4)]
    found = greedy_ids(compiled_for(MODEL, deployment), prompts, 16)
    assert found == [values[f"greedy_{i}"].tolist() for i in range(4)]


def test_sequences_that_finish_at_different_steps(deployment: str) -> None:
    from builder.run import Request, Runner
    from builder.sampling import Sampler
    from builder.schema import SamplingConfig

    prompts = random_prompts((3, 40, 7, 90, 21, 5), 256)
    whole = greedy_ids(compiled_for(MODEL), prompts, 12)
    requests = [
        Request(prompt, 2 * number + 1, Sampler(SamplingConfig(), 0))
        for number, prompt in enumerate(prompts)
    ]
    runner = Runner(compiled_for(MODEL, deployment))
    runner.run(requests)
    assert [r.ids for r in requests] == [ids[: 2 * i + 1] for i, ids in enumerate(whole)]
    plan = compiled_for(MODEL, deployment).registration.plan
    assert runner.free_pages() == plan.num_pages * plan.num_replicas


def test_fewer_pages_than_prompts_need_at_once() -> None:
    prompts = random_prompts(LENGTHS, 256)
    whole = greedy_ids(compiled_for(MODEL), prompts, 6)
    few = limited(compiled_for(MODEL, "deployment=dp2"), num_pages=4)
    assert greedy_ids(few, prompts, 6) == whole


def test_tied_table_held_once_as_a_constant_of_two_stages() -> None:
    model, deployment, constants = SHARED_TABLE
    assert_equal(compared(deployment, LENGTHS, model, constants))
    plan = plan_for(*SHARED_TABLE)
    present = [
        {field.name for field in stage.contract.fields if field.present} for stage in plan.stages
    ]
    assert all("constants" in fields for fields in present)
    # 256 rows of 64, bfloat16 as in the checkpoint, on the device of the first stage.
    assert [share.constants for share in plan.devices] == [256 * 64 * 2, 0]
    stages = compiled_for(*SHARED_TABLE).model.batch_processor._lasting
    first, second = (stage["constants"]["token_embedding"][0] for stage in stages)
    # NumPy has no bfloat16.
    bits = [table.view(DType.uint16, table.shape).to_numpy() for table in (first, second)]
    assert bits[0].ctypes.data == bits[1].ctypes.data


# What each adds to the four fields of a single device.
ADDED = {
    "tp2": {"signals"},
    "tp4": {"signals"},
    "dp2": {"signals", "host_input_row_offsets", "data_parallel_splits"},
    "dp4": {"signals", "host_input_row_offsets", "data_parallel_splits"},
    "pp2": set(),
    "pp3_uneven": set(),
    "pp2_tp2": {"signals"},
}


@pytest.mark.parametrize("name", PARALLEL)
def test_contract_adds_exactly_what_the_deployment_needs(name: str) -> None:
    plan = plan_for(MODEL, f"deployment={name}")
    base = {"tokens", "input_row_offsets", "return_n_logits", "kv"}
    for number, stage in enumerate(plan.stages):
        present = {field.name for field in stage.contract.fields if field.present}
        boundary = {"stage_boundary"} if number else set()
        assert present == base | ADDED[name] | boundary
    contract = contract_json(plan)
    assert len(contract["stages"]) == len(plan.stages)
    (boundary_field,) = (f for f in contract["fields"] if f["name"] == "stage_boundary")
    assert [leaf["stage"] for leaf in boundary_field["leaves"]] == list(range(1, len(plan.stages)))


def test_stages_cover_every_layer_once_with_the_kv_of_their_own() -> None:
    plan = plan_for(MODEL, "deployment=pp3_uneven")
    layers = [list(stage.config.placement.layers) for stage in plan.stages]
    assert layers == [[0, 1], [2], [3]]
    pages = [int(str(_leaf(stage, "kv.0.kv_blocks").shape[2])) for stage in plan.stages]
    assert pages == [2, 1, 1]


def _leaf(stage, path):
    return next(leaf.type for leaf in stage.contract.leaves if leaf.path == path)


def test_placement_of_heads_and_repeated_kv_heads() -> None:
    shares = plan_for(MODEL, "deployment=tp4").devices
    assert [list(share.heads) for share in shares] == [[0], [1], [2], [3]]
    # Two KV heads for four devices: query heads 0 and 1 read head 0, 2 and 3 read head 1.
    assert [list(share.kv_heads) for share in shares] == [[0], [0], [1], [1]]
    assert [share.inner_columns for share in shares] == [range(i, i + 24) for i in (0, 24, 48, 72)]


@pytest.mark.parametrize("name", ["cpu", *PARALLEL])
def test_weights_of_all_devices_are_the_checkpoint_and_what_is_repeated(name: str) -> None:
    plan = plan_for(MODEL, f"deployment={name}")
    items = plan.weights
    assert sum(share.weights + share.constants for share in plan.devices) == items.total
    # The checkpoint is bfloat16, and its nine norms of 64 are computed in float32.
    assert items.checkpoint == plan.checkpoint.num_bytes + 2 * 9 * 64
    converted = plan_for(MODEL, f"deployment={name}", keeps=False).weights
    assert converted.checkpoint == 2 * plan.checkpoint.num_bytes
    # A table of 512 positions and heads of 64, on every device.
    assert items.computed == {"rope.*.weight": len(plan.devices) * 512 * 64 * 4}


def test_what_tensor_parallelism_repeats_is_itemised() -> None:
    repeated = plan_for(MODEL, "deployment=tp4").weights.replicated
    norms = 3 * 4 * 64 * 4  # three further copies, four layers
    assert repeated == {
        "layers.*.input_layernorm.weight": norms,
        "layers.*.post_attention_layernorm.weight": norms,
        "norm.weight": 3 * 64 * 4,
        # Each of the two heads twice: one further copy of 128 x 64 in four layers, in bfloat16.
        "layers.*.self_attn.k_proj.weight": 4 * 128 * 64 * 2,
        "layers.*.self_attn.v_proj.weight": 4 * 128 * 64 * 2,
    }


REFUSED = {
    "heads": (
        ["model=smollm2", "deployment=tp4"],
        "9 heads do not divide over tensor=4",
    ),
    "heads that are odd": (
        ["model=smollm2", "deployment=tp2"],
        "9 heads do not divide over tensor=2",
    ),
    "device count": (
        [MODEL, "deployment=tp2", "deployment.devices.count=3"],
        "3, but tensor=2 x data=1 x pipeline=1 = 2",
    ),
    "replica per device": (
        [MODEL, "deployment=tp2", "deployment.parallel.data=2", "deployment.devices.count=4"],
        "each device of a stage needs a replica of its own",
    ),
    "more stages than layers": (
        [MODEL, "deployment.parallel.pipeline=5", "deployment.devices.count=5"],
        "5 stages for 4 layers",
    ),
    "stage layers": (
        [MODEL, "deployment=pp2", "deployment.parallel.stage_layers=[1,2]"],
        "1 + 2 = 3, but the model has 4 layers",
    ),
    "stage layers' number": (
        [MODEL, "deployment=pp2", "deployment.parallel.stage_layers=[1,2,1]"],
        "3 entries for pipeline=2",
    ),
    "constant": (
        [MODEL, "deployment.constants=[lm_head]"],
        "'lm_head' is no weight that can be an input",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_with_the_arithmetic(name: str) -> None:
    assert_refused(*REFUSED[name])


def test_kv_heads_that_neither_divide_nor_repeat_are_refused() -> None:
    deployment = compose(["deployment=tp2"]).deployment
    settings = plan_for(MODEL).settings
    settings = replace(settings, num_heads=6, num_kv_heads=3)
    with pytest.raises(ConfigError, match="3 key-value heads neither divide over tensor=2"):
        check_division(deployment, settings)


def test_ten_layers_over_three_stages() -> None:
    assert even_counts(10, 3) == (4, 3, 3)
    assert split_layers(10, (4, 3, 3)) == (range(4), range(4, 7), range(7, 10))


@pytest.mark.parametrize("name", ["tp2", "pp2_tp2"])
def test_vocabulary_that_does_not_divide_is_held_whole(name: str) -> None:
    plan = plan_for("model=tiny_qwen2", f"deployment={name}")
    settings = replace(plan.settings, vocab_size=255)
    for stage in plan.stages:
        placement = stage.config.placement
        assert not placement.splits_vocabulary(settings)
        config = replace(stage.config, settings=settings, constants=("token_embedding",))
        shards = constant_weights(config).get("token_embedding", ())
        # Every device looks tokens up; only each replica's first projects.
        wanted = [0, 1] if placement.is_first else [0]
        assert [shard.holder for shard in shards] == wanted
        assert all(shard.sizes == (255, 64) for shard in shards)


@pytest.mark.parametrize("kind", ["sum_in_replicas", "concat_in_replicas"])
def test_accelerators_exchange_through_maxs_collectives(kind: str) -> None:
    devices = tuple(DeviceRef.GPU(i) for i in range(2))
    placement = Placement(devices=devices, tensor=2, layers=range(1))
    types = [TensorType(DType.float32, ["rows", 8], device) for device in devices]
    signals = [BufferType(DType.uint8, [signal_bytes(placement)], device) for device in devices]
    with Graph("exchange", input_types=[*types, *signals]) as graph:
        xs = [value.tensor for value in graph.inputs[:2]]
        collectives = collectives_for(placement, [value.buffer for value in graph.inputs[2:]])
        received = getattr(collectives, kind)(xs)
        graph.output(*received)
    assert [x.device for x in received] == list(devices)
    width = 8 if kind == "sum_in_replicas" else 16
    assert [str(dim) for dim in received[0].shape] == ["rows", str(width)]
    assert all(value._mlir_value.num_uses for value in graph.inputs)


@pytest.mark.parametrize("mode", ["all", "variable"])
def test_what_works_with_more_logits_is_compared_too(mode: str) -> None:
    prompts = random_prompts((3, 50), 256)
    compiled = compiled_for(MODEL, f"deployment=cpu_{mode}_logits")
    ids, rows = record(compiled, prompts, 2, TOKENS_PER_STEP)
    # 3 next-token rows of each; then a row per token, or the last row of each step.
    lengths = [3 + 2, 50 + 2] if mode == "all" else [3, 2 + 2]
    assert [len(r) for r in rows] == [3, 3, *lengths]
    assert [r.argmax(-1).tolist() for r in rows[:2]] == ids


VERIFY_MISTAKES = {
    "no room": (["task.max_new_tokens=511"], "leaves no room for a prompt in max_length 512"),
    "tolerance": (["task.tolerance=nan"], "task.tolerance: nan is not a number above 0"),
    "step": (
        ["task.max_batch_input_tokens=4"],
        "is not between the deployment's max_batch_size, 8",
    ),
}


@pytest.mark.parametrize("name", VERIFY_MISTAKES)
def test_mistakes_in_verify_are_refused_before_compiling(tmp_path: Path, name: str) -> None:
    arguments, wanted = VERIFY_MISTAKES[name]
    done = rolecall(tmp_path, MODEL, "deployment=tp2", "task=verify", *arguments, status=2)
    assert wanted in done.stderr
    assert "compiling" not in done.stderr


def test_what_works_is_named() -> None:
    with pytest.raises(ConfigError, match=r"what works: deployment\.parallel\.tensor=1 or 3"):
        plan_for("model=smollm2", "deployment=tp2")


def test_command_verifies_and_writes_the_result(tmp_path: Path) -> None:
    compiled_for(MODEL, "deployment=tp2")
    done = rolecall(tmp_path, MODEL, "deployment=tp2", "task=verify")
    result = json.loads((tmp_path / "job" / "verify.json").read_text())
    assert result["pass"] is True
    assert result["tokens_equal"] is True
    assert 0 <= result["max_abs_diff"] <= result["tolerance"] == 1e-4
    assert set(result["where"]) == {"prompt", "step", "token"}
    assert "pass" in done.stdout


def test_command_exits_with_1_when_a_difference_exceeds_the_tolerance(tmp_path: Path) -> None:
    compiled_for(MODEL, "deployment=tp2")
    done = rolecall(
        tmp_path, MODEL, "deployment=tp2", "task=verify", "task.tolerance=1e-12", status=1
    )
    assert "does not compute what it does on cpu" in done.stderr
    assert json.loads((tmp_path / "job" / "verify.json").read_text())["pass"] is False
    assert json.loads((tmp_path / "job" / "status.json").read_text())["status"] == "failed"


# Faults planted in what is loaded; the graph and its contract stay as they are.


def _with_loaded_weights(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Buffer]], None]
) -> None:
    original = WeightLoader.load

    def load(self: WeightLoader, weights: dict[str, DeclaredWeight]) -> dict[str, Buffer]:
        made = dict(original(self, weights))
        change(made)
        return made

    monkeypatch.setattr(WeightLoader, "load", load)


def _planted(deployment: str) -> Comparison:
    """Compares a deployment that is loaded anew, with the fault."""
    from builder.build import build
    from builder.compile import compile_registration, process_session

    prompts = random_prompts(LENGTHS, 256)
    ids, plain = record(compiled_for(MODEL), prompts, STEPS, TOKENS_PER_STEP)
    faulty = compile_registration(build(plan_for(MODEL, deployment)), process_session())
    assert faulty.cache_hit
    _, found = record(faulty, prompts, STEPS, TOKENS_PER_STEP, forced=ids)
    return compare(plain, found)


def test_swapped_shards_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_for(MODEL)
    compiled_for(MODEL, "deployment=tp2")

    def swap(weights: dict[str, Buffer]) -> None:
        shards = "decoder.layers.2.feed_forward.shards"
        first, second = (f"{shards}.{i}.down_proj.weight" for i in (0, 1))
        weights[first], weights[second] = weights[second], weights[first]

    _with_loaded_weights(monkeypatch, swap)
    assert _planted("deployment=tp2").max_abs_diff > 1e-2


def _of_bits(values: Buffer, change: Callable[[np.ndarray], np.ndarray]) -> Buffer:
    """Kept values of 16 bits, changed."""
    bits = change(values.view(DType.uint16, values.shape).to_numpy())
    return Buffer.from_numpy(np.ascontiguousarray(bits)).view(values.dtype, values.shape)


def test_dropped_layer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_for(MODEL)
    compiled_for(MODEL, "deployment=tp2")

    def drop(weights: dict[str, Buffer]) -> None:
        for name in weights:
            if name.startswith("decoder.layers.3.") and ("o_proj" in name or "down" in name):
                weights[name] = _of_bits(weights[name], np.zeros_like)

    _with_loaded_weights(monkeypatch, drop)
    assert _planted("deployment=tp2").max_abs_diff > 1e-2


def test_slice_that_is_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_for(MODEL)
    compiled_for(MODEL, "deployment=tp2")

    def shift(weights: dict[str, Buffer]) -> None:
        name = "decoder.layers.1.mixer.shards.1.qkv_proj.weight"
        weights[name] = _of_bits(weights[name], lambda bits: np.roll(bits, 1, axis=0))

    _with_loaded_weights(monkeypatch, shift)
    assert _planted("deployment=tp2").max_abs_diff > 1e-2


def test_compare_names_the_largest_difference_and_sees_nan() -> None:
    plain = [np.zeros((2, 4), np.float32), np.zeros((3, 4), np.float32)]
    found = [rows.copy() for rows in plain]
    plain[1][2, 3] = 2.0
    found[1][2, 3] = 2.5
    result = compare(plain, found)
    assert (result.where.prompt, result.where.step, result.where.token) == (1, 2, 3)
    assert result.max_abs_diff == 0.5
    assert result.max_rel_diff == 0.25
    assert result.tokens_equal
    assert result.rows == 5
    found[0][0, 1] = np.nan
    assert compare(plain, found).max_abs_diff == np.inf
    found[0][1, 2] = 1.0
    assert not compare(plain, found).tokens_equal
