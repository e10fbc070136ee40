"""Where the time of steps goes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepTime:
    """What one step computed, and how long it took, in seconds."""

    tokens: int
    """Tokens that it took, over all replicas."""

    decoding: int
    """Sequences of which it took their last token, rather than a part of their prompt."""

    execute: float
    """Inside the compiled graph."""

    total: float
    """In all, host work included."""


@dataclass
class StepTimes:
    """Where the time of a run's steps went, in seconds."""

    each: list[StepTime] = field(default_factory=list)
    """The steps computed, in order."""

    @property
    def steps(self) -> int:
        """Steps computed."""
        return len(self.each)

    @property
    def execute(self) -> float:
        """Inside the compiled graph."""
        return sum(step.execute for step in self.each)

    @property
    def total(self) -> float:
        """Inside steps, host work included."""
        return sum(step.total for step in self.each)
