"""What a decoder is constructed from: the model's settings, completed with the deployment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from max.dtype import DType
from max.nn.kv_cache import KVCacheParams
from max.nn.transformer import ReturnHiddenStates, ReturnLogits

from models.lora import AdapterSlot, LoraLimits, adapter_slot
from models.placement import Placement
from models.settings import ModelSettings, VisionSettings


class Placed(Protocol):
    """What every layer is constructed from."""

    @property
    def placement(self) -> Placement:
        """The stage's devices, and what each holds."""
        ...

    @property
    def dtype(self) -> DType:
        """The dtype of weights and activations."""
        ...

    @property
    def stored(self) -> Mapping[str, str]:
        """The encoding of each matrix that is kept as the checkpoint stores it."""
        ...

    @property
    def rounds_activations(self) -> bool:
        """Whether products with kept blocks of integers round activations to 8 bits."""
        ...


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Everything the graph of a VISION module depends on."""

    settings: VisionSettings
    """The encoder."""

    hidden_size: int
    """Width of the decoder's residual stream."""

    placement: Placement
    """The devices of the first stage; the layers are the encoder's."""

    dtype: DType
    """The dtype of weights and activations."""

    signal_bytes: int | None = None
    """The size of one signal buffer; ``None`` where no device exchanges with another."""

    stored: Mapping[str, str] = field(default_factory=dict)
    """The encoding of each matrix that is kept as the checkpoint stores it."""

    rounds_activations: bool = False
    """Whether products with kept blocks of integers round activations to 8 bits."""


@dataclass(frozen=True, kw_only=True)
class Declarations:
    """What a decoder and its deployment declare beyond the inputs that every graph takes.

    A tree is a ``max.tree`` of ``TensorType`` and ``BufferType``; ``None`` declares nothing.
    """

    vision: bool = False
    """Whether a VISION module is registered beside the decoder."""

    token_positions: bool = False
    """Whether the decoder reads absolute positions (learned position embeddings)."""

    always_signal_buffers: bool = False
    """Whether the graph takes signal buffers on one device too."""

    signal_bytes: int | None = None
    """The size of one signal buffer; needed where signals are taken."""

    takes_batch_context_lengths: bool = False
    """Whether the decoder sizes buffers by the batch's context lengths (MLA)."""

    device_context_length_dtype: DType | None = None
    """Set where those lengths are wanted per device, on the device, in this dtype."""

    ep: Any = None
    """The expert-parallel exchange's ``input_tree()``."""

    lora: tuple[Any, ...] | None = None
    """Routing, then an A and a B stack per target slot."""

    constants: Any = None
    """Checkpoint-backed deployment inputs."""

    state: tuple[Any, ...] | None = None
    """What the decoder keeps per request, per device, in the ``RequestStateStore``'s order."""

    scratch: tuple[Any, ...] | None = None
    """The decoder's ``scratch_types``."""

    stage_boundary: Any = None
    """What the previous stage returns."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything a decoder's graph depends on; two equal configs build the same graph."""

    settings: ModelSettings
    """The model."""

    placement: Placement
    """The stage's devices, and what each holds."""

    dtype: DType
    """The dtype of weights and activations."""

    kv_params: KVCacheParams | None
    """The KV cache of this stage's own layers; ``None`` where none of them attends."""

    max_seq_len: int
    """The longest sequence served, prompt and continuation, in tokens."""

    max_batch_input_tokens: int = 512
    """The most tokens of one replica's step."""

    max_batch_size: int = 8
    """The most sequences of one replica's step."""

    max_context_length: int = 0
    """The most tokens that a replica's pages hold."""

    return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN
    """Which logits the graph returns."""

    return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE
    """Which hidden states the graph returns."""

    constants: tuple[str, ...] = ()
    """The weights that this stage takes as inputs."""

    stored: Mapping[str, str] = field(default_factory=dict)
    """The encoding of each matrix that is kept as the checkpoint stores it, by canonical name;
    others are held in the dtype."""

    rounds_activations: bool = False
    """Whether products with kept blocks of integers round activations to 8 bits."""

    lora: LoraLimits | None = None
    """The adapters that are served; ``None`` for none."""

    declarations: Declarations = field(default_factory=Declarations)
    """The optional inputs."""

    def adapter_slot(self, holder: int, layer: int, target: str) -> AdapterSlot | None:
        """Where adapters add to a product of a device; ``None`` where they don't."""
        if self.lora is None:
            return None
        return adapter_slot(self.settings, self.placement, self.lora, holder, layer, target)

    def kv_layer(self, layer: int) -> int:
        """A layer's position in the KV cache of the stage, which has those that attend."""
        return self.settings.attending(self.placement.layers).index(layer)
