"""Where something of a configuration was said, and a mistake's one line that tells it."""

from __future__ import annotations

from dataclasses import dataclass

from models.errors import ConfigError


class CompositionError(ConfigError):
    """A mistake in a file or on the command line: one line, with what would work."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What set one value."""

    file: str | None = None
    """The file, as a person would type it."""

    line: int | None = None
    """The line of it, from 1."""

    override: str | None = None
    """The word of the command line."""

    @property
    def by(self) -> str:
        """``file``, ``override`` or ``default``: the schema's."""
        return "file" if self.file else "override" if self.override else "default"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else self.override or "default"


def mistake(origin: Origin, problem: str, remedy: str | None = None) -> CompositionError:
    """Words a mistake.

    Args:
        origin: Where it is.
        problem: What is wrong, begun with the key or the word.
        remedy: What would work.
    """
    told = problem
    if origin.by == "file":
        told = f"{origin}: {problem}"
    elif origin.by == "override":
        told = f"{problem} (on the command line)"
    return CompositionError(" ".join((f"{told}; {remedy}" if remedy else told).split()))
