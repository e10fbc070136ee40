"""A sweep: its jobs' folders, and one summary of them whatever launched the jobs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from builder.job import JobFolder, read_json, write_whole
from builder.jobs import GROUPS, Ended, job_facts, sweep_folder
from builder.processes import is_alive, is_here, process_facts
from builder.summary import (
    ENDED_SILENTLY,
    KILLED,
    NOT_RUN,
    JobRow,
    as_csv,
    as_markdown,
    job_files,
    read_rows,
)
from builder.worker import process_worker

LIST = "sweep.json"
"""The jobs that a sweep has, in its folder."""

STOPPED = ".stopped"
"""There where a sweep was asked to stop: jobs that other processes have yet to begin don't."""

POLL_S = 0.2
"""How often is asked what jobs in other processes do, in seconds."""

RELAUNCHED = "ROLECALL_RELAUNCHED"
"""The environment variable that holds the folder of a sweep whose launcher was started again."""

BEGIN_S = 60.0
"""How long a job in another process may take to begin, in seconds."""

STOP_S = 10.0
"""How long a job that is asked to stop may take before it is ended, in seconds."""


class Sweep:
    """The folder of a sweep, or one with many runs.

    Args:
        folder: The folder.
        launcher: The class that launches its jobs; ``None`` where every run is meant, whatever
            it belongs to.
    """

    def __init__(self, folder: Path, launcher: str | None) -> None:
        self.folder = folder
        self.is_pool = launcher is not None and launcher.endswith(".JoblibLauncher")
        """Whether its jobs' processes end where one of them does."""
        self._begins_later = launcher is not None and "submitit" in launcher
        self._own = None if launcher is None else str(folder)

    @property
    def has_begun(self) -> bool:
        """Whether any job has begun."""
        return any(row.status != NOT_RUN for row in self.rows())

    @property
    def num_not_run(self) -> int:
        """How many jobs have not begun."""
        return sum(row.status == NOT_RUN for row in self.rows())

    def is_stopped(self) -> bool:
        """Whether it was asked to stop."""
        return (self.folder / STOPPED).is_file()

    def begin(self, jobs: list[dict[str, Any]]) -> None:
        """Lists the jobs; a folder that is used again keeps none of the sweep before.

        Args:
            jobs: What is asked for in each.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / STOPPED).unlink(missing_ok=True)
        if os.environ.get(RELAUNCHED) != str(self.folder):
            for row in self.rows():
                JobFolder(self.folder / row.job).clear()
        write_whole(
            self.folder / LIST, json.dumps({"jobs": jobs}, ensure_ascii=False, indent=1) + "\n"
        )

    def rows(self) -> list[JobRow]:
        """Every job, also those that did not begin."""
        listed = read_json(self.folder / LIST) or {"jobs": []}
        return read_rows(self.folder, listed["jobs"], self._own)

    def rebuild(self) -> list[JobRow]:
        """Writes summary.csv, summary.md and report.html anew, from the jobs' files."""
        # A single run does without templates.
        from builder.page import as_html

        with _locked(self.folder / ".summary.lock"):
            rows = self.rows()
            write_whole(self.folder / "summary.csv", as_csv(rows))
            write_whole(self.folder / "summary.md", as_markdown(rows))
            write_whole(self.folder / "report.html", as_html(rows, self.folder.name))
        return rows

    def finish(self, *, stop: bool) -> list[JobRow]:
        """Waits for jobs that other processes run still, and says of each how it ended.

        A launcher may end before its jobs do, when one of them is killed.

        Args:
            stop: Whether they are asked to stop.
        """
        process_worker().close()
        if stop:
            (self.folder / STOPPED).touch()
        self._wait(STOP_S if stop else None, stop=stop)
        for path, process in self._begun().items():
            if stop and is_here(process) and _is_elsewhere(process):
                os.kill(process["pid"], signal.SIGKILL)
            if is_here(process):
                ended = ("interrupted", None) if stop else (KILLED, ENDED_SILENTLY)
                JobFolder.left_behind(path).write_status(*ended)
        return self.rebuild()

    def _begun(self) -> dict[Path, dict[str, Any]]:
        """The folders of this sweep's jobs that have not ended, and their processes."""
        found = {}
        for path, file in job_files(self.folder).items():
            facts = read_json(file) if file.name == JobFolder.BEGUN else None
            if facts is not None and facts["job"]["sweep"] == self._own:
                found[path] = facts["process"]
        return found

    def _wait(self, limit: float | None, *, stop: bool) -> None:
        began = time.monotonic()
        asked: set[int] = set()
        while limit is None or time.monotonic() - began < limit:
            running = list(filter(_is_elsewhere, self._begun().values()))
            waits = self._begins_later and not stop and time.monotonic() - began < BEGIN_S
            if not running and not (waits and self.num_not_run):
                return
            for process in running:
                if stop and is_here(process) and process["pid"] not in asked:
                    os.kill(process["pid"], signal.SIGTERM)
                    asked.add(process["pid"])
            time.sleep(POLL_S)


def _is_elsewhere(process: Mapping[str, Any]) -> bool:
    """Whether a job is run by another process; what this one began is over."""
    return process != process_facts() and is_alive(process)


def run_in_sweep(composed: DictConfig, began: float) -> Ended:
    """Runs one job of a sweep in this process' worker, and rebuilds the sweep's summary.

    Args:
        composed: The job's configuration.
        began: When composing it began, by ``time.perf_counter``.
    """
    hydra = HydraConfig.get()
    sweep = Sweep(sweep_folder(hydra), hydra.launcher._target_)
    folder = JobFolder(Path(hydra.runtime.output_dir))
    if os.environ.get(RELAUNCHED) == str(sweep.folder) and folder.has_status:
        # What became of it was told.
        return Ended(status="ok")
    folder.begin(job_facts(hydra), process_facts())
    # It starts every job at once.
    starts_all = hydra.launcher._target_.endswith(".LocalLauncher")
    with _turn(sweep.folder) if starts_all else nullcontext():
        if sweep.is_stopped():
            folder.clear()
            return Ended(status="interrupted")
        ended = process_worker().run(composed, began, sweep.is_stopped)
    sweep.rebuild()
    return ended


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Waits for one of as many turns as this machine has cores.

    Args:
        folder: The sweep's folder.
    """
    files = [(folder / f".turn-{number}.lock").open("w") for number in range(os.cpu_count() or 1)]
    try:
        while not any(map(_lock_if_free, files)):
            time.sleep(POLL_S)
        yield
    finally:
        for file in files:
            file.close()


def _lock_if_free(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_begun: list[Sweep] = []


def begun_sweep() -> Sweep | None:
    """The sweep that this process began."""
    return _begun[-1] if _begun else None


class SweepCallback(Callback):
    """Lists a sweep's jobs before the first of them begins; Hydra calls it."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Lists the jobs, where the sweeper takes the product of choices.

        Args:
            config: The sweep's configuration.
        """
        sweep = Sweep(sweep_folder(config.hydra), config.hydra.launcher._target_)
        sweep.begin(_product(config.hydra))
        _begun.append(sweep)


def _product(hydra: DictConfig) -> list[dict[str, Any]]:
    """What is asked for in each job of a sweep; nothing where a search chooses as it goes."""
    if not hydra.sweeper._target_.endswith(".BasicSweeper"):
        return []
    params = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
    loader = GlobalHydra.instance().config_loader()
    # As they were written: what looks like an interpolation may be a prompt.
    words = OmegaConf.to_container(hydra.overrides.task)
    assert isinstance(words, list)
    overrides = OverridesParser.create(loader).parse_overrides([*params, *map(str, words)])
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    return [
        {
            "num": number,
            **{group: str(hydra.runtime.choices.get(group)) for group in GROUPS},
            **dict(pair for pair in map(_pair, words) if pair[0] in GROUPS),
            "overrides": [word for word in words if _pair(word)[0] not in GROUPS],
        }
        for number, words in enumerate(jobs)
    ]


def _pair(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value
