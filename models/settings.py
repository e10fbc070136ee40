"""What a decoder computes: the facts a family reads from a checkpoint's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeSettings:
    """Rotary position embedding, in the terms of Hugging Face's ``rope_parameters``."""

    theta: float
    """The base of the frequencies (``rope_theta``)."""

    rope_type: RopeType = "default"
    """How the frequencies are stretched for long contexts."""

    factor: float = 1.0
    """How many times longer the context is than the one trained on."""

    original_max_position: int | None = None
    """The context length trained on (llama3 and yarn)."""

    low_freq_factor: float = 1.0
    """llama3: wavelengths above ``original_max_position / low_freq_factor`` are fully stretched."""

    high_freq_factor: float = 4.0
    """llama3: wavelengths below ``original_max_position / high_freq_factor`` stay as they are."""

    beta_fast: float = 32.0
    """yarn: rotations above which a frequency stays as it is."""

    beta_slow: float = 1.0
    """yarn: rotations below which a frequency is fully stretched."""

    attention_factor: float = 1.0
    """What cos and sin are multiplied with (yarn's temperature)."""

    truncate: bool = True
    """yarn: whether the ramp's ends are rounded to whole dimensions."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The sizes and switches of one decoder-only model."""

    family: str
    """The registry name of the family that read them."""

    vocab_size: int
    """Rows of the embedding table."""

    hidden_size: int
    """Width of the residual stream."""

    num_layers: int
    """Decoder layers."""

    num_heads: int
    """Query heads."""

    num_kv_heads: int
    """Key and value heads."""

    head_dim: int
    """Width of one head."""

    intermediate_size: int
    """Width of the feed-forward's inner layer."""

    norm_eps: float
    """The epsilon of every RMS norm."""

    rope: RopeSettings
    """Rotary position embedding."""

    max_position_embeddings: int
    """The longest sequence the checkpoint is made for."""

    tie_word_embeddings: bool
    """Whether the output projection is the embedding table."""

    hidden_act: str = "silu"
    """The feed-forward's activation, by its Hugging Face name."""

    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias."""

    o_bias: bool = False
    """Whether the attention's output projection has a bias."""

    mlp_bias: bool = False
    """Whether the feed-forward's projections have a bias."""

    qk_norm: bool = False
    """Whether each query and key head is RMS-normalised before the rotation."""

    windows: tuple[int | None, ...] = ()
    """Each layer's sliding window in tokens; ``None`` is full attention. One entry per layer."""

    def __post_init__(self) -> None:
        assert len(self.windows) == self.num_layers, "one window entry per layer"
