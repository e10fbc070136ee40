"""A job's folder: what it writes, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class JobFolder:
    """The files of one job.

    Every file appears whole: it is written beside its place and moved there.

    Args:
        path: The folder; it may hold files of others, which are left alone.
    """

    BEGUN = "job.json"
    """There from a job's beginning until its status is."""

    STATUS = "status.json"
    """How a job ended; the last file that it writes."""

    RESULTS = (
        BEGUN,
        "plan.json",
        "contract.json",
        "generations.jsonl",
        "scores.jsonl",
        "verify.json",
        "check.json",
        "diff.json",
        "metrics.json",
        "server.json",
        STATUS,
    )
    """Every file that a job may write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[str] = []
        self._job: Mapping[str, Any] = {}

    @classmethod
    def left_behind(cls, path: Path, job: Mapping[str, Any] | None = None) -> JobFolder:
        """The folder of a job whose process is gone.

        Args:
            path: The folder.
            job: What was asked for; by default what the job itself said.
        """
        folder = cls(path)
        begun = path / cls.BEGUN
        folder._job = (read_json(begun) or {}).get("job", {}) if job is None else job
        return folder

    @property
    def has_status(self) -> bool:
        """Whether it says how its job ended."""
        return (self.path / self.STATUS).is_file()

    @property
    def has_results(self) -> bool:
        """Whether its job wrote more than how it ended."""
        return any(name not in (self.BEGUN, self.STATUS) for name in self._written)

    def shown(self, folder: Path) -> str:
        """Where it is, for a person who works in a folder.

        Args:
            folder: The folder that they work in.
        """
        path = self.path
        return str(path.relative_to(folder) if path.is_relative_to(folder) else path)

    def write_json(self, name: str, contents: Mapping[str, Any]) -> None:
        """Writes one JSON object."""
        self._write(name, _json(contents, indent=1))

    def write_lines(self, name: str, objects: Iterable[Mapping[str, Any]]) -> None:
        """Writes one JSON object per line."""
        self._write(
            name,
            "".join(map(_json, objects)),
        )

    def clear(self) -> None:
        """Removes what a job wrote."""
        for name in self.RESULTS:
            (self.path / name).unlink(missing_ok=True)

    def begin(self, job: Mapping[str, Any], process: Mapping[str, Any]) -> None:
        """Says that a job has begun; a folder that is used again keeps nothing of the job before.

        Args:
            job: What was asked for.
            process: What tells its process from others.
        """
        for name in self.RESULTS:
            if name != self.BEGUN:
                (self.path / name).unlink(missing_ok=True)
        self._job = job
        self.write_json(self.BEGUN, {"job": job, "process": process})

    def write_status(self, status: str, error: str | None = None, **facts: Any) -> None:
        """Writes how the job ended; the last file it writes.

        Args:
            status: ``ok``, ``failed``, ``error``, ``interrupted`` or ``killed``.
            error: What went wrong.
            facts: Further entries.
        """
        contents = {"status": status, "error": error, "job": self._job, **facts}
        self.write_json(self.STATUS, contents)
        (self.path / self.BEGUN).unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes what the job wrote so far, for a job that ends in a user's mistake."""
        for name in self._written:
            (self.path / name).unlink(missing_ok=True)
        self._written.clear()
        shutil.rmtree(self.path / ".hydra", ignore_errors=True)

    def _write(self, name: str, text: str) -> None:
        assert name in self.RESULTS, f"{name} is none of a job's files"
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / name, text)
        self._written.append(name)


def _json(contents: Mapping[str, Any], indent: int | None = None) -> str:
    # Strict JSON, which has neither NaN nor infinity.
    return json.dumps(contents, ensure_ascii=False, allow_nan=False, indent=indent) + "\n"


def exit_status(status: str, is_defect: bool) -> int:
    """2 where the user asked for what can't be, else 1 where a job did not succeed, else 0.

    Args:
        status: How it ended.
        is_defect: Whether the fault is ours.
    """
    if status == "ok":
        return 0
    return 2 if status == "error" and not is_defect else 1


def write_whole(path: Path, text: str) -> None:
    """Writes a file beside its place and moves it there: nobody reads half of it.

    Args:
        path: The file.
        text: Its contents.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_json(file: Path) -> dict[str, Any] | None:
    """Reads what a job wrote; ``None`` where it is not there, or not any more.

    Args:
        file: One of a job's files that is one object.
    """
    try:
        contents: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return contents
