"""The layers of an image encoder, and what makes tokens of its patches.

Source: SigLIP (arXiv 2303.15343) with Idefics3's positions and pixel shuffle (arXiv 2408.12637),
tensor names as in Hugging Face's ``modeling_idefics3.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from max.graph import TensorValue, ops
from max.nn.layer import Module

from models.collectives import Collectives
from models.config import VisionConfig
from models.kernels import matmul, patch_attention
from models.layers.activations import ACTIVATIONS
from models.layers.linear import Linear
from models.layers.norm import LayerNorm
from models.layers.shards import PerDevice
from models.settings import VisionSettings
from models.weights import DeclaredWeight, Piece, columns_of, rows_of


class PatchEmbedding(Module):
    """Patches to the residual stream, with their learned positions, on one device.

    Args:
        config: The encoder's configuration.
        holder: The position of the device.
    """

    def __init__(self, config: VisionConfig, holder: int) -> None:
        super().__init__()
        settings = config.settings
        self.settings = settings

        def declared(kind: str, tensor: str, *sizes: int) -> DeclaredWeight:
            device = config.placement.devices[holder]
            source = Piece(f"vision_model.embeddings.{tensor}").alone()
            return DeclaredWeight(kind, config.dtype, sizes, device, source, holder)

        hidden, side = settings.hidden_size, settings.patch_size
        sizes = (hidden, settings.num_channels, side, side)
        self.weight = declared("weight", "patch_embedding.weight", *sizes)
        self.bias = declared("bias", "patch_embedding.bias", hidden)
        table = (settings.table_side**2, hidden)
        self.positions = declared("positions", "position_embedding.weight", *table)

    def __call__(self, patches: TensorValue) -> TensorValue:
        """[crops, patches, values] to [crops * patches, hidden]."""
        settings, hidden = self.settings, self.settings.hidden_size
        weight = self.weight.reshape((hidden, settings.patch_values))
        x = matmul(patches.reshape((-1, settings.patch_values)), weight) + self.bias
        places = ops.constant(patch_positions(settings), device=x.device)
        added = ops.unsqueeze(ops.gather(self.positions, places, axis=0), 0)
        # In the product's own rank: MAX 26.7 miscompiles its own CPU product otherwise.
        every = ops.broadcast_to(added, (patches.shape[0], settings.num_patches, hidden))
        return x + every.reshape((-1, hidden)).rebind(x.shape)


def patch_positions(settings: VisionSettings) -> npt.NDArray[np.int64]:
    """Each patch's row in the table of positions.

    The table spans the whole crop, whatever the number of its patches: a patch has the position in
    which its upper left corner lies.

    Args:
        settings: The encoder.

    Returns:
        int64 ``[patches]``, row by row.
    """
    side, table = settings.patches_per_side, settings.table_side
    # In float32, as Hugging Face rounds corners that are on an edge.
    edges = (np.arange(1, table) / table).astype(np.float32)
    corners = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    places = np.searchsorted(edges, np.minimum(corners, np.float32(1 - 1e-6)), side="right")
    return (places[:, None] * table + places[None, :]).reshape(-1).astype(np.int64)


class EncoderLayer(Module):
    """One pre-norm layer: ``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``.

    Args:
        config: The encoder's configuration.
        layer: The layer's index.
    """

    def __init__(self, config: VisionConfig, layer: int) -> None:
        super().__init__()
        prefix = f"vision_model.layers.{layer}"
        self.input_norm = EncoderNorm(config, f"{prefix}.input_layernorm")
        self.attention = PerDevice(config, partial(PatchAttention, config, f"{prefix}.self_attn"))
        self.post_attention_norm = EncoderNorm(config, f"{prefix}.post_attention_layernorm")
        self.feed_forward = PerDevice(config, partial(FeedForward, config, f"{prefix}.mlp"))

    def __call__(self, xs: Sequence[TensorValue], collectives: Collectives) -> list[TensorValue]:
        """Per device [crops * patches, hidden] to the same."""
        for norm, part in (
            (self.input_norm, self.attention),
            (self.post_attention_norm, self.feed_forward),
        ):
            summed = collectives.sum_in_replicas(part(norm(xs)))
            xs = [x + y for x, y in zip(xs, summed, strict=True)]
        return list(xs)


class EncoderNorm(PerDevice):
    """The residual stream's norm, the same on every device.

    Args:
        config: The encoder's configuration.
        prefix: The checkpoint's name of the norm.
    """

    def __init__(self, config: VisionConfig, prefix: str) -> None:
        settings = config.settings
        super().__init__(
            config,
            lambda holder: LayerNorm(
                config, holder, prefix, settings.hidden_size, settings.norm_eps
            ),
        )


class PatchAttention(Module):
    """One device's heads of the attention among the patches of a crop.

    Args:
        config: The encoder's configuration.
        prefix: The checkpoint's name of the attention.
        holder: The position of the device.
    """

    def __init__(self, config: VisionConfig, prefix: str, holder: int) -> None:
        super().__init__()
        settings = config.settings
        heads = config.placement.inner_columns(settings.num_heads, holder)
        self.num_heads, self.num_patches = len(heads), settings.num_patches
        self.head_dim = settings.hidden_size // settings.num_heads
        weights, biases = (
            tuple(rows_of(f"{prefix}.{name}_proj.{kind}", heads, self.head_dim) for name in "qkv")
            for kind in ("weight", "bias")
        )
        width = self.num_heads * self.head_dim
        self.qkv_proj = Linear(config, holder, weights, settings.hidden_size, 3 * width, biases)
        self.o_proj = _summed(config, holder, f"{prefix}.o_proj", heads, self.head_dim)

    def __call__(self, x: TensorValue) -> TensorValue:
        """[crops * patches, hidden] to this device's part of it."""
        qkv = self.qkv_proj(x)
        scale = self.head_dim**-0.5
        return self.o_proj(patch_attention(qkv, self.num_heads, self.num_patches, scale))


class FeedForward(Module):
    """One device's inner columns of ``down(act(up(x)))``.

    Args:
        config: The encoder's configuration.
        prefix: The checkpoint's name of the feed-forward.
        holder: The position of the device.
    """

    def __init__(self, config: VisionConfig, prefix: str, holder: int) -> None:
        super().__init__()
        settings = config.settings
        inner = config.placement.inner_columns(settings.intermediate_size, holder)
        self.activation = ACTIVATIONS[settings.hidden_act]
        weight, bias = (rows_of(f"{prefix}.up_proj.{kind}", inner) for kind in ("weight", "bias"))
        self.up_proj = Linear(config, holder, (weight,), settings.hidden_size, len(inner), (bias,))
        self.down_proj = _summed(config, holder, f"{prefix}.down_proj", inner)

    def __call__(self, x: TensorValue) -> TensorValue:
        """[crops * patches, hidden] to this device's part of it."""
        return self.down_proj(self.activation(self.up_proj(x)))


def _summed(
    config: VisionConfig, holder: int, prefix: str, columns: range, width: int = 1
) -> Linear:
    """A product whose results are summed over a replica's devices, so one of them adds the bias."""
    return Linear(
        config,
        holder,
        (columns_of(f"{prefix}.weight", columns, width),),
        len(columns) * width,
        config.settings.hidden_size,
        (Piece(f"{prefix}.bias"),) if config.placement.rank(holder) == 0 else None,
    )


class Connector(Module):
    """Squares of patches to the decoder's tokens, on one device.

    Args:
        config: The encoder's configuration.
        holder: The position of the device.
    """

    def __init__(self, config: VisionConfig, holder: int) -> None:
        super().__init__()
        self.settings = config.settings
        self.proj = Linear(
            config,
            holder,
            (Piece("connector.modality_projection.proj.weight"),),
            config.settings.hidden_size * config.settings.shuffle**2,
            config.hidden_size,
        )

    def __call__(self, x: TensorValue, num_crops: TensorValue) -> TensorValue:
        """[crops * patches, hidden] to [crops * tokens, the decoder's hidden].

        Args:
            x: The encoder's result.
            num_crops: What has as many rows as there are crops.
        """
        settings = self.settings
        crops, side, shuffle = num_crops.shape[0], settings.patches_per_side, settings.shuffle
        squares, hidden = side // shuffle, settings.hidden_size
        # Neighbours of a row side by side, then those of neighbouring rows.
        x = x.reshape((crops, side, squares, hidden * shuffle))
        x = ops.permute(x, [0, 2, 1, 3])
        x = x.reshape((crops, squares, squares, hidden * shuffle**2))
        x = ops.permute(x, [0, 2, 1, 3])
        return self.proj(x.reshape((-1, hidden * shuffle**2)))
