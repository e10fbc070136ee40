"""Weights kept as a checkpoint stores them compute what their dequantized values do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import compiled_alone, forced_logits, greedy_ids, plan_for
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from builder.tasks.verify import ROUNDED, _usual_tolerance
from models.storage import EXACT_STORAGES, STORAGES, Halves, storage_of

HIDDEN, INNER, HEADS, VOCABULARY = 64, 96, 4, 96
PROMPT = list(range(3, 40))

# Of the largest logit of a row.
TOLERANCE = 0.05


def _write(path: Path, encodings: dict[str, str]) -> Path:
    """A random Llama of one layer; the encoding of each kind of matrix, F32 where none is said."""
    generator = np.random.default_rng(0)
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {
        "token_embd": (VOCABULARY, HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN, HIDDEN),
        "blk.0.attn_v": (HIDDEN, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        values = generator.standard_normal(shape, np.float32) / np.float32(HIDDEN**0.5)
        encoding = encodings.get(name.split(".")[-1], encodings.get("*", "F32"))
        kind = GGMLQuantizationType[encoding]
        stored = values if encoding == "F32" else quantize(values, kind)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _logits(path: Path, encoding: str = "float32", keeps: bool = True) -> np.ndarray:
    """Logits of a prompt and of forced tokens."""
    model = ("model=local", f"model.source={path}", f"model.encoding={encoding}")
    compiled = compiled_alone(*model, keeps=keeps)
    return forced_logits(compiled, [(PROMPT, list(range(50, 60)))])[0]


@pytest.mark.parametrize(
    "encodings",
    [
        {"*": "BF16"},
        {"*": "Q4_1", "token_embd": "Q8_0"},
        # Projections of several encodings lie side by side.
        {"attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q8_0", "ffn_gate": "F16"},
    ],
    ids=str,
)
def test_kept_weights_give_the_logits_of_their_float32_values(
    encodings: dict[str, str], tmp_path: Path
) -> None:
    path = _write(tmp_path / "model.gguf", encodings)
    np.testing.assert_allclose(_logits(path), _logits(path, keeps=False), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "encodings",
    [
        {"*": "Q4_1", "token_embd": "Q8_0"},
        {"attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q8_0", "ffn_gate": "BF16"},
    ],
    ids=str,
)
def test_stored_blocks_are_off_by_the_rounding_of_activations(
    encodings: dict[str, str], tmp_path: Path
) -> None:
    path = _write(tmp_path / "model.gguf", encodings)
    wanted, found = _logits(path), _logits(path, "stored")
    error = np.abs(found - wanted).max(axis=-1) / np.abs(wanted).max(axis=-1)
    # More than nothing, and no more than was measured.
    assert 1e-5 < error.max() < TOLERANCE


def test_devices_that_share_stored_weights_give_the_same_tokens(tmp_path: Path) -> None:
    path = _write(tmp_path / "model.gguf", {"*": "Q8_0"})
    model = ("model=local", f"model.source={path}", "model.encoding=stored")
    alone, both = (
        greedy_ids(compiled_alone(*model, *more), [PROMPT], 8) for more in ((), ("deployment=tp2",))
    )
    assert alone == both


def test_plan_counts_the_bytes_of_each_encoding(tmp_path: Path) -> None:
    path = _write(tmp_path / "model.gguf", {"*": "Q4_1", "token_embd": "Q8_0"})
    model = ("model=local", f"model.source={path}")
    plan = plan_for(*model, "model.encoding=stored")
    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    # Blocks of 32: 20 bytes in Q4_1, 34 in Q8_0.
    assert plan.weights.kept["Q4_1"] == layer * 20 // 32
    assert plan.weights.kept["Q8_0"] == VOCABULARY * HIDDEN * 34 // 32
    assert sum(plan.weights.kept.values()) == plan.weights.total
    assert plan.weights.total == sum(share.weights for share in plan.devices)
    # What is computed exactly is kept alike; and where nothing is kept, float32 takes 4 bytes.
    assert plan_for(*model).weights == plan.weights
    converted = plan_for(*model, keeps=False).weights
    assert converted.kept == {"float32": converted.total}
    norms = plan.weights.kept["float32"]
    assert converted.total == 4 * (layer + VOCABULARY * HIDDEN) + norms


@pytest.mark.parametrize(
    ("encoding", "rows", "end"),
    [
        (None, 64, 64),
        ("F32", 64, 64),
        ("Q5_0", 64, 64),
        ("Q4_0", 64, 48),
        ("Q6_K", 64, 128),
        # MAX's kernels end the process there.
        ("Q4_K", 48, 256),
    ],
)
def test_what_no_kernel_takes_is_converted(encoding: str | None, rows: int, end: int) -> None:
    assert storage_of(encoding, rows, end, rounds=True) is None


def test_what_a_kernel_takes_is_kept() -> None:
    for encoding, storage in STORAGES.items():
        assert storage_of(encoding, 64, 256, 512, rounds=True) is storage
        assert storage_of(encoding, 64, 256, 512, rounds=False) == storage.exact
    # MAX's kernels round activations.
    assert set(STORAGES) - set(EXACT_STORAGES) == {"Q4_K", "Q6_K"}


def test_every_encoding_that_rounds_activations_has_a_tolerance_of_its_own() -> None:
    # 16 bits are widened to float32.
    rounding = {name for name, kept in STORAGES.items() if not isinstance(kept, Halves)}
    assert set(ROUNDED) == rounding


@pytest.mark.parametrize(
    ("encodings", "tolerance"),
    [
        ({"*": "F32"}, None),
        ({"*": "BF16"}, None),
        ({"*": "Q4_1"}, 0.12),
        ({"*": "Q4_0", "token_embd": "Q8_0"}, 0.15),
    ],
)
def test_verify_allows_what_the_encodings_that_are_kept_do(
    encodings: dict[str, str], tolerance: float | None, tmp_path: Path
) -> None:
    path = _write(tmp_path / "model.gguf", encodings)
    model = ("model=local", f"model.source={path}")
    assert _usual_tolerance(plan_for(*model, "model.encoding=stored")) == tolerance
    assert _usual_tolerance(plan_for(*model)) is None
