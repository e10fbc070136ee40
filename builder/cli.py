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
from hydra.errors import HydraException  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from builder.compose import config_folder, explain, register_schema, to_config  # noqa: E402
from builder.interrupt import EXIT_STATUS, InterruptedJob, Interrupts  # noqa: E402
from builder.job import JobFolder  # noqa: E402
from builder.report import console  # noqa: E402
from builder.steps import Job  # noqa: E402
from builder.tasks import task_runner  # noqa: E402
from models.errors import ConfigError  # noqa: E402

gc.freeze()
gc.enable()


def run_job(composed: DictConfig) -> None:
    """Runs one job of a single run or a sweep, and writes how it ended.

    Raises:
        ConfigError: If the user asked for something that can't be.
        InterruptedJob: If it was asked to stop.
    """
    folder = JobFolder(Path(HydraConfig.get().runtime.output_dir))

    def stopped() -> None:
        folder.write_status("interrupted")

    with Interrupts(on_exit=stopped) as interrupts:
        try:
            config = to_config(composed)
            job = Job(config, folder, interrupts, console())
            job.seconds["compose"] = time.perf_counter() - _STARTED
            task_runner(config.task.name)(job)
        except ConfigError as error:
            folder.discard()
            folder.write_status("error", str(error))
            raise
        except (InterruptedJob, KeyboardInterrupt) as error:
            stopped()
            raise InterruptedJob from error
        except BaseException as error:
            folder.write_status("error", f"{type(error).__name__}: {error}")
            raise
        folder.write_status("ok", seconds=job.seconds)


def main() -> None:
    """Runs the command. Exit status 0, 2 for a user's mistake, 130 when interrupted."""
    verbose = bool({"-v", "--verbose"} & set(sys.argv[1:]))
    sys.argv = [sys.argv[0], *(word for word in sys.argv[1:] if word not in ("-v", "--verbose"))]
    verbose = verbose or "HYDRA_FULL_ERROR" in os.environ
    # So that Hydra hands every error to us, to be worded in one way.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register_schema()
    command = hydra.main(
        version_base="1.3", config_path=str(config_folder()), config_name="config"
    )(run_job)
    try:
        command()
    except InterruptedJob:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_STATUS)
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        if verbose:
            traceback.print_exc()
        worded = error if isinstance(error, ConfigError) else explain(error)
        print(f"error: {worded}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
