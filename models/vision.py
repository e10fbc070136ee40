"""The VISION module: images' crops to the embeddings of the tokens they stand for."""

from __future__ import annotations

from max.dtype import DType
from max.graph import BufferType, BufferValue, TensorType, TensorValue
from max.nn.layer import LayerList

from models.collectives import collectives_for
from models.config import VisionConfig
from models.graph_api import RoleModule
from models.layers.vision import Connector, EncoderLayer, EncoderNorm, PatchEmbedding
from models.role_contracts import ImageInputs

VISION_PARTS = ("vision_model.", "connector.")
"""How the names of the encoder's tensors begin."""


class VisionEncoder(RoleModule):
    """The encoder of a deployment's images.

    Each replica encodes the crops of its own sequences; devices that share a replica's weights
    share those of the encoder's layers too.

    Args:
        config: The encoder's configuration.
    """

    config: VisionConfig

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        holders = range(len(config.placement.devices))
        self.embed = LayerList([PatchEmbedding(config, holder) for holder in holders])
        self.layers = LayerList(
            [EncoderLayer(config, n) for n in range(config.settings.num_layers)]
        )
        self.norm = EncoderNorm(config, "vision_model.post_layernorm")
        self.connect = LayerList([Connector(config, holder) for holder in holders])

    @property
    def inputs(self) -> ImageInputs[TensorType, BufferType]:
        """The types of the graph's inputs."""
        return image_inputs(self.config)

    def __call__(self, inputs: ImageInputs[TensorValue, BufferValue]) -> list[TensorValue]:
        """Per device [crops * tokens, the decoder's hidden] of its replica's crops."""
        placement = self.config.placement
        collectives = collectives_for(placement, inputs.signals)
        patches = [
            inputs.patches[placement.replica(holder)].to(device)
            for holder, device in enumerate(placement.devices)
        ]
        xs = [embed(crops) for embed, crops in zip(self.embed, patches, strict=True)]
        for layer in self.layers:
            xs = layer(xs, collectives)
        return [
            connect(x, crops)
            for connect, x, crops in zip(self.connect, self.norm(xs), patches, strict=True)
        ]


def image_inputs(config: VisionConfig) -> ImageInputs[TensorType, BufferType]:
    """What the encoder's graph takes."""
    settings, placement = config.settings, config.placement
    devices = placement.devices
    signals = None
    if placement.tensor > 1:
        assert config.signal_bytes is not None, "signals need a size"
        size = config.signal_bytes
        signals = tuple(BufferType(DType.uint8, [size], device) for device in devices)
    return ImageInputs(
        patches=tuple(
            TensorType(
                config.dtype,
                [f"replica_{replica}_num_crops", settings.num_patches, settings.patch_values],
                devices[first],
            )
            for replica, first in enumerate(placement.firsts)
        ),
        signals=signals,
    )
