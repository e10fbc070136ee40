"""The wall time of a whole command to its first token, ours and MAX's own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.alternate import rotated
from benchmarks.catalogue import environment
from benchmarks.workload import Workload
from builder.serving import max_command, served_folder

PROMPT = "Explain what a KV cache is in two sentences."


class CommandFailedError(Exception):
    """A command ended with another status than 0."""


def commands(work: Workload, out: Path) -> dict[str, list[str]]:
    """The commands, by what tables call them.

    Args:
        work: The deployment.
        out: Where ours writes.
    """
    return {
        "rolecall": [
            *(sys.executable, "-m", "builder", *work.overrides, *work.limits),
            *(f"task.prompts=[{json.dumps(PROMPT)}]", "task.max_new_tokens=1"),
            f"hydra.run.dir={out / 'rolecall'}",
        ],
        "max generate": max_command(
            *("generate", f"--model={served_folder(work.plan)}", "--devices=cpu"),
            *("--quantization-encoding=float32", f"--max-length={work.max_length}"),
            *("--max-batch-size=1", f"--device-memory-utilization={work.memory_share(1):.4f}"),
            *("--no-enable-prefix-caching", "--top-k=1"),
            *("--max-new-tokens=1", "--prompt", PROMPT),
        ),
    }


def measure(
    given: dict[str, list[str]], repeats: int, out: Path, told: Callable[[str], None]
) -> dict[str, list[float]]:
    """Times every command in turn, after a first time that only fills the caches.

    Args:
        given: The commands.
        repeats: How often each is timed.
        out: Where what they write is kept.
        told: Told of each time.

    Raises:
        CommandFailedError: If one fails.
    """
    seconds: dict[str, list[float]] = {name: [] for name in given}
    for repeat in range(-1, repeats):
        for name in rotated(list(given), max(repeat, 0)):
            log = out / f"{name.replace(' ', '-')}.log"
            began = time.perf_counter()
            with log.open("w") as stream:
                done = subprocess.run(
                    given[name], stdout=stream, stderr=stream, env=environment(), check=False
                )
            took = time.perf_counter() - began
            if done.returncode:
                raise CommandFailedError(f"{name}: exit status {done.returncode}, see {log}")
            told(f"{'warming' if repeat < 0 else repeat + 1}  {name}: {took:.2f} s")
            if repeat >= 0:
                seconds[name].append(took)
    return seconds


def ratios(seconds: dict[str, list[float]], baseline: str) -> dict[str, float]:
    """How many times as long as the baseline each takes: the median of the repeats' ratios.

    Args:
        seconds: The times of each.
        baseline: The command that ratios are of.
    """
    return {
        name: median(own / base for own, base in zip(took, seconds[baseline], strict=True))
        for name, took in seconds.items()
    }


def table(seconds: dict[str, list[float]], baseline: str) -> Table:
    """The times for people.

    Args:
        seconds: The times of each.
        baseline: The command that ratios are of.
    """
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("command", no_wrap=True)
    for heading in ("seconds", "least", f"x {baseline}"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    times = ratios(seconds, baseline)
    for name, took in seconds.items():
        drawn.add_row(name, f"{median(took):.2f}", f"{min(took):.2f}", f"{times[name]:.2f}")
    return drawn
