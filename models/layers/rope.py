"""Rotary position embeddings: the table of cosines and sines."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from max.dtype import DType
from max.graph import TensorValue
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
