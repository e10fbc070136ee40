"""RMS and layer normalisation."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.layer import Module

from models.config import DecoderConfig, Placed
from models.kernels import rms_norm
from models.layers.shards import PerDevice
from models.weights import DeclaredWeight, FromCheckpoint, Piece, rows_of


class RMSNorm(Module):
    """``x / rms(x) * weight`` over the last dimension (arXiv 1910.07467), on one device.

    Args:
        config: The decoder's configuration.
        holder: The position of the device that holds it.
        tensor: The checkpoint tensor of the weight.
        dim: Its size.
        eps: The norm's epsilon; ``None`` is the model's.
        offset: What is added to the weight; ``None`` is the model's.
    """

    def __init__(
        self,
        config: DecoderConfig,
        holder: int,
        tensor: str,
        dim: int,
        eps: float | None = None,
        offset: float | None = None,
    ) -> None:
        super().__init__()
        self.eps = config.settings.norm_eps if eps is None else eps
        self.offset = config.settings.norm_offset if offset is None else offset
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
        return rms_norm(x, self.weight, self.eps, self.offset)


class DividedRMSNorm(Module):
    """The same over dimensions that are divided over the devices of a replica.

    Dimensions that several devices hold count once for each, in the sum and in the number.

    Args:
        config: The decoder's configuration.
        holder: The position of the device that holds this part.
        tensor: The checkpoint tensor of the weight.
        heads: The heads of this part.
        head_dim: Their width.
    """

    def __init__(
        self, config: DecoderConfig, holder: int, tensor: str, heads: range, head_dim: int
    ) -> None:
        super().__init__()
        dim = len(heads) * head_dim
        self.eps = config.settings.norm_eps
        self.count = dim * config.placement.tensor
        self.weight = DeclaredWeight(
            "weight",
            config.dtype,
            (dim,),
            config.placement.devices[holder],
            rows_of(tensor, heads, head_dim).alone(),
            holder,
        )

    def squares(self, x: TensorValue) -> TensorValue:
        """[tokens, dim] to the sum of its squares, [tokens, 1], to be summed over devices."""
        exact = ops.cast(x, DType.float32)
        return ops.sum(exact * exact, axis=1)

    def __call__(self, x: TensorValue, squares: TensorValue) -> TensorValue:
        """[tokens, dim] and the sum of all devices' squares to [tokens, dim]."""
        exact = ops.cast(x, DType.float32)
        # No division: MAX compiles and runs the reciprocal to compile the graph.
        normed = exact * ops.rsqrt(squares * (1 / self.count) + self.eps)
        return ops.cast(normed, x.dtype) * self.weight


class LayerNorm(Module):
    """``(x - mean) / deviation * weight + bias`` over the last dimension (arXiv 1607.06450).

    Args:
        config: The configuration.
        holder: The position of the device that holds it.
        prefix: The checkpoint's name of the norm.
        dim: Its size.
        eps: Its epsilon.
    """

    def __init__(self, config: Placed, holder: int, prefix: str, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        device = config.placement.devices[holder]
        self.weight, self.bias = (
            DeclaredWeight(
                kind, config.dtype, (dim,), device, Piece(f"{prefix}.{kind}").alone(), holder
            )
            for kind in ("weight", "bias")
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """Any shape whose last dimension is ``dim``."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class ReplicatedNorm(PerDevice):
    """The residual stream's norm, the same on every device of the stage.

    Args:
        config: The decoder's configuration.
        prefix: The checkpoint's name of the norm.
    """

    def __init__(self, config: DecoderConfig, prefix: str) -> None:
        hidden = config.settings.hidden_size

        def copy(holder: int) -> Module:
            if config.settings.norm == "layer":
                return LayerNorm(config, holder, prefix, hidden, config.settings.norm_eps)
            return RMSNorm(config, holder, f"{prefix}.weight", hidden)

        super().__init__(config, copy)
