"""The base of layers whose devices each compute a part of a sum."""

from __future__ import annotations

from collections.abc import Callable

from max.nn.layer import LayerList, Module

from models.config import DecoderConfig


class Sharded(Module):
    """One shard per device of the stage.

    Args:
        config: The decoder's configuration.
        shard: Makes the shard of the device at a position.
    """

    def __init__(self, config: DecoderConfig, shard: Callable[[int], Module]) -> None:
        super().__init__()
        self.shards = LayerList([shard(holder) for holder in range(len(config.placement.devices))])
