"""Each family computes what Hugging Face transformers computes from the same checkpoint."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import numpy as np
from conftest import REFERENCE, compiled_for, expected, family_overrides, forced_logits, greedy_ids
from safetensors.numpy import save_file

from models.checkpoints import SafetensorsCheckpoint

PROMPTS = range(4)


def test_logits_match_hugging_face_at_prefill_and_each_decode_step(family: str) -> None:
    values = expected(family)
    compiled = compiled_for(*family_overrides(family))
    for i in PROMPTS:
        (found,) = forced_logits(compiled, [(values[f"prompt_{i}"], values[f"forced_{i}"])])
        np.testing.assert_allclose(found, values[f"logits_{i}"], atol=1e-4, rtol=0)


def test_logits_match_hugging_face_in_one_mixed_batch(family: str) -> None:
    values = expected(family)
    sequences = [(values[f"prompt_{i}"], values[f"forced_{i}"]) for i in PROMPTS]
    found = forced_logits(compiled_for(*family_overrides(family)), sequences)
    for i in PROMPTS:
        np.testing.assert_allclose(found[i], values[f"logits_{i}"], atol=1e-4, rtol=0)


def test_greedy_ids_match_hugging_face(family: str) -> None:
    values = expected(family)
    prompts = [values[f"prompt_{i}"] for i in PROMPTS]
    found = greedy_ids(compiled_for(*family_overrides(family)), prompts, 16)
    assert found == [values[f"greedy_{i}"].tolist() for i in PROMPTS]


def test_float32_folder_is_computed_from_where_it_is_mapped(tmp_path: Path) -> None:
    # Its tensors are not copied, so they have to outlive everything that only loads them.
    checkpoint = SafetensorsCheckpoint(REFERENCE / "tiny_llama")
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.tensors}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(REFERENCE / "tiny_llama" / "config.json", tmp_path)
    values = expected("tiny_llama")
    compiled = compiled_for("model=local", f"model.source={tmp_path}")
    gc.collect()
    for i in PROMPTS:
        (found,) = forced_logits(compiled, [(values[f"prompt_{i}"], values[f"forced_{i}"])])
        np.testing.assert_allclose(found, values[f"logits_{i}"], atol=1e-4, rtol=0)
