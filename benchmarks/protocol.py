"""What the runner and an engine's process say to each other: JSON lines, one answer per case.

The engine's side is here: it needs nothing but Python, as its interpreter may have nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TextIO

Prompts = Sequence[Sequence[int]]


@dataclass
class Generation:
    """What an engine's greedy continuation of some prompts took."""

    ids: list[list[int]]
    """Each prompt's continuation."""

    started: float = field(default_factory=time.perf_counter)
    """When it began, by ``time.perf_counter``."""

    times: list[float] = field(default_factory=list)
    """When every prompt had its first token, then its second, and so on."""

    def add(self, tokens: Sequence[int]) -> None:
        """Takes one more token of every sequence.

        Args:
            tokens: The tokens.
        """
        self.times.append(time.perf_counter())
        for ids, token in zip(self.ids, tokens, strict=True):
            ids.append(token)


Generate = Callable[[Prompts, int], Generation]
"""An engine: prompts of one length and how many tokens to generate of each, to what it took."""


def measure(generate: Generate, prompts: Prompts, new: int) -> dict[str, Any]:
    """Measures one case.

    The first prompt's prefill is timed alone, the decode steps with the whole batch.

    Args:
        generate: The engine.
        prompts: The batch's prompts, of one length.
        new: Tokens to generate of each.
    """
    whole = generate(prompts, new)
    alone = whole if len(prompts) == 1 else generate(prompts[:1], 1)
    ttft = alone.times[0] - alone.started
    steps = [after - before for before, after in pairwise(whole.times)]
    return {
        "ttft_ms": ttft * 1e3,
        "prefill_tok_s": len(prompts[0]) / ttft,
        "decode_tok_s": len(prompts) * len(steps) / sum(steps) if steps else None,
        "step_ms": [step * 1e3 for step in steps],
        "ids": whole.ids,
    }


def serve(load: Callable[[dict[str, Any]], tuple[Generate, str]]) -> None:
    """Runs an engine's process: loads it, says so, and answers cases until its input ends.

    Args:
        load: Makes the engine of its settings (the command line's one argument) and says its
            version.
    """
    answers = _own_stdout()
    began = time.perf_counter()
    generate, version = load(json.loads(sys.argv[1]))
    _say(answers, {"version": version, "load_s": time.perf_counter() - began})
    for line in sys.stdin:
        case = json.loads(line)
        _say(answers, measure(generate, case["prompts"], case["new"]))


def _own_stdout() -> TextIO:
    """Standard output for answers alone; what libraries print goes to standard error."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
