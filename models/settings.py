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
class RouterSettings:
    """How a layer chooses each token's experts and weighs them."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits."""

    correction_bias: bool = False
    """Whether a learned bias is added to the scores for the choice, not for the weights."""

    num_groups: int = 1
    """Groups of consecutive experts; with more than one, experts come from the best groups only."""

    top_groups: int = 1
    """How many groups a token chooses from."""

    group_score: Literal["max", "top2"] = "max"
    """A group's score: its best expert's, or the sum of its two best."""

    normalize: bool = False
    """Whether a token's weights are divided by their sum."""

    sum_floor: float = 0.0
    """What is added to that sum."""

    scale: float = 1.0
    """What the weights are multiplied with."""


@dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """A mixture of experts in place of some layers' feed-forward."""

    num_experts: int
    """Routed experts of a layer."""

    top_k: int
    """Experts that each token chooses."""

    intermediate_size: int
    """Width of one expert's inner layer."""

    shared_size: int = 0
    """Width of the experts that every token takes, together; 0 is none."""

    shared_gate: bool = False
    """Whether their result is multiplied with a gate of the token's."""

    router: RouterSettings
    """How experts are chosen."""

    layers: frozenset[int]
    """The layers that have experts."""


@dataclass(frozen=True, kw_only=True)
class ShortConvSettings:
    """Gated short convolutions in place of some layers' attention (LFM2)."""

    layers: frozenset[int]
    """The layers that convolve."""

    width: int
    """Tokens that an output sees, its own included."""

    bias: bool = False
    """Whether the convolution and its projections have a bias."""


@dataclass(frozen=True, kw_only=True)
class DeltaSettings:
    """The gated delta rule in place of some layers' attention (arXiv 2412.06464)."""

    layers: frozenset[int]
    """The layers that have it."""

    key_heads: int
    """Heads of queries and keys; value heads ``h`` read ``h // (value_heads / key_heads)``."""

    value_heads: int
    """Heads of values, each with a memory of its own."""

    key_dim: int
    """Dimensions of a head's query and key."""

    value_dim: int
    """Dimensions of a head's value."""

    width: int
    """Tokens that the convolution before it sees, the own included."""

    def channels(self, key_heads: int) -> int:
        """The channels of the convolution over so many key heads: queries, keys and values."""
        values = key_heads * self.value_heads // self.key_heads * self.value_dim
        return 2 * key_heads * self.key_dim + values


@dataclass(frozen=True, kw_only=True)
class LatentSettings:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    query_rank: int | None
    """Width that queries are compressed to; ``None`` where they are projected at once."""

    kv_rank: int
    """Width that keys and values are compressed to together: what is cached, beside the next."""

    rope_dim: int
    """The dimensions of a key that carry its position, shared by all heads."""

    nope_dim: int
    """The dimensions of a head's query and key without position."""

    value_dim: int
    """The dimensions of a head's value."""

    scale: float
    """What scores are multiplied with before the softmax."""

    bias: bool = False
    """Whether the compressing projections and the output's have a bias."""

    norm_eps: float = 1e-6
    """The epsilon of the norms on compressed queries, keys and values."""

    interleaved: bool = True
    """Whether the rotated dimensions are neighbouring pairs."""

    @property
    def cached_dim(self) -> int:
        """What one token takes in the cache of one layer."""
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """The width of one head's query."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """An encoder of images (SigLIP, arXiv 2303.15343), and what brings them to the decoder.

    The encoder sees square crops: an image, or the parts that its processor splits it into.
    """

    hidden_size: int
    """Width of the encoder's residual stream."""

    intermediate_size: int
    """Width of its feed-forwards' inner layers."""

    num_layers: int
    """Its layers."""

    num_heads: int
    """Its heads."""

    num_channels: int
    """Colours of a pixel."""

    patch_size: int
    """Pixels of a patch's side."""

    crop_size: int
    """Pixels of a crop's side."""

    table_side: int
    """Learned positions of a crop's side; those of fewer or more patches are spread over it."""

    hidden_act: str
    """The feed-forward's activation, by its Hugging Face name."""

    norm_eps: float
    """The epsilon of its norms."""

    shuffle: int
    """The side of the squares of patches that become one token."""

    image_token_id: int
    """The token in whose place an image's embeddings are put."""

    @property
    def patches_per_side(self) -> int:
        """Patches of a crop's side."""
        return self.crop_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Patches of a crop."""
        return self.patches_per_side**2

    @property
    def patch_values(self) -> int:
        """Values of one patch."""
        return self.num_channels * self.patch_size**2

    @property
    def tokens_per_crop(self) -> int:
        """Tokens that a crop becomes."""
        return self.num_patches // self.shuffle**2


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
    """The epsilon of every norm of the residual stream."""

    norm: Literal["rms", "layer"] = "rms"
    """What the residual stream is normalised by."""

    norm_offset: float = 0.0
    """What is added to the weights of RMS norms."""

    rope: RopeSettings | None
    """Rotary position embedding; ``None`` where positions are learned and added to the tokens."""

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

    mlp_gated: bool = True
    """Whether the feed-forward's inner layer is multiplied with a gate."""

    rotated_dim: int | None = None
    """The first dimensions of a head that are rotated; ``None`` is all."""

    attention_gate: bool = False
    """Whether what a head attends to is multiplied with a gate, which its queries' projection
    has behind each query."""

    qkv_fused: bool = False
    """Whether the checkpoint has queries, keys and values in one tensor."""

    transposed: bool = False
    """Whether the checkpoint's matrices of layers have one row per input."""

    qk_norm: Literal["head", "projection"] | None = None
    """What of queries and keys is RMS-normalised before the rotation: each head, or all at once."""

    qkv_clip: float | None = None
    """The largest absolute value of queries, keys and values, before the rotation."""

    windows: tuple[int | None, ...] = ()
    """Each layer's sliding window in tokens; ``None`` is full attention. One entry per layer."""

    experts: ExpertSettings | None = None
    """The mixture of experts; ``None`` is a dense model."""

    latent: LatentSettings | None = None
    """Latent attention; ``None`` is attention over whole keys and values."""

    conv: ShortConvSettings | None = None
    """Short convolutions; ``None`` where no layer has any."""

    delta: DeltaSettings | None = None
    """The gated delta rule; ``None`` where no layer has it."""

    vision: VisionSettings | None = None
    """The encoder of images; ``None`` where the model takes text alone."""

    unread_layers: int = 0
    """Layers behind the last that checkpoints have and a decoder does not read: heads that
    predict further tokens."""

    def __post_init__(self) -> None:
        assert len(self.windows) == self.num_layers, "one window entry per layer"

    @property
    def rotary_dim(self) -> int:
        """The dimensions of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rope_dim
        return self.head_dim if self.rotated_dim is None else self.rotated_dim

    def attending(self, layers: range) -> tuple[int, ...]:
        """Which of some layers attend, and so have keys and values."""
        return tuple(n for n in layers if n not in self._recurrent)

    def recurrent(self, layers: range) -> tuple[int, ...]:
        """Which of some layers keep state instead."""
        return tuple(n for n in layers if n in self._recurrent)

    @property
    def _recurrent(self) -> frozenset[int]:
        kinds = (self.conv, self.delta)
        return frozenset[int]().union(*(kind.layers for kind in kinds if kind is not None))

    @property
    def dense_layers(self) -> int:
        """How many layers have a feed-forward of their own instead of experts."""
        return self.num_layers - (0 if self.experts is None else len(self.experts.layers))
