"""Step 2, resolve: a job's configuration to a plan.

Pure and fast: no session is opened and no weights are read beyond the checkpoint's header. Every
check of one setting against another is here or in ``checks``, before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.transformer import ReturnLogits

from builder import checks
from builder.accelerators import accelerator_of, check_accelerated
from builder.adapters import lora_limits, open_adapters
from builder.capacity import Capacity, capacity_of, check_fits
from builder.choices import (
    INPUT_TOKENS,
    BatchLimits,
    Choice,
    choose_batch_size,
    choose_input_tokens,
    choose_prefix_caching,
    settled,
)
from builder.memory import (
    DeviceShare,
    WeightItems,
    device_shares,
    kv_bytes_per_token,
    weight_items,
)
from builder.schema import (
    BatchConfig,
    DeploymentConfig,
    DeviceKind,
    DevicesConfig,
    Encoding,
    Logits,
    ModelConfig,
)
from models.checkpoints import Checkpoint
from models.config import DecoderConfig, VisionConfig
from models.contract import Contract
from models.decoder import CausalDecoder, constant_weights
from models.finalize import ServingLimits, decoder_config, vision_config
from models.lora import Adapter
from models.placement import Placement, even_counts, split_layers
from models.settings import ModelSettings
from models.storage import storages
from models.vision import VISION_PARTS, VisionEncoder
from models.weights import declared_weights, expected_shapes

DTYPES = {
    Encoding.float32: DType.float32,
    Encoding.bfloat16: DType.bfloat16,
    Encoding.stored: DType.float32,
}
"""What activations, the KV cache and weights that are not kept otherwise are in, per encoding."""

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

    capacity: Capacity | None
    """What would fit into the accelerators; ``None`` on the CPU."""

    vision: VisionConfig | None
    """The encoder of images; ``None`` where the deployment takes text alone."""

    weights: WeightItems
    """Where the bytes of all devices' weights come from."""

    adapters: Mapping[str, Adapter]
    """The adapters that are served from the start, by name."""

    limits: Mapping[str, int]
    """The largest value of each symbolic dimension of the contract."""

    choices: tuple[Choice, ...]
    """What was taken for keys that the deployment leaves open, and whether prompts share pages."""

    obstacles: tuple[str, ...]
    """Why it can be planned but not run on this machine; empty where it runs."""

    @property
    def settings(self) -> ModelSettings:
        """The model's settings."""
        return self.stages[0].config.settings

    @property
    def encoding(self) -> Encoding:
        """How weights are held and computed."""
        assert self.model.encoding is not None, "resolve chooses one"
        return self.model.encoding

    @property
    def dtype(self) -> DType:
        """What activations, the KV cache and weights that are not kept otherwise are in."""
        return self.stages[0].config.dtype

    @property
    def batch(self) -> BatchLimits:
        """The limits of a step of a replica."""
        return settled(self.deployment.batch)

    @property
    def prefix_caching(self) -> bool:
        """Whether prompts that begin alike share pages."""
        return self.deployment.kv.prefix_caching is True

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
    *,
    keeps: bool = True,
) -> Plan:
    """Resolves a deployment of a checkpoint.

    Args:
        model: The model's configuration.
        deployment: The deployment's configuration.
        checkpoint: The opened checkpoint.
        needed_logits: What the graph returns where the deployment does not say.
        keeps: Whether weights may be kept as the checkpoint stores them; otherwise all are
            converted to what is computed in.

    Raises:
        ConfigError: If any setting can't be satisfied; the message shows the arithmetic.
    """
    choices = [choose_prefix_caching(deployment, checkpoint.settings)]
    kv = replace(deployment.kv, prefix_caching=bool(choices[0].value))
    deployment = replace(deployment, kv=kv)

    def of(size: int, tokens: int) -> Plan:
        batch = BatchConfig(max_batch_size=size, max_batch_input_tokens=tokens)
        limited = replace(deployment, batch=batch)
        return _resolved(model, limited, checkpoint, needed_logits, choices, keeps)

    size, tokens = deployment.batch.max_batch_size, deployment.batch.max_batch_input_tokens
    if tokens is None:
        least = 1 if size is None else size
        choices.append(choose_input_tokens(of(least, max(least, INPUT_TOKENS[1]))))
        tokens = int(choices[-1].value)
    if size is None:
        choices.append(choose_batch_size(of(1, tokens)))
        size = int(choices[-1].value)
    return of(size, tokens)


def _resolved(
    model: ModelConfig,
    deployment: DeploymentConfig,
    checkpoint: Checkpoint,
    needed_logits: Logits,
    choices: Sequence[Choice],
    keeps: bool,
) -> Plan:
    """Resolves a deployment that leaves no limit open."""
    settings = checkpoint.settings
    accelerator = accelerator_of(deployment.devices)
    if model.encoding is None:
        encoding = Encoding.float32 if accelerator is None else Encoding.bfloat16
        model = replace(model, encoding=encoding)
    assert model.encoding is not None
    logits = ReturnLogits((deployment.return_logits or needed_logits).value)
    checks.check_devices(deployment)
    checks.check_features(deployment, settings)
    if accelerator is not None:
        check_accelerated(model.encoding, deployment, settings)
    checks.check_division(deployment, settings)
    checks.check_batch(deployment)
    max_length = _max_length(deployment, settings)
    checks.check_windows(settings, max_length)
    batch = settled(deployment.batch)
    limits = ServingLimits(
        max_seq_len=max_length,
        max_batch_size=batch.max_batch_size,
        max_batch_input_tokens=batch.max_batch_input_tokens,
        page_size=deployment.kv.page_size,
    )
    num_pages = _num_pages(deployment, limits)
    limits = replace(limits, num_pages=num_pages)
    rounds = model.encoding is Encoding.stored
    kept = {}
    if keeps and accelerator is None and model.encoding is not Encoding.bfloat16:
        kept = _kept(checkpoint, rounds)
    stages, weights, constants = [], [], []
    for placement in _placements(deployment, settings):
        config = decoder_config(
            settings,
            placement,
            DTYPES[model.encoding],
            limits,
            return_logits=logits,
            constants=tuple(deployment.constants),
            lora=lora_limits(deployment),
            vision=deployment.vision,
            stored=kept,
            rounds_activations=rounds,
        )
        decoder = CausalDecoder(config)
        stages.append(Stage(config=config, contract=decoder.contract))
        weights.append(declared_weights(decoder))
        constants.append([w for shards in constant_weights(config).values() for w in shards])
    vision = vision_config(stages[0].config)
    encoder = [] if vision is None else list(declared_weights(VisionEncoder(vision)).values())
    every = [*(w for named in weights for w in named.values()), *encoder]
    # Stages share a constant's buffers: the ones of the first that takes it.
    shared = next((shards for shards in constants if shards), [])
    if accelerator is not None:
        # Not those on other devices.
        shared = [weight for shards in constants for weight in shards]
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
    capacity = None
    if accelerator is not None:
        configs = [stage.config for stage in stages]
        capacity = capacity_of(accelerator, deployment, configs, devices)
        check_fits(capacity, deployment, num_pages, max_length, devices)
    items = weight_items([*every, *shared], expected_shapes([*every, *shared]))
    return Plan(
        model=model,
        deployment=deployment,
        checkpoint=checkpoint,
        stages=tuple(stages),
        max_length=max_length,
        num_pages=num_pages,
        devices=devices,
        capacity=capacity,
        vision=vision,
        weights=items,
        adapters=open_adapters(
            deployment, checkpoint, [stage.config.placement for stage in stages]
        ),
        limits=_dimension_limits(deployment.parallel.data, limits, settings),
        choices=tuple(choices),
        obstacles=checks.obstacles(model, deployment, checkpoint, [(items, devices)]),
    )


def _kept(checkpoint: Checkpoint, rounds: bool) -> dict[str, str]:
    """The encodings that are kept, by the tensors that have one."""
    keepable = storages(rounds=rounds)
    encodings = {name: info.encoding for name, info in checkpoint.tensors.items()}
    return {name: encoding for name, encoding in encodings.items() if encoding in keepable}


def _placements(deployment: DeploymentConfig, settings: ModelSettings) -> list[Placement]:
    parallel = deployment.parallel
    each = checks.stage_devices(parallel)
    counts = parallel.stage_layers or even_counts(settings.num_layers, parallel.pipeline)
    checks.check_stage_layers(deployment, settings, counts)
    return [
        Placement(
            devices=_device_refs(deployment.devices, range(stage * each, (stage + 1) * each)),
            tensor=parallel.tensor,
            data=parallel.data,
            expert=parallel.expert,
            layers=layers,
            stage=stage,
            num_stages=parallel.pipeline,
        )
        for stage, layers in enumerate(split_layers(settings.num_layers, counts))
    ]


def _device_refs(devices: DevicesConfig, numbers: range) -> tuple[DeviceRef, ...]:
    """Some of a deployment's devices; simulated ones are all the one CPU."""
    if devices.kind is DeviceKind.cpu:
        return (DeviceRef.CPU(),) * len(numbers)
    return tuple(DeviceRef.GPU(number) for number in numbers)


def _max_length(deployment: DeploymentConfig, settings: ModelSettings) -> int:
    longest = settings.max_position_embeddings
    if deployment.max_length is None:
        return min(longest, DEFAULT_MAX_LENGTH)
    checks.check_max_length(deployment.max_length, longest)
    return deployment.max_length


def _num_pages(deployment: DeploymentConfig, limits: ServingLimits) -> int:
    checks.check_page_size(deployment)
    asked, per_sequence = deployment.kv.num_pages, limits.pages_per_sequence
    if asked is None:
        return limits.max_batch_size * per_sequence
    checks.check_num_pages(deployment, asked, per_sequence, limits.max_seq_len)
    return asked


def _dimension_limits(
    replicas: int, limits: ServingLimits, settings: ModelSettings
) -> dict[str, int]:
    """The largest value of each symbolic dimension of the contract."""
    assert limits.num_pages is not None, "resolve chooses the number of pages"
    found = {
        "total_seq_len": replicas * limits.max_batch_input_tokens,
        "input_row_offsets_len": replicas * limits.max_batch_size + 1,
        "total_num_pages": limits.num_pages + 1,
        "num_image_tokens": limits.max_batch_input_tokens,
        "lora_groups": replicas * limits.max_batch_size,
        "lora_grouped_offsets_len": replicas * limits.max_batch_size + 1,
    }
    for replica in range(replicas):
        found[f"replica_{replica}_batch_size"] = limits.max_batch_size
        found[f"replica_{replica}_max_num_pages"] = limits.pages_per_sequence
        found[f"replica_{replica}_seq_len"] = limits.max_batch_input_tokens
        if settings.vision is not None:
            # A step's tokens reach whole crops, and parts of two of each sequence.
            whole = limits.max_batch_input_tokens // settings.vision.tokens_per_crop
            found[f"replica_{replica}_num_crops"] = whole + 2 * limits.max_batch_size
    return found
