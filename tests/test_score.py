"""Scores are Hugging Face's log-probabilities of each token given the ones before it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from conftest import compiled_for, expected
from test_command import rolecall

from builder.tasks.score import TokenScores


def _reference_logprobs() -> list[float]:
    values = expected("tiny_llama")
    logits = values["all_0"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = values["prompt_0"]
    return [logprobs[i, ids[i + 1]] for i in range(len(ids) - 1)]


def test_command_scores_match_hugging_face(tmp_path: Path) -> None:
    compiled_for("model=tiny_llama", "deployment=cpu_all_logits")
    ids = expected("tiny_llama")["prompt_0"].tolist()
    rolecall(tmp_path, "model=tiny_llama", "task=score", f"task.texts=[{ids},{ids[:1]}]")
    lines = (tmp_path / "job" / "scores.jsonl").read_text().splitlines()
    score, single = (json.loads(line) for line in lines)
    wanted = _reference_logprobs()
    np.testing.assert_allclose(score["logprobs"], wanted, atol=1e-4)
    assert math.isclose(score["logprob"], sum(wanted), abs_tol=1e-3)
    assert math.isclose(score["perplexity"], math.exp(-sum(wanted) / 6), rel_tol=1e-3)
    # One token has none before it to be scored by.
    assert (single["num_scored"], single["logprob"], single["perplexity"]) == (0, 0.0, None)


def test_chunks_are_scored_like_the_whole() -> None:
    values = expected("tiny_llama")
    collector = TokenScores(values["prompt_0"].tolist())
    for rows in np.split(values["all_0"], [3, 4]):
        collector.add(rows)
    np.testing.assert_allclose(collector.logprobs, _reference_logprobs(), atol=1e-5)
