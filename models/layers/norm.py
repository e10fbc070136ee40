"""RMS normalisation."""

from __future__ import annotations

from collections.abc import Sequence

from max.graph import TensorValue, ops
from max.nn.layer import LayerList, Module

from models.config import DecoderConfig
from models.weights import DeclaredWeight, FromCheckpoint, Piece


class RMSNorm(Module):
    """``x / rms(x) * weight`` over the last dimension (arXiv 1910.07467), on one device.

    Args:
        config: The decoder's configuration.
        holder: The position of the device that holds it.
        tensor: The checkpoint tensor of the weight.
        dim: Its size.
    """

    def __init__(self, config: DecoderConfig, holder: int, tensor: str, dim: int) -> None:
        super().__init__()
        self.eps = config.settings.norm_eps
        self.weight = DeclaredWeight(
            "weight",
            config.dtype,
            (dim,),
            config.placement.devices[holder],
            FromCheckpoint((Piece(tensor),)),
            holder,
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """Any shape whose last dimension is ``dim``."""
        return ops.rms_norm(x, self.weight, self.eps, weight_offset=0.0)


class ReplicatedRMSNorm(Module):
    """The same norm on every device of the stage.

    Args:
        config: The decoder's configuration.
        tensor: The checkpoint tensor of the weight.
    """

    def __init__(self, config: DecoderConfig, tensor: str) -> None:
        super().__init__()
        self.copies = LayerList(
            [
                RMSNorm(config, holder, tensor, config.settings.hidden_size)
                for holder in range(len(config.placement.devices))
            ]
        )

    def __call__(self, xs: Sequence[TensorValue]) -> list[TensorValue]:
        """Per device [rows, hidden] to [rows, hidden]."""
        return [norm(x) for norm, x in zip(self.copies, xs, strict=True)]
