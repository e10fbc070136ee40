"""Which device of a stage holds what."""

from __future__ import annotations

from dataclasses import dataclass

from max.graph import DeviceRef


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The devices of one pipeline stage and the layers it computes.

    Devices are replica-major: device ``d`` is tensor rank ``d % tensor`` of replica
    ``d // tensor``.
    """

    devices: tuple[DeviceRef, ...]
    """The stage's devices. Simulated devices are several references to the one CPU."""

    tensor: int = 1
    """Devices that share each layer's weights."""

    data: int = 1
    """Replicas, each with sequences and KV pages of its own."""

    layers: range
    """The layers this stage computes, by their index in the model."""

    stage: int = 0
    """This stage's position."""

    num_stages: int = 1
    """How many stages the model is split into."""

    def __post_init__(self) -> None:
        assert len(self.devices) == self.tensor * self.data, "devices = tensor x data"

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage returns logits."""
        return self.stage == self.num_stages - 1
