"""An order that a process of its own carries out: what it does to itself ends with it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.interrupt import InterruptedJob

POLL_S = 0.2
"""How often is asked whether to stop, in seconds."""


@dataclass(frozen=True)
class Answer:
    """What came of an order."""

    contents: Any
    """What the process answered; ``None`` where a signal ended it."""

    signal: str | None
    """The signal that ended it."""


def carry_out(
    module: str,
    order: object,
    should_stop: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    memory_limit: float = float("inf"),
) -> Answer:
    """Lets a module carry out an order, in a new process.

    Args:
        module: The module, which calls ``answer_order``.
        order: What it is told, pickled.
        should_stop: Asked several times a second.
        environment: What the process has in its environment beside this one's.
        memory_limit: The bytes beyond which it is killed.

    Raises:
        InterruptedJob: If it was asked to stop.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # As Python knows it: Mojo puts another interpreter into the process' own (26.7).
        env={**os.environ, **(environment or {})},
        # Ctrl-C is this process' to notice.
        start_new_session=True,
    )
    try:
        output, said = _wait(process, pickle.dumps(order), should_stop, memory_limit)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    # A status of its own is a defect of ours; a signal ends MAX's compiler.
    assert process.returncode <= 0, said.decode()
    if process.returncode:
        return Answer(None, signal.Signals(-process.returncode).name)
    return Answer(json.loads(output), None)


def _wait(
    process: subprocess.Popen[bytes],
    order: bytes,
    should_stop: Callable[[], bool],
    memory_limit: float,
) -> tuple[bytes, bytes]:
    """What a process writes until it ends, to standard output and error."""
    given: bytes | None = order
    while True:
        try:
            return process.communicate(given, timeout=POLL_S)
        except subprocess.TimeoutExpired:
            # It goes on where it was, and takes no input a second time.
            given = None
            if should_stop():
                raise InterruptedJob from None
            if _resident_bytes(process.pid) > memory_limit:
                process.kill()


def _resident_bytes(pid: int) -> int:
    """The memory that a process has; 0 where the system does not tell."""
    file = Path(f"/proc/{pid}/statm")
    pages = int(file.read_text().split()[1]) if file.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def answer_order(work: Callable[[Any], Any]) -> None:
    """Carries out what standard input orders, answers in JSON, and ends the process.

    Args:
        work: What is done with the order.
    """
    os.environ.setdefault("MODULAR_TELEMETRY_ENABLED", "0")
    order = pickle.load(sys.stdin.buffer)
    # MAX may print; the answer is alone on standard output.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    status = 0
    try:
        json.dump(work(order), answer)
        answer.close()
    except BaseException:  # noqa: BLE001 - told with its traceback
        traceback.print_exc()
        sys.stderr.flush()
        status = 1
    # Devices that are none have nothing to tear down, and MAX may hang trying.
    os._exit(status)
