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

    STATUS = "status.json"
    RESULTS = (
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
        # A folder that is used again keeps nothing of the job before.
        for name in self.RESULTS:
            (path / name).unlink(missing_ok=True)

    def write_json(self, name: str, contents: Mapping[str, Any]) -> None:
        """Writes one JSON object."""
        self._write(name, _json(contents, indent=1))

    def write_lines(self, name: str, objects: Iterable[Mapping[str, Any]]) -> None:
        """Writes one JSON object per line."""
        self._write(
            name,
            "".join(map(_json, objects)),
        )

    def write_status(self, status: str, error: str | None = None, **facts: Any) -> None:
        """Writes how the job ended; the last file it writes.

        Args:
            status: ``ok``, ``error`` or ``interrupted``.
            error: What went wrong.
            facts: Further entries.
        """
        self.write_json(self.STATUS, {"status": status, "error": error, **facts})

    def discard(self) -> None:
        """Removes what the job wrote so far, for a job that ends in a user's mistake."""
        for name in self._written:
            (self.path / name).unlink(missing_ok=True)
        self._written.clear()
        shutil.rmtree(self.path / ".hydra", ignore_errors=True)

    def _write(self, name: str, text: str) -> None:
        assert name in self.RESULTS, f"{name} is none of a job's files"
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path / name)
        self._written.append(name)


def _json(contents: Mapping[str, Any], indent: int | None = None) -> str:
    # Strict JSON, which has neither NaN nor infinity.
    return json.dumps(contents, ensure_ascii=False, allow_nan=False, indent=indent) + "\n"
