"""Matrix products with weights from the checkpoint."""

from __future__ import annotations

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn.layer import Module

from models.weights import DeclaredWeight, FromCheckpoint, Piece


class Linear(Module):
    """``x @ weight.T + bias``, the weight stacked by rows from pieces of the checkpoint.

    The bias is added in the product's own rank, [tokens, out]: on the CPU, MAX 26.7 miscompiles a
    product that is reshaped to another rank and then broadcast against.

    Args:
        pieces: Where the rows of the weight come from, in order.
        in_dim: Columns of the weight.
        out_dim: Rows of the weight.
        dtype: The weight's dtype.
        device: Where it resides.
        bias: Where the bias comes from; ``None`` for none.
    """

    def __init__(
        self,
        pieces: tuple[Piece, ...],
        in_dim: int,
        out_dim: int,
        dtype: DType,
        device: DeviceRef,
        bias: tuple[Piece, ...] | None = None,
    ) -> None:
        super().__init__()
        self.weight = DeclaredWeight(
            "weight", dtype, (out_dim, in_dim), device, FromCheckpoint(pieces)
        )
        self.bias = (
            None
            if bias is None
            else DeclaredWeight("bias", dtype, (out_dim,), device, FromCheckpoint(bias))
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """[tokens, in_dim] to [tokens, out_dim]."""
        y = x @ ops.transpose(self.weight, 0, 1)
        return y if self.bias is None else y + self.bias
