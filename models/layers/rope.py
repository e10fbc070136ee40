"""Rotary position embeddings: the table of angles, and the rotation of parts of heads."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn import kernels
from max.nn.layer import Module

from models.config import DecoderConfig
from models.settings import RopeSettings
from models.weights import Computed, DeclaredWeight

_Floats = npt.NDArray[np.float32]


class RopeTable(Module):
    """The table as a weight, so that the graph holds no large constant.

    Args:
        config: The decoder's configuration.
        holder: The position of the device that holds it.
        source: Makes the table's values.
    """

    def __init__(self, config: DecoderConfig, holder: int, source: Computed) -> None:
        super().__init__()
        shape = (config.max_seq_len, config.settings.rotary_dim)
        device = config.placement.devices[holder]
        self.weight = DeclaredWeight("weight", DType.float32, shape, device, source, holder)

    def __call__(self) -> TensorValue:
        """float32 ``[max_seq_len, rotary_dim]``."""
        return self.weight


def rotate_first(
    heads: TensorValue, row_offsets: TensorValue, cache_lengths: TensorValue, table: TensorValue
) -> TensorValue:
    """Rotates the first dimensions of each head, as many as the table is wide, in two halves.

    Args:
        heads: [tokens, heads, width].
        row_offsets: uint32 [sequences + 1].
        cache_lengths: uint32 [sequences]: tokens of earlier steps.
        table: float32 [positions, rotated] of (cos, sin) pairs.

    Returns:
        [tokens, heads, width].
    """
    width, rotated = int(heads.shape[2]), int(table.shape[1])
    if width == rotated:
        return _rotate_halves(heads, row_offsets, cache_lengths, table)
    first, kept = ops.split(heads, [rotated, width - rotated], axis=2)
    first = _rotate_halves(first, row_offsets, cache_lengths, table)
    return ops.concat([first, kept], axis=2)


def rotate_last(
    heads: TensorValue,
    row_offsets: TensorValue,
    cache_lengths: TensorValue,
    table: TensorValue,
    interleaved: bool,
) -> TensorValue:
    """Rotates the last dimensions of each head, as many as the table is wide.

    Args:
        heads: [tokens, heads, width].
        row_offsets: uint32 [sequences + 1].
        cache_lengths: uint32 [sequences]: tokens of earlier steps.
        table: float32 [positions, rotated] of (cos, sin) pairs.
        interleaved: Whether neighbours are rotated together, or the two halves.

    Returns:
        [tokens, heads, width].
    """
    if interleaved:
        return kernels.rope_ragged(heads, row_offsets, cache_lengths, table, interleaved=True)
    width, rotated = int(heads.shape[2]), int(table.shape[1])
    kept, last = ops.split(heads, [width - rotated, rotated], axis=2)
    last = _rotate_halves(last, row_offsets, cache_lengths, table)
    return ops.concat([kept, last], axis=2)


def _rotate_halves(
    heads: TensorValue, row_offsets: TensorValue, cache_lengths: TensorValue, table: TensorValue
) -> TensorValue:
    """Rotates whole heads: MAX 26.7 rotates the halves of a part of one wrongly on the CPU."""
    table = ops.cast(table, heads.dtype)
    return kernels.rope_ragged(heads, row_offsets, cache_lengths, table, interleaved=False)


def rope_table(rope: RopeSettings, head_dim: int, max_seq_len: int) -> _Floats:
    """The angles' cosines and sines of each position, as MAX's rope kernels read them.

    Computed in float32 step by step as Hugging Face does, so that long positions round alike.

    Args:
        rope: The settings.
        head_dim: Dimensions of one head, all of them rotated.
        max_seq_len: Positions.

    Returns:
        float32 ``[max_seq_len, head_dim]`` of (cos, sin) pairs, one pair per frequency.
    """
    positions = np.arange(max_seq_len, dtype=np.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    pairs = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    table = pairs.reshape(max_seq_len, head_dim) * np.float32(rope.attention_factor)
    return table.astype(np.float32, copy=False)


def inverse_frequencies(rope: RopeSettings, head_dim: int) -> _Floats:
    """The angle per position of each pair of dimensions, float32 ``[head_dim / 2]``."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (np.float32(1.0) / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.rope_type == "default":
        return base
    if rope.rope_type == "linear":
        return base / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        return _llama3(rope, base)
    return _yarn(rope, base, head_dim)


def _llama3(rope: RopeSettings, base: _Floats) -> _Floats:
    """Llama 3.1's stretch: long wavelengths wholly, short ones not, a ramp between.

    Source: ``apply_scaling`` in Meta's llama-models, as in Hugging Face's rope utilities.
    """
    assert rope.original_max_position is not None
    wavelengths = 2 * math.pi / base
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    stretched = base / rope.factor
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - smooth) * stretched + smooth * base
    chosen = np.where(wavelengths > low, stretched, np.where(wavelengths < high, base, ramp))
    return chosen.astype(np.float32)


def _yarn(rope: RopeSettings, base: _Floats, head_dim: int) -> _Floats:
    """Yarn's stretch by parts (arXiv 2309.00071, section 3.2)."""
    assert rope.original_max_position is not None
    original = rope.original_max_position

    def dimension(rotations: float) -> float:
        turns = math.log(original / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (base / rope.factor * ramp + base * (1 - ramp)).astype(np.float32)
