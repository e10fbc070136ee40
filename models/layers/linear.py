"""Matrix products with weights from the checkpoint."""

from __future__ import annotations

from max.graph import TensorValue
from max.nn.layer import Module

from models.config import DecoderConfig
from models.kernels import matmul
from models.weights import DeclaredWeight, FromCheckpoint, Piece


class Linear(Module):
    """``x @ weight.T + bias``, the weight stacked by rows from pieces of the checkpoint.

    The bias is added in the product's own rank, [tokens, out]: MAX 26.7 miscompiles its own CPU
    product where it is reshaped to another rank and then broadcast against.

    Args:
        config: The decoder's configuration.
        holder: The position of the device that holds it.
        pieces: Where the rows of the weight come from, in order.
        in_dim: Columns of the weight.
        out_dim: Rows of the weight.
        bias: Where the bias comes from; ``None`` for none.
    """

    def __init__(
        self,
        config: DecoderConfig,
        holder: int,
        pieces: tuple[Piece, ...],
        in_dim: int,
        out_dim: int,
        bias: tuple[Piece, ...] | None = None,
    ) -> None:
        super().__init__()
        device = config.placement.devices[holder]
        self.weight = DeclaredWeight(
            "weight", config.dtype, (out_dim, in_dim), device, FromCheckpoint(pieces), holder
        )
        self.bias = (
            None
            if bias is None
            else DeclaredWeight(
                "bias", config.dtype, (out_dim,), device, FromCheckpoint(bias), holder
            )
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """[tokens, in_dim] to [tokens, out_dim]."""
        y = matmul(x, self.weight)
        return y if self.bias is None else y + self.bias
