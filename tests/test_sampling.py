"""Sampling keeps the candidates, and gives the probabilities, of Hugging Face's processors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import REFERENCE

from builder.sampling import Sampler, candidates, check_sampling, log_softmax
from builder.schema import SamplingConfig
from models.errors import ConfigError

CASES = json.loads((REFERENCE / "sampling.json").read_text())
LOGITS = np.array(CASES["logits"], np.float32)


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: str(case["sampling"]))
def test_probabilities_match_hugging_face(case: dict) -> None:
    ids, probabilities = candidates(LOGITS, SamplingConfig(**case["sampling"]))
    found = np.zeros(len(LOGITS))
    found[ids] = probabilities
    np.testing.assert_allclose(found, case["probabilities"], atol=1e-6)


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    assert Sampler(SamplingConfig(), 0).choose(np.array([0, 3, 3, 1], np.float32)) == 1


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    sampler = Sampler(SamplingConfig(temperature=1.0, seed=1), 0)
    counts = np.bincount([sampler.choose(logits) for _ in range(4000)], minlength=3)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.2], atol=0.03)


def test_equal_seeds_draw_alike_and_prompts_draw_apart() -> None:
    sampling = SamplingConfig(temperature=2.0, seed=7)

    def draws(index: int) -> list[int]:
        sampler = Sampler(sampling, index)
        return [sampler.choose(LOGITS) for _ in range(20)]

    assert draws(0) == draws(0)
    assert draws(0) != draws(1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", 2.0)],
)
def test_settings_out_of_range_are_refused_by_key(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"task\.sampling\.{key}: {value}"):
        check_sampling(SamplingConfig(**{key: value}))


def test_log_softmax_of_known_odds() -> None:
    found = log_softmax(np.log(np.array([[1, 3], [2, 2]], np.float32)))
    np.testing.assert_allclose(np.exp(found), [[0.25, 0.75], [0.5, 0.5]], rtol=1e-6)
