"""The process that a sweep's jobs run in: it may be killed, and the sweep goes on.

Jobs share what they open and load in it (``builder.shared``). Whatever ends it, such as the system
where memory runs out, ends one job.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

from builder.compose import register_schema
from builder.job import JobFolder, read_json
from builder.jobs import Ended, job_facts, run_job
from builder.shared import Shared
from builder.summary import ENDED_SILENTLY, KILLED

STARTED_BY = "ROLECALL_WORKER"
"""The environment variable that holds the number of the worker's connection."""


@dataclass(frozen=True)
class _Order:
    """A job to run."""

    composed: DictConfig
    """Its configuration."""

    hydra: dict[str, Any]
    """Hydra's own, of the same job, as plain values: a plugin's classes may not be here."""

    environment: dict[str, str]
    """The environment, which Hydra may set for a job."""

    directory: Path
    """The working directory, which Hydra may change for a job."""

    seconds: float
    """How long composing it took."""


class Worker:
    """Runs jobs in a process of their own, which is started when the first comes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, composed: DictConfig, began: float, is_stopped: Callable[[], bool]) -> Ended:
        """Runs one job.

        Args:
            composed: Its configuration.
            began: When composing it began, by ``time.perf_counter``.
            is_stopped: Whether another process asked it to stop.
        """
        process, connection = self._started()
        order = _Order(
            composed,
            _plain(HydraConfig.get()),
            dict(os.environ),
            Path.cwd(),
            time.perf_counter() - began,
        )
        with _forwarding(process) as asked:
            try:
                connection.send(order)
                ended: Ended = connection.recv()
            except (EOFError, OSError):
                ended = self._lost(process, stopped=bool(asked) or is_stopped())
        return replace(ended, stops=bool(asked))

    def close(self) -> None:
        """Ends the process."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._connection = None

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if self._process is None or self._connection is None:
            ours, theirs = Pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "builder.worker"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # As Python knows it: MAX puts another interpreter into the process' own.
                env={**os.environ, STARTED_BY: str(theirs.fileno())},
                # Signals of the terminal are passed on, once.
                start_new_session=True,
            )
            theirs.close()
            self._connection = ours
        return self._process, self._connection

    def _lost(self, process: subprocess.Popen[bytes], *, stopped: bool) -> Ended:
        status = process.wait()
        self.close()
        hydra = HydraConfig.get()
        folder = JobFolder.left_behind(Path(hydra.runtime.output_dir), job_facts(hydra))
        if stopped:
            # Before it began, or inside a call that can't be interrupted.
            folder.write_status("interrupted")
            return Ended(status="interrupted")
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        folder.write_status(KILLED, ENDED_SILENTLY, process_ended_with=how)
        return Ended(status=KILLED, error=f"{ENDED_SILENTLY}, with {how}")


@cache
def process_worker() -> Worker:
    """The one worker of this process."""
    return Worker()


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Passes SIGINT and SIGTERM on to a process, which ends its job and says so.

    Yields:
        The signals that came.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    begun = Path(HydraConfig.get().runtime.output_dir) / JobFolder.BEGUN

    def forward(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        facts = read_json(begun)
        # Until it has begun the job it handles no signal.
        runs = facts is not None and facts["process"]["pid"] == process.pid
        process.send_signal(number if runs else signal.SIGKILL)

    previous = {
        number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _serve(connection: Connection) -> None:
    """Runs what is ordered until the other side is gone."""
    register_schema()
    setup_globals()
    shared = Shared(several=True)
    orders = _Orders(connection)
    for order in orders:
        began = time.perf_counter() - order.seconds
        os.environ.clear()
        os.environ.update(order.environment)
        os.chdir(order.directory)
        _enter(order.hydra)
        connection.send(run_job(order.composed, began, shared))


def _plain(hydra: HydraConf) -> dict[str, Any]:
    """What a job asks Hydra for, as plain values."""
    return {
        "mode": hydra.mode,
        "sweep": {"dir": hydra.sweep.dir},
        "job": {"name": hydra.job.name, "num": hydra.job.num, "config_name": hydra.job.config_name},
        "runtime": OmegaConf.to_container(hydra.runtime, resolve=True),
        # As they were written: what looks like an interpolation may be a prompt.
        "overrides": OmegaConf.to_container(hydra.overrides),
    }


def _enter(hydra: dict[str, Any]) -> None:
    """Lets Hydra say of the job what it says in the process that composed it."""
    own = OmegaConf.merge(OmegaConf.structured(HydraConf), hydra)
    HydraConfig.instance().set_config(OmegaConf.create({"hydra": own}))


class _Orders:
    """The orders that come, read by a thread: it notices at once that the other side is gone.

    Args:
        connection: Where they come from.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._came = threading.Semaphore(0)
        self._order = b""
        threading.Thread(target=self._read, daemon=True, name="orders").start()

    def _read(self) -> None:
        while True:
            try:
                self._order = self._connection.recv_bytes()
            except (EOFError, OSError):
                # Also in the middle of a job: nobody waits for it.
                os._exit(0)
            self._came.release()

    def __iter__(self) -> Iterator[_Order]:
        while True:
            self._came.acquire()
            order: _Order = pickle.loads(self._order)
            yield order


def main() -> None:
    """Serves the process that started this one."""
    os.environ.setdefault("MODULAR_TELEMETRY_ENABLED", "0")
    _serve(Connection(int(os.environ.pop(STARTED_BY))))


if __name__ == "__main__":
    # By its own name, as orders are pickled.
    from builder import worker

    worker.main()
