"""RMS normalisation."""

from __future__ import annotations

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn.layer import Module

from models.weights import DeclaredWeight, FromCheckpoint, Piece


class RMSNorm(Module):
    """``x / rms(x) * weight`` over the last dimension (arXiv 1910.07467).

    Args:
        tensor: The checkpoint tensor of the weight.
        dim: Its size.
        eps: Added to the mean square.
        dtype: The weight's dtype.
        device: Where it resides.
    """

    def __init__(self, tensor: str, dim: int, eps: float, dtype: DType, device: DeviceRef) -> None:
        super().__init__()
        self.eps = eps
        self.weight = DeclaredWeight(
            "weight", dtype, (dim,), device, FromCheckpoint((Piece(tensor),))
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """Any shape whose last dimension is ``dim``."""
        return ops.rms_norm(x, self.weight, self.eps, weight_offset=0.0)
