"""Step 2, resolve: a job's configuration to a plan.

Pure and fast: no session is opened and no weights are read beyond the checkpoint's header. Every
check of one setting against another is here or in ``checks``, before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.transformer import ReturnLogits

from builder import checks
from builder.adapters import lora_limits, open_adapters
from builder.memory import (
    DeviceShare,
    WeightItems,
    device_shares,
    kv_bytes_per_token,
    weight_items,
)
from builder.schema import DeploymentConfig, Encoding, Logits, ModelConfig
from models.checkpoints import Checkpoint
from models.collectives import signal_bytes
from models.config import Declarations, DecoderConfig, VisionConfig
from models.contract import Contract
from models.decoder import (
    CausalDecoder,
    boundary_types,
    constant_weights,
    reads_token_embedding,
    scratch_types,
)
from models.exchange import exchange_types
from models.kv_cache import kv_cache_params
from models.layers.vocabulary import TOKEN_EMBEDDING
from models.lora import Adapter, lora_types
from models.placement import Placement, even_counts, split_layers
from models.settings import ModelSettings
from models.state import state_types
from models.vision import VISION_PARTS, VisionEncoder
from models.weights import declared_weights, expected_shapes

DTYPES = {Encoding.float32: DType.float32, Encoding.bfloat16: DType.bfloat16}
"""What weights, activations and the KV cache are in, per encoding."""

DEFAULT_MAX_LENGTH = 2048
"""The longest sequence where neither the deployment nor the model asks for less."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage: one decoder graph."""

    config: DecoderConfig
    """What the decoder is constructed from."""

    contract: Contract
    """What its graph takes, and why."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A resolved job: what will be built, and why."""

    model: ModelConfig
    """The model's configuration."""

    deployment: DeploymentConfig
    """The deployment's configuration."""

    checkpoint: Checkpoint
    """The opened checkpoint."""

    stages: tuple[Stage, ...]
    """The pipeline stages in order; one where the model is not split."""

    max_length: int
    """The longest sequence, in tokens."""

    num_pages: int
    """KV pages per replica."""

    devices: tuple[DeviceShare, ...]
    """What each device holds."""

    vision: VisionConfig | None
    """The encoder of images; ``None`` where the deployment takes text alone."""

    weights: WeightItems
    """Where the bytes of all devices' weights come from."""

    adapters: Mapping[str, Adapter]
    """The adapters that are served from the start, by name."""

    limits: Mapping[str, int]
    """The largest value of each symbolic dimension of the contract."""

    obstacles: tuple[str, ...]
    """Why it can be planned but not run on this machine; empty where it runs."""

    @property
    def settings(self) -> ModelSettings:
        """The model's settings."""
        return self.stages[0].config.settings

    @property
    def num_replicas(self) -> int:
        """How many replicas share the batch."""
        return self.stages[0].config.placement.data

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values, or latents, take; copies not counted."""
        return kv_bytes_per_token(stage.config for stage in self.stages)


def resolve(
    model: ModelConfig,
    deployment: DeploymentConfig,
    checkpoint: Checkpoint,
    needed_logits: Logits = Logits.last_token,
) -> Plan:
    """Resolves a deployment of a checkpoint.

    Args:
        model: The model's configuration.
        deployment: The deployment's configuration.
        checkpoint: The opened checkpoint.
        needed_logits: What the graph returns where the deployment does not say.

    Raises:
        ConfigError: If any setting can't be satisfied; the message shows the arithmetic.
    """
    settings = checkpoint.settings
    logits = ReturnLogits((deployment.return_logits or needed_logits).value)
    checks.check_devices(deployment)
    checks.check_features(deployment, settings)
    checks.check_division(deployment, settings)
    checks.check_batch(deployment)
    max_length = _max_length(deployment, settings)
    checks.check_windows(settings, max_length)
    num_pages = _num_pages(deployment, max_length)
    stages, weights, constants = [], [], []
    for placement in _placements(deployment, settings):
        config = _decoder_config(
            deployment, settings, placement, DTYPES[model.encoding], max_length, num_pages, logits
        )
        decoder = CausalDecoder(config)
        stages.append(Stage(config=config, contract=decoder.contract))
        weights.append(declared_weights(decoder))
        constants.append([w for shards in constant_weights(config).values() for w in shards])
    vision = _vision_config(deployment, settings, stages[0].config)
    encoder = [] if vision is None else list(declared_weights(VisionEncoder(vision)).values())
    every = [*(w for named in weights for w in named.values()), *encoder]
    # Stages share a constant's buffers: the ones of the first that takes it.
    shared = next((shards for shards in constants if shards), [])
    if checkpoint.has_weights:
        # Without images their encoder is not built.
        without = VISION_PARTS if settings.vision and vision is None else ()
        unread = (*checkpoint.family.unread, *without)
        checks.check_checkpoint(checkpoint, [*every, *shared], unread)
    devices = device_shares(
        [
            (stage.config, stage.contract, named.values(), held)
            for stage, named, held in zip(stages, weights, constants, strict=True)
        ],
        num_pages,
        encoder,
    )
    items = weight_items([*every, *shared], expected_shapes([*every, *shared]))
    return Plan(
        model=model,
        deployment=deployment,
        checkpoint=checkpoint,
        stages=tuple(stages),
        max_length=max_length,
        num_pages=num_pages,
        devices=devices,
        vision=vision,
        weights=items,
        adapters=open_adapters(
            deployment, checkpoint, [stage.config.placement for stage in stages]
        ),
        limits=_limits(deployment, settings, num_pages, max_length),
        obstacles=checks.obstacles(model, deployment, checkpoint, [(items, devices)]),
    )


def _placements(deployment: DeploymentConfig, settings: ModelSettings) -> list[Placement]:
    parallel = deployment.parallel
    counts = parallel.stage_layers or even_counts(settings.num_layers, parallel.pipeline)
    checks.check_stage_layers(deployment, settings, counts)
    return [
        Placement(
            # Simulated devices are all the one CPU.
            devices=(DeviceRef.CPU(),) * checks.stage_devices(parallel),
            tensor=parallel.tensor,
            data=parallel.data,
            expert=parallel.expert,
            layers=layers,
            stage=stage,
            num_stages=parallel.pipeline,
        )
        for stage, layers in enumerate(split_layers(settings.num_layers, counts))
    ]


def _decoder_config(
    deployment: DeploymentConfig,
    settings: ModelSettings,
    placement: Placement,
    dtype: DType,
    max_length: int,
    num_pages: int,
    return_logits: ReturnLogits,
) -> DecoderConfig:
    page_size = deployment.kv.page_size
    batch = deployment.batch
    lora = lora_limits(deployment)
    pages = min(num_pages, batch.max_batch_size * _pages_per_sequence(deployment, max_length))
    constants = tuple(
        name
        for name in deployment.constants
        if name == TOKEN_EMBEDDING and reads_token_embedding(settings, placement)
    )
    config = DecoderConfig(
        settings=settings,
        placement=placement,
        dtype=dtype,
        kv_params=kv_cache_params(settings, placement, dtype, page_size),
        max_seq_len=max_length,
        max_batch_size=batch.max_batch_size,
        max_batch_input_tokens=batch.max_batch_input_tokens,
        max_context_length=pages * page_size,
        return_logits=return_logits,
        constants=constants,
        lora=lora,
    )
    return replace(
        config,
        declarations=Declarations(
            vision=deployment.vision and placement.is_first,
            signal_bytes=signal_bytes(placement),
            token_positions=settings.rope is None and placement.is_first,
            takes_batch_context_lengths=settings.latent is not None,
            state=state_types(settings, placement, dtype, batch.max_batch_size),
            lora=None if lora is None else lora_types(settings, placement, lora),
            ep=_exchange_types(config),
            scratch=scratch_types(config),
            constants={
                name: tuple(weight.input_type for weight in shards)
                for name, shards in constant_weights(config).items()
            }
            or None,
            stage_boundary=None if placement.is_first else boundary_types(config),
        ),
    )


def _vision_config(
    deployment: DeploymentConfig, settings: ModelSettings, first: DecoderConfig
) -> VisionConfig | None:
    """The encoder's configuration, on the devices of the first stage."""
    if not deployment.vision:
        return None
    assert settings.vision is not None, "images for a model of text alone are refused"
    placement = replace(first.placement, layers=range(settings.vision.num_layers))
    return VisionConfig(
        settings=settings.vision,
        hidden_size=settings.hidden_size,
        placement=placement,
        dtype=first.dtype,
        signal_bytes=signal_bytes(placement),
    )


def _exchange_types(config: DecoderConfig) -> object:
    experts, placement = config.settings.experts, config.placement
    if placement.expert == 1:
        return None
    assert experts is not None, "expert parallelism of a dense model is refused"
    hidden = config.settings.hidden_size
    return exchange_types(experts, placement, hidden, config.max_batch_input_tokens)


def _max_length(deployment: DeploymentConfig, settings: ModelSettings) -> int:
    longest = settings.max_position_embeddings
    if deployment.max_length is None:
        return min(longest, DEFAULT_MAX_LENGTH)
    checks.check_max_length(deployment.max_length, longest)
    return deployment.max_length


def _num_pages(deployment: DeploymentConfig, max_length: int) -> int:
    checks.check_page_size(deployment)
    per_sequence = _pages_per_sequence(deployment, max_length)
    asked = deployment.kv.num_pages
    if asked is None:
        return deployment.batch.max_batch_size * per_sequence
    checks.check_num_pages(deployment, asked, per_sequence, max_length)
    return asked


def _pages_per_sequence(deployment: DeploymentConfig, max_length: int) -> int:
    return -(-max_length // deployment.kv.page_size)


def _limits(
    deployment: DeploymentConfig, settings: ModelSettings, num_pages: int, max_length: int
) -> dict[str, int]:
    batch, replicas = deployment.batch, deployment.parallel.data
    limits = {
        "total_seq_len": replicas * batch.max_batch_input_tokens,
        "input_row_offsets_len": replicas * batch.max_batch_size + 1,
        "total_num_pages": num_pages + 1,
        "num_image_tokens": batch.max_batch_input_tokens,
        "lora_groups": replicas * batch.max_batch_size,
        "lora_grouped_offsets_len": replicas * batch.max_batch_size + 1,
    }
    for replica in range(replicas):
        limits[f"replica_{replica}_batch_size"] = batch.max_batch_size
        limits[f"replica_{replica}_max_num_pages"] = _pages_per_sequence(deployment, max_length)
        limits[f"replica_{replica}_seq_len"] = batch.max_batch_input_tokens
        if settings.vision is not None:
            # A step's tokens reach whole crops, and parts of two of each sequence.
            whole = batch.max_batch_input_tokens // settings.vision.tokens_per_crop
            limits[f"replica_{replica}_num_crops"] = whole + 2 * batch.max_batch_size
    return limits
