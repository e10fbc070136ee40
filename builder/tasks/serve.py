"""``task=serve``: MAX's own server, with the deployment's settings and our decoder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from builder.schema import ServeTask
from builder.serving import check_servable, max_command, served_folder, server_arguments
from builder.steps import FailedJob, Job
from models.errors import ConfigError

LOG = "server.log"
"""The server's own words, in the job's folder."""

POLL_SECONDS = 0.2
"""How often a server that starts, or runs, is looked at."""

STOP_SECONDS = 30.0
"""How long a server that is asked to stop may take."""


def run(job: Job) -> None:
    """Starts the server, says its address, and waits until it is stopped.

    Raises:
        ConfigError: If the deployment can't be served, or the port is taken.
        FailedJob: If the server ends by itself.
    """
    task = job.config.task
    assert isinstance(task, ServeTask)
    # MAX's server reads float32 weights.
    plan = job.plan(keeps=False)
    check_servable(plan)
    _check_port(task)
    with job.step("prepare", f"preparing {plan.model.name} for MAX's server"):
        folder = served_folder(plan)
    command = [
        *max_command("serve", *server_arguments(plan, folder)),
        f"--host={task.host}",
        f"--port={task.port}",
    ]
    address = f"http://{task.host}:{task.port}/v1"
    log = job.folder.path / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as written,
        # Not in our terminal's group: a Ctrl-C is for us, and we stop the server.
        subprocess.Popen(
            command,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "MAX_SERVE_METRICS_ENDPOINT_PORT": str(task.metrics_port)},
        ) as server,
    ):
        try:
            with job.step("start", f"starting {plan.model.name} (compiles the first time)"):
                _wait_until_healthy(job, server, task, log)
            if not job.interrupts.requested:
                job.folder.write_json(
                    "server.json",
                    {"address": address, "model": plan.model.name, "pid": server.pid},
                )
                print(f"serving {plan.model.name} at {address}; Ctrl-C stops it", flush=True)
            while not job.interrupts.requested:
                if server.poll() is not None:
                    raise FailedJob(_ended(server, log))
                time.sleep(POLL_SECONDS)
        finally:
            _stop(server)
    print("stopped", file=sys.stderr)


def _check_port(task: ServeTask) -> None:
    for key, port in (("port", task.port), ("metrics_port", task.metrics_port)):
        if not 0 < port < 1 << 16:
            raise ConfigError(f"task.{key}: {port} is no port, 1 to 65535")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((task.host, port))
            except OSError as error:
                raise ConfigError(
                    f"task.{key}: {task.host}:{port} can't be listened on: {error.strerror}"
                ) from error


def _wait_until_healthy(
    job: Job, server: subprocess.Popen[bytes], task: ServeTask, log: Path
) -> None:
    while not job.interrupts.requested:
        if server.poll() is not None:
            raise FailedJob(_ended(server, log))
        try:
            with urllib.request.urlopen(f"http://{task.host}:{task.port}/health", timeout=2):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            # Not yet: the server answers when its model is loaded.
            time.sleep(POLL_SECONDS)


def _ended(server: subprocess.Popen[bytes], log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it said nothing"
    return f"MAX's server ended with status {server.returncode}: {last}\n  all it said: {log}"


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is not None:
        return
    server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
