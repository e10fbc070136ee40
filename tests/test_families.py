"""Each family computes what Hugging Face transformers computes from the same checkpoint."""

from __future__ import annotations

import numpy as np
from conftest import compiled_for, expected, forced_logits, greedy_ids

PROMPTS = range(4)


def test_logits_match_hugging_face_at_prefill_and_each_decode_step(family: str) -> None:
    values = expected(family)
    compiled = compiled_for(f"model={family}")
    for i in PROMPTS:
        (found,) = forced_logits(compiled, [(values[f"prompt_{i}"], values[f"forced_{i}"])])
        np.testing.assert_allclose(found, values[f"logits_{i}"], atol=1e-4, rtol=0)


def test_logits_match_hugging_face_in_one_mixed_batch(family: str) -> None:
    values = expected(family)
    sequences = [(values[f"prompt_{i}"], values[f"forced_{i}"]) for i in PROMPTS]
    found = forced_logits(compiled_for(f"model={family}"), sequences)
    for i in PROMPTS:
        np.testing.assert_allclose(found[i], values[f"logits_{i}"], atol=1e-4, rtol=0)


def test_greedy_ids_match_hugging_face(family: str) -> None:
    values = expected(family)
    prompts = [values[f"prompt_{i}"] for i in PROMPTS]
    found = greedy_ids(compiled_for(f"model={family}"), prompts, 16)
    assert found == [values[f"greedy_{i}"].tolist() for i in PROMPTS]
