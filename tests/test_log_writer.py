"""The thread of MAX's log yields to those that compute, and no other thread does."""

from __future__ import annotations

import json
import os
import sys

import pytest
from conftest import compiled_alone, printed_by

THREADS = """
import json, os, threading
from conftest import compiled_alone, greedy_ids
beside = threading.Event()
threading.Thread(target=beside.wait, daemon=True).start()
compiled = compiled_alone("model=tiny_llama")
ids = greedy_ids(compiled, [[5, 6, 7]], 4)
print(json.dumps({
    "main": os.getpid(),
    "ids": ids,
    "threads": [
        [int(task), open(f"/proc/self/task/{task}/comm").read().strip(),
         os.sched_getscheduler(int(task)), os.getpriority(os.PRIO_PROCESS, int(task))]
        for task in os.listdir("/proc/self/task")
    ],
}))
"""
"""Executes a graph in a process that has executed none, and says how its threads are scheduled."""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have policies of their own on Linux")
def test_only_the_writer_of_the_log_yields() -> None:
    compiled_alone("model=tiny_llama")
    told = json.loads(printed_by(THREADS)[-1])
    yielding = {task for task, _, policy, _ in told["threads"] if policy == os.SCHED_BATCH}
    assert len(yielding) == 1
    assert told["main"] not in yielding
    for task, name, policy, priority in told["threads"]:
        assert (policy, priority) == ((3, 19) if task in yielding else (0, 0)), name
    workers = [task for task, name, *_ in told["threads"] if "Thread" in name]
    assert workers
    assert yielding.isdisjoint(workers)
