"""The base of layers whose devices each compute a part of a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from max.graph import TensorValue
from max.nn.layer import LayerList, Module

from models.collectives import Collectives
from models.config import Placed
from models.layers.step import Step


class Sharded(Module):
    """One shard per device of the stage.

    Args:
        config: The configuration.
        shard: Makes the shard of the device at a position.
    """

    def __init__(self, config: Placed, shard: Callable[[int], Module]) -> None:
        super().__init__()
        self.shards = LayerList([shard(holder) for holder in range(len(config.placement.devices))])


class PerDevice(Sharded):
    """Shards each of which takes its device's value alone."""

    def __call__(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Each device's result of its shard."""
        return [shard(x) for shard, x in zip(self.shards, xs, strict=True)]


class SummedMixer(Sharded):
    """A mixer each of whose devices computes a part, and the parts of a replica are summed."""

    def __call__(
        self, xs: Sequence[TensorValue], steps: Sequence[Step], collectives: Collectives
    ) -> list[TensorValue]:
        """Per device [tokens, hidden] to [tokens, hidden]."""
        return collectives.sum_in_replicas(
            [shard(x, step) for shard, x, step in zip(self.shards, xs, steps, strict=True)]
        )
