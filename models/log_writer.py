"""The thread that writes MAX's log, kept from interrupting those that compute.

MAX 26.7 starts it with the first graph that a process executes, whatever is logged. It wakes every
170 us, which takes a twelfth of one core; and as every product waits for the slowest core, a step
takes an eighth longer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from max.driver import Device

_TASKS = Path("/proc/self/task")
_LEAST_URGENT = 19
_started = False


@contextmanager
def yielding_log_writer(devices: Sequence[Device]) -> Iterator[None]:
    """Makes the log's writer yield to all other threads, where it is started meanwhile.

    On Linux; other systems have no policy of a thread's own.

    Args:
        devices: What a graph is executed on. Beside an accelerator nothing changes: its driver
            starts threads too, which must not wait.
    """
    global _started
    if _started or not _TASKS.is_dir() or not all(device.is_host for device in devices):
        yield
        return
    _started = True
    before = _threads()
    yield
    ours = {thread.native_id for thread in threading.enumerate()}
    caller = _name(threading.get_native_id())
    for thread in _threads() - before - ours:
        # MAX names its workers; a thread without a name of its own has that of its caller.
        if _name(thread) == caller:
            _yield_to_others(thread)


def _yield_to_others(thread: int) -> None:
    try:
        # It wakes as before, but waits until its core has nothing else to do or the clock ticks.
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, _LEAST_URGENT)
    except (PermissionError, ProcessLookupError):
        # A sandbox may refuse what Linux allows everybody, and steps are as slow as they were.
        return


def _threads() -> set[int]:
    return {int(entry.name) for entry in _TASKS.iterdir()}


def _name(thread: int) -> str | None:
    try:
        return (_TASKS / str(thread) / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # It has ended.
        return None
