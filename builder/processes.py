"""Processes by name: which one runs a job, and whether it is still there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def process_facts() -> dict[str, Any]:
    """What tells this process from every other: host, number, and when it began."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())}


def is_here(process: Mapping[str, Any]) -> bool:
    """Whether a process is, or was, of this host.

    Args:
        process: What ``process_facts`` said in it.
    """
    return bool(process["host"] == socket.gethostname())


def is_alive(process: Mapping[str, Any]) -> bool:
    """Whether a process is there; one of another host is thought to be.

    Args:
        process: What ``process_facts`` said in it.
    """
    if not is_here(process):
        return True
    return _began(process["pid"]) == process["began"] is not None


def seconds_since_start() -> float:
    """How long ago this process began, its interpreter's start included."""
    began = _began(os.getpid())
    assert began is not None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(began) / os.sysconf("SC_CLK_TCK")


def _began(pid: int) -> str | None:
    """The system's clock tick at which a process began; ``None`` where there is none."""
    file = Path(f"/proc/{pid}/stat")
    try:
        # The command's name, in brackets, may hold spaces.
        facts = file.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A zombie's parent has not asked yet.
    return None if facts[0] == "Z" else facts[19]
