"""Checks of one setting against another, each with its arithmetic and what would work."""

from __future__ import annotations

from collections.abc import Sequence

from max.driver import accelerator_count

from builder.choices import host_memory, settled
from builder.memory import DeviceShare, WeightItems
from builder.schema import (
    DeploymentConfig,
    DeviceKind,
    Encoding,
    ModelConfig,
    ParallelConfig,
)
from models.checkpoints import Checkpoint
from models.errors import ConfigError
from models.layers.vocabulary import TOKEN_EMBEDDING
from models.settings import ModelSettings, VisionSettings
from models.weights import DeclaredWeight, expected_shapes

PAGE_SIZES = (1, 8, 16, 64, 128, 256)
"""The KV page sizes that MAX 26.7's CPU attention kernel was measured with."""

MIN_SLIDING_WINDOW = 128
"""The smallest window that MAX 26.7's CPU attention kernel compiles with."""


def check_devices(deployment: DeploymentConfig) -> None:
    """The parallel degrees make as many devices as there are."""
    devices, parallel = deployment.devices, deployment.parallel
    degrees = {
        "tensor": parallel.tensor,
        "data": parallel.data,
        "expert": parallel.expert,
        "pipeline": parallel.pipeline,
    }
    for name, degree in degrees.items():
        if degree < 1:
            raise ConfigError(f"deployment.parallel.{name}: {degree} is less than 1")
    if parallel.data > 1 and parallel.tensor > 1:
        raise ConfigError(
            f"deployment.parallel.data: {parallel.data} replicas over {parallel.data} x "
            f"tensor={parallel.tensor} devices: each device of a stage needs a replica of its "
            "own\n  what works: data=1, or tensor=1"
        )
    shared = parallel.tensor * parallel.data
    if parallel.expert > 1 and shared not in (1, parallel.expert):
        raise ConfigError(
            f"deployment.parallel.expert: {parallel.expert}, but tensor={parallel.tensor} x "
            f"data={parallel.data} = {shared} devices: experts are divided over all devices of a "
            f"stage\n  what works: expert={shared}, or tensor=1 and data=1"
        )
    needed = stage_devices(parallel) * parallel.pipeline
    if devices.count != needed:
        names = ("expert",) if parallel.expert > shared else ("tensor", "data")
        product = " x ".join(f"{name}={degrees[name]}" for name in (*names, "pipeline"))
        raise ConfigError(
            f"deployment.devices.count: {devices.count}, but {product} = {needed}\n"
            f"  what works: deployment.devices.count={needed}"
        )


def stage_devices(parallel: ParallelConfig) -> int:
    """How many devices a stage has."""
    return max(parallel.tensor * parallel.data, parallel.expert)


def check_features(deployment: DeploymentConfig, settings: ModelSettings) -> None:
    """What is asked for exists."""
    if deployment.vision and settings.vision is None:
        raise ConfigError(
            f"deployment.vision: true, but {settings.family} takes text alone: it has no encoder "
            "of images\n  what works: deployment.vision=false"
        )
    for name in deployment.constants:
        if name != TOKEN_EMBEDDING:
            raise ConfigError(
                f"deployment.constants: {name!r} is no weight that can be an input\n"
                f"  what works: {TOKEN_EMBEDDING}"
            )


def check_division(deployment: DeploymentConfig, settings: ModelSettings) -> None:
    """Experts, heads and columns divide over the devices that share a layer."""
    parallel = deployment.parallel
    _check_experts(parallel, settings)
    vision = settings.vision if deployment.vision else None
    problem = _undivided(parallel, settings, vision, parallel.tensor)
    if problem is None:
        return
    works = [
        degree
        for degree in range(1, settings.num_heads + 1)
        if _undivided(parallel, settings, vision, degree) is None
    ]
    raise ConfigError(
        f"deployment.parallel.tensor: {problem}"
        f"\n  what works: deployment.parallel.tensor={' or '.join(map(str, works))}"
    )


def _check_experts(parallel: ParallelConfig, settings: ModelSettings) -> None:
    if parallel.expert == 1:
        return
    if settings.experts is None:
        raise ConfigError(
            f"deployment.parallel.expert: {parallel.expert}, but {settings.family} is dense: it "
            "has no experts to divide\n  what works: deployment.parallel.expert=1"
        )
    count = settings.experts.num_experts
    if count % parallel.expert:
        works = [degree for degree in range(1, count + 1) if count % degree == 0]
        raise ConfigError(
            f"deployment.parallel.expert: {count} experts do not divide over "
            f"expert={parallel.expert}\n  what works: deployment.parallel.expert="
            f"{' or '.join(map(str, works))}"
        )


def _undivided(
    parallel: ParallelConfig, settings: ModelSettings, vision: VisionSettings | None, tensor: int
) -> str | None:
    """What does not divide over so many devices."""
    if vision is not None and vision.num_heads % tensor:
        return f"the image encoder's {vision.num_heads} heads do not divide over tensor={tensor}"
    if settings.num_heads % tensor:
        return f"{settings.num_heads} heads do not divide over tensor={tensor}"
    num_kv_heads = settings.num_kv_heads
    if settings.latent is None and num_kv_heads % tensor and tensor % num_kv_heads:
        return (
            f"{num_kv_heads} key-value heads neither divide over tensor={tensor} nor repeat "
            "evenly over it"
        )
    if settings.delta is not None and settings.delta.key_heads % tensor:
        return (
            f"the delta rule's {settings.delta.key_heads} key heads do not divide over "
            f"tensor={tensor}"
        )
    columns = {}
    if vision is not None:
        columns["the image encoder's feed-forward"] = vision.intermediate_size
    if settings.conv is not None:
        columns["the short convolution"] = settings.hidden_size
    if settings.dense_layers:
        columns["the feed-forward"] = settings.intermediate_size
    if settings.experts is not None:
        columns["the shared experts"] = settings.experts.shared_size
        if parallel.expert == 1:
            columns["an expert"] = settings.experts.intermediate_size
    for name, size in columns.items():
        if size % tensor:
            return f"{name}'s {size} columns do not divide over tensor={tensor}"
    return None


def check_stage_layers(
    deployment: DeploymentConfig, settings: ModelSettings, counts: Sequence[int]
) -> None:
    """The stages' layers are the model's, and no stage is empty."""
    pipeline = deployment.parallel.pipeline
    if pipeline > settings.num_layers:
        raise ConfigError(
            f"deployment.parallel.pipeline: {pipeline} stages for {settings.num_layers} layers; "
            f"each stage needs one\n  what works: at most {settings.num_layers}"
        )
    if len(counts) != pipeline:
        raise ConfigError(
            f"deployment.parallel.stage_layers: {len(counts)} entries for pipeline={pipeline}"
        )
    if min(counts) < 1 or sum(counts) != settings.num_layers:
        raise ConfigError(
            f"deployment.parallel.stage_layers: {' + '.join(map(str, counts))} = {sum(counts)}, "
            f"but the model has {settings.num_layers} layers and each stage needs one"
        )


def check_max_length(asked: int, longest: int) -> None:
    """The longest sequence is one that the model is made for."""
    if not 1 < asked <= longest:
        raise ConfigError(
            f"deployment.max_length: {asked} is not between 2 and the model's "
            f"max_position_embeddings, {longest}"
        )


def check_windows(settings: ModelSettings, max_length: int) -> None:
    """The attention kernel takes each layer's sliding window."""
    for layer, window in enumerate(settings.windows):
        if window is not None and window < min(MIN_SLIDING_WINDOW, max_length):
            raise ConfigError(
                f"model.source: layer {layer} has a sliding window of {window} tokens; MAX's CPU "
                f"kernel takes {MIN_SLIDING_WINDOW} and more\n  what works: "
                f"deployment.max_length={window}, within which the window has no effect"
            )


def check_batch(deployment: DeploymentConfig) -> None:
    """A step can hold a token of each sequence."""
    batch = settled(deployment.batch)
    if batch.max_batch_size < 1:
        raise ConfigError(f"deployment.batch.max_batch_size: {batch.max_batch_size} is less than 1")
    if batch.max_batch_input_tokens < batch.max_batch_size:
        raise ConfigError(
            f"deployment.batch.max_batch_input_tokens: {batch.max_batch_input_tokens} tokens "
            f"cannot hold one token of each of {batch.max_batch_size} sequences"
            "\n  what works: at least deployment.batch.max_batch_size"
        )


def check_page_size(deployment: DeploymentConfig) -> None:
    """The page size is one that the kernels take."""
    page_size = deployment.kv.page_size
    if page_size not in PAGE_SIZES:
        raise ConfigError(
            f"deployment.kv.page_size: {page_size} is not a size that MAX's CPU kernels are known "
            f"to take\n  what works: {', '.join(map(str, PAGE_SIZES))}"
        )


def check_num_pages(
    deployment: DeploymentConfig, asked: int, per_sequence: int, max_length: int
) -> None:
    """One sequence of the longest length fits."""
    page_size = deployment.kv.page_size
    if asked < 1:
        raise ConfigError(f"deployment.kv.num_pages: {asked} is less than 1")
    if asked < per_sequence:
        raise ConfigError(
            f"deployment.kv.num_pages: {asked} pages of {page_size} tokens hold "
            f"{asked * page_size}; one sequence of max_length {max_length} needs {per_sequence}"
            f"\n  what works: deployment.kv.num_pages={per_sequence}, or "
            f"deployment.max_length={max(asked * page_size, 2)}"
        )


Held = Sequence[tuple[WeightItems, Sequence[DeviceShare]]]
"""The weights and devices of each deployment that is held at the same time."""


def obstacles(
    model: ModelConfig, deployment: DeploymentConfig, checkpoint: Checkpoint, held: Held
) -> tuple[str, ...]:
    """Why a deployment that can be planned cannot be run on this machine.

    Args:
        model: The model's configuration.
        deployment: The deployment's configuration.
        checkpoint: The opened checkpoint.
        held: What is held at the same time.
    """
    found = []
    if not checkpoint.has_weights:
        found.append(f"model.source: {checkpoint.path} has no *.safetensors file")
    if deployment.devices.kind is not DeviceKind.cpu:
        return (*found, *_missing_accelerators(deployment))
    assert model.encoding is not None, "resolve chooses the encoding"
    if model.encoding is Encoding.bfloat16:
        found.append(
            f"model.encoding: {model.encoding.value} is not computed on the CPU, where MAX's "
            "kernels are slower in it than in float32\n  what works: model.encoding=float32 "
            "(a checkpoint in another encoding is converted on load), or model.encoding=stored"
        )
    weights = sum(items.host for items, _ in held)
    pages = sum(share.kv_pages for _, devices in held for share in devices)
    work = sum(share.workspace for _, devices in held for share in devices)
    who, total = host_memory(deployment)
    if weights + pages + work > total:
        found.append(
            f"deployment: needs {(weights + pages + work) / 2**30:.1f} GiB, {who} "
            f"{total / 2**30:.1f}\n"
            f"  weights {weights / 2**30:.1f} GiB + KV pages {pages / 2**30:.1f} GiB"
            f" + workspace {work / 2**30:.1f} GiB\n"
            "  what works: fewer pages, with deployment.kv.num_pages, batch.max_batch_size "
            "or max_length"
        )
    return tuple(found)


def _missing_accelerators(deployment: DeploymentConfig) -> tuple[str, ...]:
    """Why accelerators of a deployment can't be run on."""
    devices = deployment.devices
    if devices.kind is DeviceKind.virtual:
        return (
            "deployment.devices.kind: virtual accelerators are compiled for, and run nothing\n"
            "  what works: task=compile or task=plan; deployment.devices.kind=gpu on a machine "
            "that has them",
        )
    here = accelerator_count()
    if here >= devices.count:
        return ()
    many = "accelerator" if devices.count == 1 else "accelerators"
    return (
        f"deployment.devices.count: {devices.count} {many}, this machine has {here or 'none'}\n"
        "  what works: deployment.devices.kind=virtual with task=compile or task=plan",
    )


def check_no_obstacle(found: Sequence[str]) -> None:
    """The deployment can be run on this machine."""
    if found:
        raise ConfigError(found[0])


def check_checkpoint(
    checkpoint: Checkpoint, weights: Sequence[DeclaredWeight], unread_parts: tuple[str, ...]
) -> None:
    """The checkpoint has every tensor that is read, in its shape, and no other.

    Args:
        checkpoint: The opened checkpoint.
        weights: What reads it.
        unread_parts: Beginnings of the names of what the deployment does without.

    Raises:
        ConfigError: If a tensor is missing, has another shape, or is read by no layer (the
            model would compute something else than it was trained to).
    """
    tensors, family = checkpoint.tensors, checkpoint.settings.family
    expected = expected_shapes(weights)
    for name, shape in expected.items():
        if name not in tensors:
            raise ConfigError(
                f"model.source: {checkpoint.path} has no tensor {name}, which {family} reads"
            )
        if tensors[name].shape != shape:
            raise ConfigError(
                f"model.source: {checkpoint.path}: {name} is {list(tensors[name].shape)}; "
                f"the settings need {list(shape)}"
            )
    unread = sorted(
        name for name in set(tensors) - set(expected) if not name.startswith(unread_parts)
    )
    if checkpoint.settings.tie_word_embeddings:
        # Some exporters save the tied table twice.
        unread = [name for name in unread if name != "lm_head.weight"]
    if unread:
        raise ConfigError(
            f"model.source: {checkpoint.path} has {len(unread)} tensors that "
            f"{family} does not read, the first {unread[0]}"
        )
