"""Engines as processes that stay loaded, asked in turn: what one turn meets, the next does too.

An engine is stopped while it isn't asked: MAX's threads, for one, keep polling for work.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from benchmarks.catalogue import Engine, environment
from benchmarks.workload import Case

T = TypeVar("T")


class EngineFailedError(Exception):
    """An engine's process ended, with the signal that ended it and the last line that it wrote."""


@dataclass(frozen=True)
class Measured:
    """One engine's answer to one case of one repeat."""

    engine: str
    """The engine's name."""

    case: Case
    """The case."""

    repeat: int
    """Which repeat."""

    answer: dict[str, Any]
    """What it answered."""


class EngineProcess:
    """An engine's process, from its start until it is closed.

    Args:
        engine: The engine.
        python: Its interpreter.
        settings: What it is given.
        log: Where what it writes on standard error is kept.
    """

    def __init__(self, engine: Engine, python: Path, settings: dict[str, Any], log: Path) -> None:
        self.name = engine.name
        self._log = log
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [str(python), "-m", f"benchmarks.engines.{engine.module}", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=environment(),
                text=True,
            )
        try:
            self.facts = self._answer()
        except EngineFailedError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
        """Runs a case.

        Args:
            prompts: The batch's prompts.
            new: Tokens to generate of each.

        Raises:
            EngineFailedError: If its process ended.
        """
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        self._process.send_signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> EngineFailedError:
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing").strip()
        # What a signal ends has no word for it: the last line is then of something that went well.
        status = self._process.wait()
        end = f"ended by {signal.strsignal(-status)}; before it: " if status < 0 else ""
        return EngineFailedError(f"{end}{last} (all of it: {self._log})")


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items, of which another is first each turn.

    Args:
        items: The items.
        turn: The turn's number.
    """
    first = turn % len(items) if items else 0
    return [*items[first:], *items[:first]]


def alternate(
    names: Sequence[str],
    cases: Sequence[Case],
    repeats: int,
    ask: Callable[[str, Case, int], dict[str, Any] | None],
) -> list[Measured]:
    """Runs every case with every engine in turn, again and again.

    Args:
        names: The engines.
        cases: The cases.
        repeats: How often.
        ask: Runs one; ``None`` where the engine is lost, which is not asked again.
    """
    found = []
    lost: set[str] = set()
    for repeat in range(repeats):
        for at, case in enumerate(cases):
            for name in rotated(names, repeat * len(cases) + at):
                answer = None if name in lost else ask(name, case, repeat)
                if answer is None:
                    lost.add(name)
                else:
                    found.append(Measured(name, case, repeat, answer))
    return found
