"""What the jobs of a folder came to: one row each, read from the files they wrote."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from builder.job import JobFolder, exit_status, read_json
from builder.processes import is_alive
from builder.tables import print_table

NOT_RUN = "not run"
"""The status of a job that a sweep has and did not begin."""

RUNNING = "running"
"""The status of a job whose process is there."""

KILLED = "killed"
"""The status of a job whose process is gone and has not said how it ended."""


ENDS = ("ok", "failed", "error", "interrupted", KILLED)
"""What status.json says."""

UNREADABLE = "unreadable"
"""The status of a job whose files are damaged, or are not ours."""

REPORTS = ("report",)
"""Tasks about other jobs, which have no row."""


ENDED_SILENTLY = "its process ended without a word"
"""All that is known of every job that was killed."""


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One job."""

    job: str
    """Its folder, from the summary's."""

    model: str
    """The model's choice."""

    deployment: str
    """The deployment's choice."""

    task: str
    """The task's choice."""

    overrides: tuple[str, ...]
    """What else the command line said of it."""

    status: str
    """``ok``, ``failed``, ``error``, ``interrupted``, ``killed``, ``running`` or ``not run``."""

    error: str | None = None
    """What went wrong."""

    is_defect: bool = False
    """Whether the fault is ours."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Each step's time."""

    plan: Mapping[str, Any] | None = None
    """plan.json; ``None`` where it was not planned."""

    contract: Mapping[str, Any] | None = None
    """contract.json; ``None`` where it was not planned."""

    verify: Mapping[str, Any] | None = None
    """verify.json, of ``task=verify``."""

    metrics: Mapping[str, Any] | None = None
    """metrics.json, of a task that measures."""

    generations: tuple[Mapping[str, Any], ...] = ()
    """The objects of generations.jsonl, of ``task=generate``."""

    scores: tuple[Mapping[str, Any], ...] = ()
    """The objects of scores.jsonl, of ``task=score``."""

    @property
    def exit_status(self) -> int:
        """The command's, where it runs this job alone."""
        return exit_status(self.status, self.is_defect)

    @property
    def fields(self) -> list[str]:
        """The fields of its contract, in canonical order."""
        if self.contract is None:
            return []
        return [field["name"] for field in self.contract["fields"] if field["present"]]

    @property
    def num_inputs(self) -> int | None:
        """The inputs of its graphs."""
        if self.contract is None:
            return None
        return sum(len(field["leaves"]) for field in self.contract["fields"])

    @property
    def device_bytes(self) -> list[int]:
        """What each device holds."""
        return [] if self.plan is None else [share["total"] for share in self.plan["devices"]]

    def spread(self, name: str) -> tuple[float, float, float] | None:
        """Least, median and most of a figure over the prompts; ``None`` where there is none.

        Args:
            name: A figure of generations.jsonl, such as ``decode_tok_s``.
        """
        found = [one[name] for one in self.generations if one.get(name) is not None]
        return (min(found), statistics.median(found), max(found)) if found else None


def read_rows(
    folder: Path, listed: Sequence[Mapping[str, Any]] = (), sweep: str | None = None
) -> list[JobRow]:
    """Reads every job at or below a folder, in the order of their numbers.

    Args:
        folder: The folder of a sweep, or one with many runs.
        listed: The facts of jobs that the sweep has, whether they began or not.
        sweep: The sweep whose jobs alone are read; by default all.
    """
    rows: list[tuple[int, JobRow]] = []
    begun = set()
    for path, file in job_files(folder).items():
        try:
            number, row, own = _read_file(folder, file, file.stat().st_mtime_ns)
        except FileNotFoundError:
            # Its job ended meanwhile, and has its status now.
            number, row, own = _read_file(folder, path / JobFolder.STATUS, 0)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            number, own = 0, sweep
            where = str(path.relative_to(folder))
            problem = f"{file.name}, or a file beside it: {type(error).__name__}: {error}"
            row = JobRow(job=where, status=UNREADABLE, error=problem, **_choices({}))
        if row.task not in REPORTS and sweep in (None, own):
            rows.append((number, row))
            begun.add(number)
    rows += [
        (facts["num"], JobRow(job=str(facts["num"]), status=NOT_RUN, **_choices(facts)))
        for facts in listed
        if facts["num"] not in begun
    ]
    return [row for _, row in sorted(rows, key=lambda pair: (pair[0], pair[1].job))]


def job_files(folder: Path) -> dict[Path, Path]:
    """The folder of every job at or below a folder, with the file that says how far it is.

    Args:
        folder: The folder.
    """
    names = (JobFolder.BEGUN, JobFolder.STATUS)
    return {file.parent: file for name in names for file in folder.rglob(name)}


def _read_file(folder: Path, file: Path, changed: int) -> tuple[int, JobRow, str | None]:
    if file.name == JobFolder.STATUS:
        return _read_ended(folder, file, changed)
    return _read(folder, file)


@lru_cache(maxsize=512)
def _read_ended(folder: Path, file: Path, _changed: int) -> tuple[int, JobRow, str | None]:
    # A summary is rebuilt after each job, and those before it stay as they are.
    return _read(folder, file)


def _read(folder: Path, file: Path) -> tuple[int, JobRow, str | None]:
    path = file.parent
    status = json.loads(file.read_text(encoding="utf-8"))
    facts = status.get("job", {})
    ended = status.get("status")
    error = status.get("error")
    if ended is not None and ended not in ENDS:
        raise ValueError(f"{ended!r} is no end of a job")
    if ended is None:
        ended = RUNNING if is_alive(status["process"]) else KILLED
        error = None if ended == RUNNING else ENDED_SILENTLY
    row = JobRow(
        job=str(path.relative_to(folder)),
        status=ended,
        error=error,
        is_defect=status.get("is_defect", False),
        seconds=status.get("seconds", {}),
        plan=read_json(path / "plan.json"),
        contract=read_json(path / "contract.json"),
        verify=read_json(path / "verify.json"),
        metrics=read_json(path / "metrics.json"),
        generations=tuple(_lines(path / "generations.jsonl")),
        scores=tuple(_lines(path / "scores.jsonl")),
        **_choices(facts),
    )
    # Also what is looked up later has to be there.
    cells(row)
    return facts.get("num") or 0, row, facts.get("sweep")


def _choices(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: facts.get(name, "") for name in ("model", "deployment", "task")},
        "overrides": tuple(facts.get("overrides", ())),
    }


def _lines(file: Path) -> Iterable[Mapping[str, Any]]:
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return map(json.loads, text.splitlines())


def cells(row: JobRow) -> dict[str, Any]:
    """A row as summary.csv has it; ``None`` where there is nothing to say.

    Speed apart, what runs a job makes no difference to it: no path, time or host is in it.

    Args:
        row: The job.
    """
    verify, metrics = row.verify or {}, row.metrics or {}
    planned = row.plan is not None
    return {
        "job": row.job,
        "model": row.model,
        "deployment": row.deployment,
        "task": row.task,
        "overrides": " ".join(row.overrides),
        "status": row.status,
        "fields": " ".join(row.fields) if planned else None,
        "inputs": row.num_inputs,
        "devices": len(row.device_bytes) if planned else None,
        "most_device_bytes": max(row.device_bytes, default=None),
        "verified": verify.get("pass"),
        "max_abs_diff": verify.get("max_abs_diff"),
        "max_rel_diff": verify.get("max_rel_diff"),
        "tolerance": verify.get("tolerance"),
        "tokens_equal": verify.get("tokens_equal"),
        "generated_tokens": metrics.get("generated_tokens"),
        "generated_tok_s": metrics.get("generated_tok_s"),
        "step_ms": metrics.get("step_ms"),
        "scored_texts": len(row.scores) or None,
        "logprob": sum(score["logprob"] for score in row.scores) if row.scores else None,
        "error": None if row.error is None else "; ".join(_stripped(row.error)),
    }


ALWAYS = ("job", "model", "deployment", "task", "status", "error")
"""The columns that a table has though no job fills them."""


def _table(rows: Sequence[JobRow]) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns that some job fills, in order, and the cells of each job."""
    every = [cells(row) for row in rows]
    names = list(every[0]) if every else list(ALWAYS)
    filled = [
        name
        for name in names
        if name in ALWAYS or any(cell[name] not in (None, "") for cell in every)
    ]
    return filled, every


def as_csv(rows: Sequence[JobRow]) -> str:
    """summary.csv: every row, figures in full.

    Args:
        rows: The jobs.
    """
    text = io.StringIO()
    names, every = _table(rows)
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(every)
    return text.getvalue()


def as_markdown(rows: Sequence[JobRow]) -> str:
    """summary.md: the same table for people, figures rounded.

    Args:
        rows: The jobs.
    """
    names, every = _table(rows)
    lines = [names, ["---"] * len(names)]
    lines += [[_shown(cell[name]) for name in names] for cell in every]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{_counted(rows)}\n\n{table}"


def count_by_status(rows: Iterable[JobRow]) -> dict[str, int]:
    """How many jobs ended how, in the order of their first.

    Args:
        rows: The jobs.
    """
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    return counts


def _counted(rows: Sequence[JobRow]) -> str:
    counts = ", ".join(f"{count} {status}" for status, count in count_by_status(rows).items())
    return f"{len(rows)} jobs: {counts}"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _stripped(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def print_rows(rows: Sequence[JobRow], out: Console) -> None:
    """Prints one line per job: what it was, and what it came to.

    Args:
        rows: The jobs.
        out: The terminal.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("job", "model", "deployment", "task", "status", "result"):
        table.add_column(heading, no_wrap=heading != "result")
    for row in rows:
        style = "" if row.status == "ok" else "red"
        choices = (row.model, row.deployment, row.task)
        table.add_row(row.job, *choices, row.status, _result(row), style=style)
    print_table(table, out)
    out.print(_counted(rows))


def _result(row: JobRow) -> str:
    if row.error is not None:
        return next(iter(_stripped(row.error)), "")
    if row.verify is not None:
        largest = row.verify.get("max_abs_diff")
        return "largest difference " + ("not a number" if largest is None else f"{largest:.1e}")
    if row.metrics is not None and row.metrics.get("generated_tok_s"):
        return f"{row.metrics['generated_tok_s']:.1f} tokens/s"
    return f"{len(row.fields)} of 16 fields" if row.plan is not None else ""
