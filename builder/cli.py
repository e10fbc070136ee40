"""The command: ``rolecall`` and ``python -m builder``."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any

_STARTED = time.perf_counter()

# What the imports below make lives as long as the process: collecting among it is wasted.
gc.disable()

# Without an answer from DNS, MAX's telemetry holds up the exit for many seconds.
os.environ.setdefault("MODULAR_TELEMETRY_ENABLED", "0")


import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.types import RunMode  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from builder.compose import register_schema  # noqa: E402
from builder.help import help_page  # noqa: E402
from builder.interrupt import EXIT_STATUS, InterruptedJob  # noqa: E402
from builder.jobs import Ended, job_facts, run_job  # noqa: E402
from builder.loading import command_request, config_folder  # noqa: E402
from builder.options import options_first  # noqa: E402
from builder.shared import Shared  # noqa: E402
from builder.summary import print_rows  # noqa: E402
from builder.sweep import RELAUNCHED, Sweep, begun_sweep, run_in_sweep  # noqa: E402
from builder.tables import console  # noqa: E402
from builder.words import MISTAKES, check_hydra_words, explain  # noqa: E402
from models.errors import ConfigError  # noqa: E402

gc.freeze()
gc.enable()

# Importing MAX names another Python in the process's environment, behind os.environ, and the
# processes that launchers start would take it for theirs.
os.unsetenv("PYTHONEXECUTABLE")


class _Command:
    """One invocation, for Hydra to call with each of its jobs.

    Args:
        verbose: Whether tracebacks are printed.
    """

    def __init__(self, verbose: bool) -> None:
        self.ended: Ended | None = None
        self._verbose = verbose
        self._began = _STARTED

    def __call__(self, composed: DictConfig) -> float | None:
        """Runs a job, and tells at once what went wrong.

        A sweep goes on after it: what became of its jobs is in their folders, whatever launched
        them.

        Args:
            composed: Its configuration.

        Returns:
            The figure that a search maximises, where the task has one.
        """
        hydra_config = HydraConfig.get()
        if hydra_config.mode is RunMode.RUN:
            # Two deployments of a checkpoint are compared.
            shared = Shared(several=hydra_config.runtime.choices["task"] == "verify")
            ended = run_job(composed, self._began, shared)
        else:
            ended = run_in_sweep(composed, self._began)
            if ended.status not in ("ok", "interrupted"):
                print(_named(job_facts(hydra_config)), file=sys.stderr)
        if ended.status == "interrupted":
            raise InterruptedJob
        if ended.trace is not None and (self._verbose or ended.is_defect):
            print(ended.trace, file=sys.stderr, end="")
        if ended.status != "ok" and not ended.is_defect:
            print(ended.told, file=sys.stderr, flush=True)
        if ended.stops and hydra_config.mode is not RunMode.RUN:
            # A sweep ends; a job alone, such as a server, came to its end.
            raise InterruptedJob
        self.ended = ended
        self._began = time.perf_counter()
        return ended.objective


def main() -> None:
    """Runs the command.

    Exit status 0; 1 where a task's answer is no; 2 for a user's mistake; 130 when interrupted.
    """
    verbose = bool({"-v", "--verbose"} & set(sys.argv[1:]))
    sys.argv[1:] = [word for word in sys.argv[1:] if word not in ("-v", "--verbose")]
    verbose = verbose or "HYDRA_FULL_ERROR" in os.environ
    # So that Hydra hands every error to us, to be worded in one way.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register_schema()
    # Outside a job, which has a handler of its own, it ends a sweep as Ctrl-C does.
    signal.signal(signal.SIGTERM, _stop)
    command = _Command(verbose)
    status = _launched(command, verbose)
    sweep = begun_sweep()
    lost = 0
    # A process of a pool's own was killed, and the jobs that had not begun went with it.
    while status == 1 and sweep is not None and sweep.is_pool and lost != sweep.num_not_run:
        lost = sweep.num_not_run
        sweep.finish(stop=False)
        print(f"the launcher is started again, for {lost} jobs", file=sys.stderr, flush=True)
        os.environ[RELAUNCHED] = str(sweep.folder)
        sys.argv.append(f"hydra.sweep.dir={sweep.folder}")
        status = _launched(command, verbose)
    if sweep is not None and sweep.has_begun:
        status = _finished(sweep, status)
    elif command.ended is not None:
        status = command.ended.exit_status
    elif sweep is not None and status == 0:
        print("error: the sweep has no job: its choices match nothing", file=sys.stderr)
        status = 2
    sys.exit(status)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise InterruptedJob


def _launched(command: _Command, verbose: bool) -> int:
    """Lets Hydra compose and launch.

    Returns:
        0; 1 where a launcher or a sweeper failed, 2 where nothing began, 130 when interrupted.
    """
    try:
        words = sys.argv[1:]
        sys.argv[1:] = options_first(words)
        if {"-h", "--help"} & set(words):
            # Hydra's would show what is stored for composing among the choices.
            print(help_page(command_request(sys.argv[1:])))
            return 0
        check_hydra_words(words)
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")(
            command
        )()
    except (InterruptedJob, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_STATUS
    except Exception as error:  # noqa: BLE001 - every one is told
        # Before a job begins, whatever is wrong is in the overrides or the user's YAML; after
        # it, in a launcher or a sweeper.
        sweep = begun_sweep()
        began = command.ended is not None or (sweep is not None and sweep.has_begun)
        if verbose:
            traceback.print_exc()
        is_ours = isinstance(error, ConfigError)
        if not is_ours and (isinstance(error, MISTAKES) or not began):
            error = explain(error, command_request(sys.argv[1:]))
        is_mistake = isinstance(error, ConfigError)
        name = "" if is_mistake else f"{type(error).__name__}: "
        print(f"error: {name}{error}", file=sys.stderr)
        return 2 if is_mistake else 1
    return 0


def _named(job: Mapping[str, Any]) -> str:
    """A job of a sweep in a few words."""
    chosen = f"{job['model']} on {job['deployment']}, task={job['task']}"
    return " ".join([f"job {job['num']}:", chosen, *job["overrides"]])


def _finished(sweep: Sweep, status: int) -> int:
    """Ends the sweep and gives the command's exit status.

    Args:
        sweep: The sweep.
        status: What it would be by itself.
    """
    rows = sweep.finish(stop=status == EXIT_STATUS)
    print_rows(rows, console())
    print(f"report: {sweep.folder / 'report.html'}", flush=True)
    return max([status, *(row.exit_status for row in rows)])


if __name__ == "__main__":
    main()
