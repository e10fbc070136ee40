"""Whether a deployment fits into its accelerators, and the largest one that would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from max.dtype import DType

from builder.accelerators import Accelerator
from builder.memory import DeviceShare, activation_bytes, page_bytes, page_size
from builder.schema import DeploymentConfig
from models.config import DecoderConfig
from models.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a deployment needs of its accelerators, and what would fit."""

    accelerator: Accelerator
    """What the devices are."""

    usable: int
    """Bytes of each that are planned with."""

    needed: int
    """Bytes that the fullest device needs."""

    fullest: int
    """That device's number."""

    largest_batch: int
    """The most sequences of a replica, each of the deployment's longest length; 0 is none."""

    largest_length: int
    """The longest sequence, of as many as the deployment's batch has; 0 is none."""

    @property
    def fits(self) -> bool:
        """Whether every device has room."""
        return self.needed <= self.usable


def capacity_of(
    accelerator: Accelerator,
    deployment: DeploymentConfig,
    configs: Sequence[DecoderConfig],
    devices: Sequence[DeviceShare],
) -> Capacity:
    """Holds a deployment against its accelerators.

    Args:
        accelerator: What the devices are.
        deployment: The deployment.
        configs: The configuration of each stage.
        devices: What each device holds.
    """
    usable = int(accelerator.memory * deployment.devices.memory_utilization)
    fullest = max(devices, key=lambda share: share.total)
    batch, length = configs[0].max_batch_size, configs[0].max_seq_len
    holders = [
        (config, holder) for config in configs for holder in range(len(config.placement.devices))
    ]

    def fits(sequences: int, tokens: int) -> bool:
        return all(
            _total(config, holder, share, sequences, tokens) <= usable
            for (config, holder), share in zip(holders, devices, strict=True)
        )

    # A step has a token of each sequence.
    most = configs[0].max_batch_input_tokens
    longest = configs[0].settings.max_position_embeddings
    return Capacity(
        accelerator=accelerator,
        usable=usable,
        needed=fullest.total,
        fullest=fullest.device,
        largest_batch=_largest(most, lambda sequences: fits(sequences, length)),
        largest_length=_largest(longest, lambda tokens: fits(batch, tokens)),
    )


def _total(
    config: DecoderConfig, holder: int, share: DeviceShare, sequences: int, tokens: int
) -> int:
    """What a device would need for so many sequences of so many tokens."""
    size = page_size(config)
    pages = sequences * -(-tokens // size)
    rotated = config.settings.rotary_dim if config.settings.rope is not None else 0
    further = (tokens - config.max_seq_len) * rotated * DType.float32.size_in_bytes
    fixed = share.total - share.kv_pages - share.activations
    return (
        fixed
        + further
        # One page more is the null page.
        + (pages + 1) * page_bytes(config)
        + activation_bytes(config, holder, sequences, pages * size)
    )


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to a limit that fits, where every smaller one does; 0 is none."""
    least, most = 0, limit
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def check_fits(
    capacity: Capacity,
    deployment: DeploymentConfig,
    num_pages: int,
    max_length: int,
    devices: Sequence[DeviceShare],
) -> None:
    """The deployment fits.

    Args:
        capacity: What it needs, and what would fit.
        deployment: The deployment.
        num_pages: KV pages per replica.
        max_length: The longest sequence.
        devices: What each device holds.

    Raises:
        ConfigError: If it does not, with the arithmetic of the fullest device.
    """
    if capacity.fits:
        return
    accelerator, batch = capacity.accelerator, deployment.batch.max_batch_size
    share = devices[capacity.fullest]
    parts = {
        "weights": share.weights + share.constants,
        f"{num_pages} + 1 KV pages of {deployment.kv.page_size} tokens": share.kv_pages,
        "signals": share.signals,
        "expert exchange": share.exchange,
        "adapters": share.lora,
        "activations": share.activations,
    }
    sums = " + ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    works = []
    asked = deployment.kv.num_pages
    if asked is None and capacity.largest_batch:
        works.append(
            f"deployment.batch.max_batch_size={capacity.largest_batch} at {max_length} tokens"
        )
    if asked is None and capacity.largest_length > 1:
        works.append(f"deployment.max_length={capacity.largest_length} for {batch} sequences")
    if asked is not None:
        works.append("a smaller deployment.kv.num_pages")
    if not works:
        works.append("more devices to divide the weights over, or ones with more memory")
    raise ConfigError(
        f"deployment.devices: device {share.device} needs {_gib(share.total)} GiB, and of "
        f"{accelerator.name}'s {_gib(accelerator.memory)} GiB x memory_utilization="
        f"{deployment.devices.memory_utilization:g} are {_gib(capacity.usable)}\n"
        f"  {sums} = {_gib(share.total)} GiB\n"
        f"  what works: {', or '.join(works)}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
