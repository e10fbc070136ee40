"""The command: ``rolecall`` and ``python -m builder``."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback

_STARTED = time.perf_counter()

# What the imports below make lives as long as the process: collecting among it is wasted.
gc.disable()

# Without an answer from DNS, MAX's telemetry holds up the exit for many seconds.
os.environ.setdefault("MODULAR_TELEMETRY_ENABLED", "0")

from pathlib import Path  # noqa: E402

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.types import RunMode  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from builder.compose import config_folder, explain, register_schema, to_config  # noqa: E402
from builder.interrupt import EXIT_STATUS, InterruptedJob, Interrupts  # noqa: E402
from builder.job import JobFolder  # noqa: E402
from builder.report import console  # noqa: E402
from builder.schema import TASKS  # noqa: E402
from builder.steps import FailedJob, Job, SomeRefused  # noqa: E402
from builder.tasks import task_runner  # noqa: E402
from models.errors import ConfigError  # noqa: E402

gc.freeze()
gc.enable()


class _Command:
    """One invocation: its jobs, and how those ended that did not succeed."""

    def __init__(self) -> None:
        self.began_jobs = False
        self.ended: list[ConfigError | FailedJob] = []
        self._began = _STARTED

    def run_job(self, composed: DictConfig) -> None:
        """Runs one job of a single run or a sweep.

        A job of this process that does not succeed is told at once and remembered for the exit
        status, and a sweep goes on. (Hydra keeps quiet until the end of a sweep and then tells of
        the first only.) A job of another process raises, for its launcher to carry over.
        """
        self.began_jobs = True
        try:
            run_job(composed, self._began)
        except (ConfigError, FailedJob) as error:
            hydra_config = HydraConfig.get()
            if not hydra_config.launcher._target_.endswith(".BasicLauncher"):
                raise
            self.ended.append(error)
            if hydra_config.mode is not RunMode.RUN:
                job = f"job {hydra_config.job.num}: {hydra_config.job.override_dirname}"
                print(f"{job}\n{_told(error)}", file=sys.stderr, flush=True)
        finally:
            self._began = time.perf_counter()

    def exit_status(self) -> int:
        """2 where the user asked for what can't be, else 1 where a task's answer is no."""
        if any(isinstance(error, ConfigError) for error in self.ended):
            return 2
        return 1 if self.ended else 0


def _told(error: ConfigError | FailedJob) -> str:
    return f"{'error' if isinstance(error, ConfigError) else 'failed'}: {error}"


def run_job(composed: DictConfig, began: float) -> None:
    """Runs one job and writes how it ended.

    Args:
        composed: The job's configuration, as Hydra composed it.
        began: When composing it began, by ``time.perf_counter``.

    Raises:
        ConfigError: If the user asked for something that can't be.
        FailedJob: If the task ran and its answer is no.
        InterruptedJob: If it was asked to stop.
    """
    folder = JobFolder(Path(HydraConfig.get().runtime.output_dir))

    def stopped() -> None:
        folder.write_status("interrupted")

    with Interrupts(on_exit=stopped) as interrupts:
        try:
            config = to_config(composed)
            job = Job(config, folder, interrupts, console())
            job.seconds["compose"] = time.perf_counter() - began
            name = next(name for name, task in TASKS.items() if type(config.task) is task)
            task_runner(name)(job)
        except (InterruptedJob, KeyboardInterrupt) as error:
            stopped()
            raise InterruptedJob from error
        except FailedJob as error:
            folder.write_status("failed", str(error), seconds=job.seconds)
            raise
        except ConfigError as error:
            if interrupts.requested:
                # What could not be fetched because the download was stopped too.
                stopped()
                raise InterruptedJob from error
            if not isinstance(error, SomeRefused):
                folder.discard()
            folder.write_status("error", str(error))
            raise
        except BaseException as error:
            folder.write_status("error", f"{type(error).__name__}: {error}")
            raise
        folder.write_status("ok", seconds=job.seconds)


_WITH_VALUE = {
    *("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"),
    *("--package", "-p", "--experimental-rerun"),
}
"""Hydra's options that a value follows."""


def _options_first(words: list[str]) -> list[str]:
    """Puts options before overrides: Hydra refuses overrides on both sides of an option."""
    options: list[str] = []
    overrides: list[str] = []
    follows = False
    for word in words:
        (options if follows or word.startswith("-") else overrides).append(word)
        follows = word in _WITH_VALUE
    return options + overrides


def main() -> None:
    """Runs the command.

    Exit status 0; 1 where a task's answer is no; 2 for a user's mistake; 130 when interrupted.
    """
    verbose = bool({"-v", "--verbose"} & set(sys.argv[1:]))
    words = [word for word in sys.argv[1:] if word not in ("-v", "--verbose")]
    sys.argv = [sys.argv[0], *_options_first(words)]
    verbose = verbose or "HYDRA_FULL_ERROR" in os.environ
    # So that Hydra hands every error to us, to be worded in one way.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register_schema()
    invocation = _Command()
    command = hydra.main(
        version_base="1.3", config_path=str(config_folder()), config_name="config"
    )(invocation.run_job)
    try:
        command()
    except InterruptedJob:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_STATUS)
    except Exception as error:
        # Before a job begins, whatever is wrong is in the overrides or the user's YAML.
        if invocation.began_jobs and not isinstance(error, ConfigError):
            raise
        if verbose:
            traceback.print_exc()
        worded = error if isinstance(error, ConfigError) else explain(error)
        print(_told(worded), file=sys.stderr)
        sys.exit(2)
    if len(invocation.ended) == 1 and not _is_multirun():
        (ended,) = invocation.ended
        if verbose:
            traceback.print_exception(ended)
        print(_told(ended), file=sys.stderr)
    elif invocation.ended:
        print(f"{len(invocation.ended)} jobs did not succeed", file=sys.stderr)
    sys.exit(invocation.exit_status())


def _is_multirun() -> bool:
    return bool({"-m", "--multirun"} & set(sys.argv[1:]))


if __name__ == "__main__":
    main()
