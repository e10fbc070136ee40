"""Completes a model's settings with a deployment: the configurations its modules are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from max.dtype import DType
from max.nn.transformer import ReturnLogits

from models.collectives import signal_bytes
from models.config import Declarations, DecoderConfig, VisionConfig
from models.decoder import boundary_types, constant_weights, reads_token_embedding, scratch_types
from models.errors import ConfigError
from models.exchange import declared_exchange
from models.kv_cache import kv_cache_params
from models.layers.vocabulary import TOKEN_EMBEDDING
from models.lora import LoraLimits, lora_types
from models.placement import Placement
from models.settings import ModelSettings
from models.state import state_types


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """How much a replica serves at once."""

    max_seq_len: int
    """The longest sequence, prompt and continuation, in tokens."""

    max_batch_size: int
    """Sequences of a step."""

    max_batch_input_tokens: int
    """Tokens of a step."""

    page_size: int
    """Tokens of a KV page."""

    num_pages: int | None = None
    """KV pages; ``None`` is enough for every sequence to be the longest."""

    prefix_caching: bool = False
    """Whether sequences that begin alike share pages."""

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_seq_len // self.page_size)

    @property
    def max_context_length(self) -> int:
        """The most tokens that the pages of one step's sequences hold."""
        pages = self.max_batch_size * self.pages_per_sequence
        return (pages if self.num_pages is None else min(self.num_pages, pages)) * self.page_size


def check_accelerated_model(settings: ModelSettings) -> None:
    """Every layer of a model has a form for accelerators.

    Args:
        settings: The model.

    Raises:
        ConfigError: If one has none.
    """
    missing = {
        "short convolutions": settings.conv is not None,
        "the gated delta rule": settings.delta is not None,
        "rotation of latents in halves": settings.latent is not None
        and not settings.latent.interleaved,
        f"experts with {settings.hidden_act}": settings.experts is not None
        and settings.hidden_act != "silu",
    }
    for name, is_missing in missing.items():
        if is_missing:
            raise ConfigError(
                f"model.source: {settings.family} has {name}, which this decoder computes on the "
                "CPU only\n  what works: deployment.devices.kind=cpu"
            )


def decoder_config(
    settings: ModelSettings,
    placement: Placement,
    dtype: DType,
    limits: ServingLimits,
    *,
    return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
    constants: tuple[str, ...] = (),
    lora: LoraLimits | None = None,
    vision: bool = False,
    stored: Mapping[str, str] | None = None,
    rounds_activations: bool = False,
) -> DecoderConfig:
    """The finalized configuration of one stage, completed with what it declares.

    Args:
        settings: The model.
        placement: The stage's devices and layers.
        dtype: The dtype of weights and activations.
        limits: How much a replica serves at once.
        return_logits: Which logits the graph returns.
        constants: Weights held as inputs, by the stages that read them.
        lora: The adapters that are served; ``None`` for none.
        vision: Whether images are served.
        stored: The encoding of each matrix that is kept as the checkpoint stores it.
        rounds_activations: Whether products with kept blocks of integers round activations.
    """
    config = DecoderConfig(
        settings=settings,
        placement=placement,
        dtype=dtype,
        kv_params=kv_cache_params(
            settings, placement, dtype, limits.page_size, limits.prefix_caching
        ),
        max_seq_len=limits.max_seq_len,
        max_batch_size=limits.max_batch_size,
        max_batch_input_tokens=limits.max_batch_input_tokens,
        max_context_length=limits.max_context_length,
        return_logits=return_logits,
        constants=tuple(
            name
            for name in constants
            if name == TOKEN_EMBEDDING and reads_token_embedding(settings, placement)
        ),
        lora=lora,
        stored={} if stored is None else stored,
        rounds_activations=rounds_activations,
    )
    return replace(
        config,
        declarations=Declarations(
            vision=vision and placement.is_first,
            signal_bytes=signal_bytes(placement),
            token_positions=settings.rope is None and placement.is_first,
            takes_batch_context_lengths=settings.latent is not None,
            state=state_types(settings, placement, dtype, limits.max_batch_size),
            lora=None if lora is None else lora_types(settings, placement, dtype, lora),
            ep=declared_exchange(config),
            scratch=scratch_types(config),
            constants={
                name: tuple(weight.input_type for weight in shards)
                for name, shards in constant_weights(config).items()
            }
            or None,
            stage_boundary=None if placement.is_first else boundary_types(config),
        ),
    )


def vision_config(first: DecoderConfig) -> VisionConfig | None:
    """The image encoder's configuration, on the devices of the first stage.

    Args:
        first: That stage's configuration.

    Returns:
        ``None`` where it takes no images.
    """
    vision = first.settings.vision
    if not first.declarations.vision:
        return None
    assert vision is not None, "images for a model of text alone are refused"
    placement = replace(first.placement, layers=range(vision.num_layers))
    return VisionConfig(
        settings=vision,
        hidden_size=first.settings.hidden_size,
        placement=placement,
        dtype=first.dtype,
        signal_bytes=signal_bytes(placement),
        stored=first.stored,
        rounds_activations=first.rounds_activations,
    )
