"""Step 2, resolve: a job's configuration to a plan.

Pure and fast: no session is opened and no weights are read beyond the checkpoint's header. Every
check of one setting against another is here, before anything is built.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import KVCacheParams
from max.nn.transformer import ReturnLogits

from builder.schema import DeploymentConfig, DeviceKind, Encoding, ModelConfig
from models.checkpoints import Checkpoint
from models.config import DecoderConfig
from models.contract import Contract
from models.decoder import CausalDecoder
from models.errors import ConfigError
from models.kv_cache import HostMHAKVCacheParams
from models.placement import Placement
from models.settings import ModelSettings
from models.weights import DeclaredWeight, FromCheckpoint, declared_weights, source_tensors

DEFAULT_MAX_LENGTH = 2048
"""The longest sequence where neither the deployment nor the model asks for less."""

MIN_SLIDING_WINDOW = 128
"""The smallest window that MAX 26.7's CPU attention kernel compiles with."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What one device holds, in bytes."""

    device: str
    """The device."""

    weights: int
    """Weights and tables, as they are computed with."""

    kv_pages: int
    """The paged KV cache."""

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.kv_pages


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A resolved job: what will be built, and why."""

    model: ModelConfig
    """The model's configuration."""

    deployment: DeploymentConfig
    """The deployment's configuration."""

    checkpoint: Checkpoint
    """The opened checkpoint."""

    decoder: DecoderConfig
    """What the decoder is constructed from."""

    contract: Contract
    """What its graph takes, and why."""

    max_length: int
    """The longest sequence, in tokens."""

    num_pages: int
    """KV pages per replica."""

    memory: tuple[DeviceMemory, ...]
    """The memory plan, per device."""

    limits: Mapping[str, int]
    """The largest value of each symbolic dimension of the contract."""

    @property
    def settings(self) -> ModelSettings:
        """The model's settings."""
        return self.decoder.settings

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache of one replica."""
        params = self.decoder.kv_params
        assert isinstance(params, KVCacheParams)
        return params.bytes_per_block // params.page_size


def resolve(model: ModelConfig, deployment: DeploymentConfig, checkpoint: Checkpoint) -> Plan:
    """Resolves a deployment of a checkpoint.

    Raises:
        ConfigError: If any setting can't be satisfied; the message shows the arithmetic.
    """
    settings = checkpoint.settings
    _check_encoding(model, deployment)
    _check_devices(deployment)
    _check_later_features(deployment)
    max_length = _max_length(deployment, settings)
    _check_windows(settings, max_length)
    _check_batch(deployment)
    num_pages = _num_pages(deployment, max_length)
    placement = Placement(
        devices=(DeviceRef.CPU(),) * deployment.devices.count,
        layers=range(settings.num_layers),
    )
    kv_params = HostMHAKVCacheParams(
        dtype=DType.float32,
        n_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        num_layers=settings.num_layers,
        page_size=deployment.kv.page_size,
        devices=list(placement.devices),
        data_parallel_degree=placement.data,
    )
    config = DecoderConfig(
        settings=settings,
        placement=placement,
        dtype=DType.float32,
        kv_params=kv_params,
        max_seq_len=max_length,
        return_logits=ReturnLogits(deployment.return_logits.value),
    )
    decoder = CausalDecoder(config)
    weights = declared_weights(decoder)
    check_checkpoint(checkpoint, weights)
    memory = (
        DeviceMemory(
            device="cpu:0",
            weights=sum(_num_bytes(weight) for weight in weights.values()),
            # MAX keeps one more page, which unused table entries point to.
            kv_pages=(num_pages + 1) * kv_params.bytes_per_block,
        ),
    )
    _check_memory(memory, num_pages, kv_params.bytes_per_block)
    return Plan(
        model=model,
        deployment=deployment,
        checkpoint=checkpoint,
        decoder=config,
        contract=decoder.contract,
        max_length=max_length,
        num_pages=num_pages,
        memory=memory,
        limits=_limits(deployment, num_pages, max_length),
    )


def _check_encoding(model: ModelConfig, deployment: DeploymentConfig) -> None:
    if deployment.devices.kind is DeviceKind.cpu and model.encoding is not Encoding.float32:
        raise ConfigError(
            f"model.encoding: {model.encoding.value} is not computed on the CPU, where MAX's "
            "kernels are slower in it than in float32\n  what works: model.encoding=float32 "
            "(a checkpoint in another encoding is converted on load)"
        )


def _check_devices(deployment: DeploymentConfig) -> None:
    devices, parallel = deployment.devices, deployment.parallel
    if devices.kind is not DeviceKind.cpu:
        raise ConfigError(
            f"deployment.devices.kind: {devices.kind.value} devices are not supported yet\n"
            "  what works: deployment.devices.kind=cpu"
        )
    for key, value in (
        ("devices.count", devices.count),
        ("parallel.tensor", parallel.tensor),
        ("parallel.data", parallel.data),
        ("parallel.expert", parallel.expert),
        ("parallel.pipeline", parallel.pipeline),
    ):
        if value < 1:
            raise ConfigError(f"deployment.{key}: {value} is less than 1")
        if value > 1:
            raise ConfigError(
                f"deployment.{key}: {value} is not supported yet; graphs are built for one device"
                f"\n  what works: deployment.{key}=1"
            )


def _check_later_features(deployment: DeploymentConfig) -> None:
    for key, asked in (
        ("constants", bool(deployment.constants)),
        ("lora", bool(deployment.lora)),
        ("vision", deployment.vision),
    ):
        if asked:
            raise ConfigError(f"deployment.{key}: not supported yet; leave it unset")


def _max_length(deployment: DeploymentConfig, settings: ModelSettings) -> int:
    longest = settings.max_position_embeddings
    asked = deployment.max_length
    if asked is None:
        return min(longest, DEFAULT_MAX_LENGTH)
    if not 1 < asked <= longest:
        raise ConfigError(
            f"deployment.max_length: {asked} is not between 2 and the model's "
            f"max_position_embeddings, {longest}"
        )
    return asked


def _check_windows(settings: ModelSettings, max_length: int) -> None:
    for layer, window in enumerate(settings.windows):
        if window is not None and window < min(MIN_SLIDING_WINDOW, max_length):
            raise ConfigError(
                f"model.source: layer {layer} has a sliding window of {window} tokens; MAX's CPU "
                f"kernel takes {MIN_SLIDING_WINDOW} and more\n  what works: "
                f"deployment.max_length={window}, within which the window has no effect"
            )


def _check_batch(deployment: DeploymentConfig) -> None:
    batch = deployment.batch
    if batch.max_batch_size < 1:
        raise ConfigError(f"deployment.batch.max_batch_size: {batch.max_batch_size} is less than 1")
    if batch.max_batch_input_tokens < batch.max_batch_size:
        raise ConfigError(
            f"deployment.batch.max_batch_input_tokens: {batch.max_batch_input_tokens} tokens "
            f"cannot hold one token of each of {batch.max_batch_size} sequences"
            "\n  what works: at least deployment.batch.max_batch_size"
        )


def _num_pages(deployment: DeploymentConfig, max_length: int) -> int:
    page_size = deployment.kv.page_size
    if page_size < 1 or page_size & (page_size - 1):
        raise ConfigError(f"deployment.kv.page_size: {page_size} is not a power of two")
    per_sequence = -(-max_length // page_size)
    asked = deployment.kv.num_pages
    if asked is None:
        return deployment.batch.max_batch_size * per_sequence
    if asked < per_sequence:
        raise ConfigError(
            f"deployment.kv.num_pages: {asked} pages of {page_size} tokens hold "
            f"{asked * page_size}; one sequence of max_length {max_length} needs {per_sequence}"
            f"\n  what works: deployment.kv.num_pages={per_sequence}, or "
            f"deployment.max_length={max(asked * page_size, 2)}"
        )
    return asked


def _check_memory(memory: tuple[DeviceMemory, ...], num_pages: int, page_bytes: int) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = sum(device.total for device in memory)
    if needed <= total:
        return
    weights = sum(device.weights for device in memory)
    raise ConfigError(
        f"deployment: needs {needed / 2**30:.1f} GiB, this machine has {total / 2**30:.1f}\n"
        f"  weights {weights / 2**30:.1f} GiB + {num_pages + 1} KV pages x "
        f"{page_bytes / 2**20:.1f} MiB\n"
        "  what works: fewer pages, with deployment.kv.num_pages, batch.max_batch_size "
        "or max_length"
    )


def _num_bytes(weight: DeclaredWeight) -> int:
    count = 1
    for size in weight.sizes:
        count *= size
    return count * weight.dtype.size_in_bytes


def _limits(deployment: DeploymentConfig, num_pages: int, max_length: int) -> dict[str, int]:
    batch = deployment.batch
    return {
        "total_seq_len": batch.max_batch_input_tokens,
        "input_row_offsets_len": batch.max_batch_size + 1,
        "total_num_pages": num_pages + 1,
        "replica_0_batch_size": batch.max_batch_size,
        "replica_0_max_num_pages": -(-max_length // deployment.kv.page_size),
    }


def check_checkpoint(checkpoint: Checkpoint, weights: Mapping[str, DeclaredWeight]) -> None:
    """Checks that the checkpoint has every tensor that is read, in its shape, and no other.

    Raises:
        ConfigError: If a tensor is missing, has another shape, or is read by no layer (the
            model would compute something else than it was trained to).
    """
    tensors = checkpoint.tensors
    for name, weight in weights.items():
        if not isinstance(weight.source, FromCheckpoint):
            continue
        rows = 0
        for piece in weight.source.pieces:
            info = tensors.get(piece.tensor)
            if info is None:
                raise ConfigError(
                    f"model.source: {checkpoint.path} has no tensor {piece.tensor}, "
                    f"which {checkpoint.settings.family} reads"
                )
            shape = list(info.shape)
            if piece.rows is not None:
                shape[0] = piece.rows[1] - piece.rows[0]
            if piece.columns is not None:
                shape[1] = piece.columns[1] - piece.columns[0]
            rows += shape[0]
            if tuple(shape[1:]) != weight.sizes[1:] or rows > weight.sizes[0]:
                raise ConfigError(
                    f"model.source: {checkpoint.path}: {piece.tensor} is {list(info.shape)}; "
                    f"the settings give {name} {list(weight.sizes)}"
                )
        if rows != weight.sizes[0]:
            raise ConfigError(
                f"model.source: {checkpoint.path}: the tensors of {name} have {rows} rows; "
                f"the settings give {weight.sizes[0]}"
            )
    unread = sorted(set(tensors) - source_tensors(weights.values()))
    if checkpoint.settings.tie_word_embeddings:
        # Some exporters save the tied table twice.
        unread = [name for name in unread if name != "lm_head.weight"]
    if unread:
        raise ConfigError(
            f"model.source: {checkpoint.path} has {len(unread)} tensors that "
            f"{checkpoint.settings.family} does not read, the first {unread[0]}"
        )
