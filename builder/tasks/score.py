"""``task=score``: log-likelihood of texts."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from builder.interrupt import InterruptedJob
from builder.prompts import PromptReader, gather
from builder.sampling import Logits, Sampler, log_softmax
from builder.schema import Logits as LogitsChoice
from builder.schema import SamplingConfig, ScoreTask
from builder.steps import Job
from builder.tables import print_table
from builder.tokenizer import load_tokenizer
from models.errors import ConfigError


def run(job: Job) -> None:
    """Scores every text and writes scores.jsonl.

    Each token but the first is scored given the ones before it.

    Raises:
        ConfigError: If a text or a setting can't be used; nothing is compiled then.
        InterruptedJob: If it was asked to stop; texts that were scored are written.
    """
    task = job.config.task
    assert isinstance(task, ScoreTask)
    wanted = job.config.deployment.return_logits
    if wanted not in (None, LogitsChoice.all):
        raise ConfigError(
            f"deployment.return_logits: {wanted.value}, but scoring reads every token's logits\n"
            "  what works: deployment.return_logits=all"
        )
    plan = job.plan(needed_logits=LogitsChoice.all)
    tokenizer = load_tokenizer(plan.checkpoint, plan.model.tokenizer)
    reader = PromptReader(plan, tokenizer, room=0)
    texts = reader.read_all(gather("task.texts", task.texts, task.texts_file))
    compiled = job.compile(plan)
    from builder.run import Request, Runner

    collectors = [TokenScores(text.ids) for text in texts]
    requests = [
        Request(
            text.ids,
            0,
            Sampler(SamplingConfig(), index),
            adapter=text.adapter,
            crops=text.crops,
            on_logits=collector.add,
        )
        for index, (text, collector) in enumerate(zip(texts, collectors, strict=True))
    ]
    with job.step("run", f"scoring {len(texts)} {'text' if len(texts) == 1 else 'texts'}"):
        Runner(compiled).run(requests, should_stop=lambda: job.interrupts.requested)
    scores = [
        _score(text.given, collector)
        for text, collector, request in zip(texts, collectors, requests, strict=True)
        if request.finish != "interrupted"
    ]
    job.folder.write_lines("scores.jsonl", scores)
    _print(job, scores)
    if job.interrupts.requested:
        raise InterruptedJob


class TokenScores:
    """Collects one text's log-probabilities as its chunks are computed.

    Args:
        ids: The text.
    """

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.logprobs: list[float] = []
        self._seen = 0

    def add(self, logits: Logits) -> None:
        """Takes float32 ``[rows, vocabulary]``: row i predicts the token after token i."""
        next_ids = self.ids[self._seen + 1 : self._seen + 1 + len(logits)]
        chosen = log_softmax(logits)[np.arange(len(next_ids)), next_ids]
        self.logprobs += chosen.astype(float).tolist()
        self._seen += len(logits)


def _score(given: str | list[int], collector: TokenScores) -> dict[str, Any]:
    scored = len(collector.logprobs)
    total = math.fsum(collector.logprobs)
    return {
        "text": given,
        "ids": collector.ids,
        "logprobs": collector.logprobs,
        "logprob": total,
        "num_scored": scored,
        "perplexity": _perplexity(total, scored),
    }


def _perplexity(total: float, scored: int) -> float | None:
    # No perplexity of nothing, nor one too large for a float.
    if not scored or -total / scored > math.log(sys.float_info.max):
        return None
    return math.exp(-total / scored)


def _print(job: Job, scores: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("text", no_wrap=True, max_width=60, overflow="ellipsis")
    for heading in ("tokens", "log-likelihood", "perplexity"):
        table.add_column(heading, justify="right")
    for score in scores:
        perplexity = score["perplexity"]
        table.add_row(
            str(score["text"]),
            str(len(score["ids"])),
            f"{score['logprob']:.3f}",
            "" if perplexity is None else f"{perplexity:.2f}",
        )
    print_table(table, job.out)
