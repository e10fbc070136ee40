"""Products with matrices of weights, however they are kept."""

from __future__ import annotations

from dataclasses import dataclass

from max.dtype import DType
from max.graph import TensorType, TensorValue, ops

from models.storage import Blocks, Storage, SuperBlocks


def matmul(x: TensorValue, weight: TensorValue) -> TensorValue:
    """``x @ weight.T``, with the weight as it lies in the checkpoint.

    Where float32 is computed on the CPU it is our kernel: against MAX 26.7's it reads weights up to
    twice as fast for a single row, computes many rows at the same rate, and compiles in a quarter
    of the time (MAX specialises its own for every shape). docs/performance.md has the figures.

    Args:
        x: [rows, in].
        weight: [out, in]; where ``x`` is float32 on the CPU, of any float type.

    Returns:
        [rows, out] in the dtype of ``x``.
    """
    if not x.device.is_cpu() or x.dtype != DType.float32:
        return x @ ops.transpose(weight, 0, 1)
    shape = [x.shape[0], weight.shape[0]]
    result = TensorType(DType.float32, shape, x.device)
    return ops.custom("rolecall_matmul", x.device, [x, weight], [result])[0].tensor


@dataclass(frozen=True)
class Matrix:
    """A matrix of weights in a graph, and how it is kept."""

    values: TensorValue
    """``[rows, columns]``, or what the storage makes of it."""

    rows: int
    """Outputs of a product with it."""

    columns: int
    """Inputs of a product with it."""

    storage: Storage | None = None
    """How it is kept, where not in the dtype that is computed in."""

    def product(self, x: TensorValue) -> TensorValue:
        """``x @ matrix.T``.

        Where the storage is ``SuperBlocks``, or ``Blocks`` that say so, activations are rounded to
        8 bits.

        Args:
            x: [tokens, columns].

        Returns:
            [tokens, rows].
        """
        if isinstance(self.storage, Blocks):
            result = TensorType(DType.float32, [x.shape[0], self.rows], x.device)
            name, parameters = "rolecall_quantized_matmul", self.storage.parameters
            return ops.custom(name, x.device, [x, self.values], [result], parameters)[0].tensor
        if isinstance(self.storage, SuperBlocks):
            return ops.qmatmul(self.storage.quantization, None, x, self.values)
        return matmul(x, self.values)

    def gather(self, rows: TensorValue) -> TensorValue:
        """Some rows in float32, or in the dtype that is computed in.

        Args:
            rows: int64 [count].

        Returns:
            [count, columns].
        """
        if self.storage is None:
            return ops.gather(self.values, rows, axis=0)
        if not isinstance(self.storage, Blocks):
            assert self.storage.gathers, "its rows are gathered from another copy"
            return ops.cast(ops.gather(self.values, rows, axis=0), DType.float32)
        result = TensorType(DType.float32, [rows.shape[0], self.columns], rows.device)
        name, parameters = "rolecall_quantized_rows", self.storage.layout
        values = [self.values, rows]
        return ops.custom(name, rows.device, values, [result], parameters)[0].tensor
