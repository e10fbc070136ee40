"""Latent attention: its cache, inputs and workspace; and plans from a configuration alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import compiled_for, expected, forced_logits, plan_for
from max import tree
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, TensorType
from published import DEEPSEEK_V3, LLAMA_31_8B, published
from test_command import rolecall

from models.batch_processor import _context_lengths
from models.contract import resolve_contract
from models.decoder import CausalDecoder
from models.registration_graph_api import GraphApiDecoderPipelineModel
from models.weights import declared_weights

MODEL = "model=tiny_deepseek_v3"
CPU = DeviceRef.CPU()


def test_contract_has_context_lengths_and_the_declared_workspace() -> None:
    for name, replicas, devices in (("cpu", 1, 1), ("tp2", 1, 2), ("dp2", 2, 2), ("ep4_dp4", 4, 4)):
        (stage,) = plan_for(MODEL, f"deployment={name}").stages
        inputs = stage.contract.inputs
        assert inputs.batch_context_lengths == (TensorType(DType.int32, [1], CPU),) * replicas
        assert inputs.scratch is not None
        assert len(inputs.scratch) == devices


def test_other_models_take_neither() -> None:
    for model in ("tiny_llama", "tiny_mixtral"):
        inputs = plan_for(f"model={model}").stages[0].contract.inputs
        assert inputs.batch_context_lengths is None
        assert inputs.scratch is None


def _per_device(deployment: str):
    config = plan_for(MODEL, f"deployment={deployment}").stages[0].config
    declared = replace(config.declarations, device_context_length_dtype=DType.uint32)
    return replace(config, declarations=declared)


class _Context:
    """As much of a request as its context length takes."""

    def __init__(self, position: int) -> None:
        self.tokens = self
        self.current_position = position


def test_context_lengths_are_whole_pages_per_replica() -> None:
    config = plan_for(MODEL, "deployment=dp2").stages[0].config
    batches = [[_Context(1), _Context(128), _Context(129)], []]
    found = _context_lengths(config, batches)  # type: ignore[arg-type]
    assert found is not None
    assert [buffer.to_numpy().tolist() for buffer in found] == [[128 + 128 + 256], [0]]
    assert {buffer.dtype for buffer in found} == {DType.int32}


def test_context_lengths_come_per_device_where_the_decoder_says_so() -> None:
    config = _per_device("tp2")
    assert resolve_contract(config).inputs.batch_context_lengths == (
        TensorType(DType.uint32, [1], CPU),
        TensorType(DType.uint32, [1], CPU),
    )
    found = _context_lengths(config, [[_Context(5)]])  # type: ignore[list-item]
    assert found is not None
    assert [buffer.to_numpy().tolist() for buffer in found] == [[128], [128]]
    assert {buffer.dtype for buffer in found} == {DType.uint32}
    decoder = CausalDecoder(config)
    declared_weights(decoder)
    graph = decoder.trace(*tree.leaves(decoder.inputs))
    assert all(value._mlir_value.num_uses for value in graph.inputs)


def test_nothing_in_the_workspace_or_the_exchange_outlives_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = compiled_for(MODEL, "deployment=ep2")
    processor = compiled.model.batch_processor
    assert processor is not None
    (lasting,) = processor._lasting
    execute = GraphApiDecoderPipelineModel.execute
    poisoned = 0

    def poison(self: GraphApiDecoderPipelineModel, model_inputs: object) -> object:
        nonlocal poisoned
        for buffer in tree.leaves((lasting["scratch"], processor._ep.model_inputs())):
            assert isinstance(buffer, Buffer)
            buffer.to_numpy()[:] = np.nan if buffer.dtype == DType.float32 else 10**6
            poisoned += 1
        return execute(self, model_inputs)

    monkeypatch.setattr(GraphApiDecoderPipelineModel, "execute", poison)
    values = expected("tiny_deepseek_v3")
    sequences = [(values[f"prompt_{i}"], values[f"forced_{i}"]) for i in range(4)]
    found = forced_logits(compiled, sequences)
    assert poisoned >= 7 * 8
    for i in range(4):
        np.testing.assert_allclose(found[i], values[f"logits_{i}"], atol=1e-4, rtol=0)


# The published configurations' facts (config.json of deepseek-ai/DeepSeek-V3 and
# meta-llama/Llama-3.1-8B); what they leave out, the families' defaults give.
def test_kv_bytes_per_token_of_published_models(tmp_path: Path) -> None:
    # 61 layers of a latent of 512 and a rotated key of 64, two bytes each.
    assert published(tmp_path, DEEPSEEK_V3).kv_bytes_per_token == 61 * (512 + 64) * 2 == 70272
    # Keys and values of 8 heads of 128 in 32 layers.
    assert published(tmp_path, LLAMA_31_8B).kv_bytes_per_token == 2 * 8 * 128 * 32 * 2 == 131072


def test_weights_per_device_of_deepseek_v3_under_ep8_from_its_configuration(
    tmp_path: Path,
) -> None:
    plan = published(
        tmp_path, DEEPSEEK_V3, "deployment.parallel.expert=8", "deployment.devices.count=8"
    )
    hidden, heads = 7168, 128
    attention = (
        1536 * hidden
        + 1536
        + heads * 192 * 1536
        + 576 * hidden
        + 512
        + heads * 256 * 512
        + hidden * heads * 128
    )
    router = 256 * hidden + 256
    expert = 3 * hidden * 2048
    dense = 3 * hidden * 18432
    whole = 61 * (attention + 2 * hidden) + hidden + 3 * dense + 58 * expert + 129280 * hidden
    # 256 / 8 experts; the router is float32, and so is the table of rotations.
    held = 2 * (whole + 58 * 32 * expert) + 4 * 58 * router + 4 * plan.max_length * 64
    table = 2 * 129280 * hidden
    # Every device embeds; one projects to the vocabulary.
    assert [share.weights for share in plan.devices] == [held + table] + [held] * 7
    assert [share.experts for share in plan.devices] == [
        range(first, first + 32) for first in range(0, 256, 32)
    ]
    # Each device has every latent.
    assert {share.kv_bytes_per_token for share in plan.devices} == {70272}


def test_weights_of_deepseek_v3_are_the_published_671_billion(tmp_path: Path) -> None:
    plan = published(tmp_path, DEEPSEEK_V3)
    routers = 58 * (256 * 7168 + 256)
    assert round((plan.weights.checkpoint - 2 * routers) / 2 / 1e9) == 671


def test_command_plans_without_weights_and_runs_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_31_8B))
    arguments = ["model=local", f"model.source={model}"]
    done = rolecall(tmp_path, *arguments, "task=plan")
    assert "cannot be run on this machine" in done.stdout
    assert json.loads((tmp_path / "job" / "plan.json").read_text())["obstacles"]
    done = rolecall(tmp_path, *arguments, "task.prompts=[[1]]", status=2)
    assert "has no *.safetensors file" in done.stderr
