"""What an exchange is, inside the graph and outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from max.engine import InferenceSession
from max.graph import TensorValue, ops

from models.kernels.accelerators import ExpertGroups

Route = tuple[TensorValue, TensorValue]
"""What a device's tokens chose: experts by their index in the model, int32 [tokens, k], and what
their results are multiplied with, float32 [tokens, k]."""


class DeviceExperts(Protocol):
    """One device's experts of one layer."""

    def choices(self, x: TensorValue, chosen: TensorValue) -> TensorValue:
        """Each choice's result, on the host."""
        ...

    def grouped(self, rows: TensorValue, groups: ExpertGroups) -> TensorValue:
        """Each row through its expert, on an accelerator."""
        ...


class Exchange(Protocol):
    """The exchange as a graph sees it; values come and go one per device."""

    def __call__(
        self,
        xs: Sequence[TensorValue],
        routes: Sequence[Route],
        experts: Sequence[DeviceExperts],
    ) -> list[TensorValue]:
        """Sends each device's tokens to the experts they chose, and gets the results back.

        Args:
            xs: [tokens of the device, hidden].
            routes: What they chose.
            experts: Each device's experts.

        Returns:
            Per device, the weighted sum of each token's choices, [tokens of the device, hidden].
        """
        ...


class ExpertParallelExchange(Protocol):
    """The exchange outside of graphs: it describes, allocates and provides its buffers."""

    def input_tree(self, stage: int = 0) -> object:
        """The tree of types of a stage's ``ep`` inputs."""
        ...

    def initialize(self, session: InferenceSession) -> None:
        """Allocates the buffers with the session that runs the decoder."""
        ...

    def model_inputs(self, stage: int = 0) -> object:
        """A stage's buffers, in ``input_tree()``'s structure."""
        ...


def weighted_sum(rows: TensorValue, weights: TensorValue) -> TensorValue:
    """The weighted sum of each token's choices: [tokens * k, hidden] to [tokens, hidden].

    Args:
        rows: Each choice's result.
        weights: float32 [tokens, k].
    """
    tokens, choices = weights.shape
    hidden = rows.shape[1]
    weighted = rows.reshape((tokens, choices, hidden)) * ops.unsqueeze(weights, -1)
    return ops.sum(weighted, axis=1).reshape((tokens, hidden))
