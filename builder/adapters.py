"""The adapters that a deployment serves, opened and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from builder.schema import DeploymentConfig
from models.checkpoints import Checkpoint
from models.checkpoints.peft import open_adapter
from models.errors import ConfigError
from models.lora import TARGETS, Adapter, LoraLimits, check_adapter, whole_sizes
from models.placement import Placement


def lora_limits(deployment: DeploymentConfig) -> LoraLimits | None:
    """What a deployment's stacks hold; ``None`` where it serves no adapters.

    Raises:
        ConfigError: If a limit is too small, or a target is none.
    """
    lora = deployment.lora
    if lora.max_adapters < 0:
        raise ConfigError(f"deployment.lora.max_adapters: {lora.max_adapters} is less than 0")
    count = lora.max_adapters or len(lora.adapters)
    if count == 0:
        return None
    if len(lora.adapters) > count:
        raise ConfigError(
            f"deployment.lora.max_adapters: {count}, but {len(lora.adapters)} are named\n"
            f"  what works: deployment.lora.max_adapters={len(lora.adapters)}"
        )
    if lora.max_rank < 1:
        raise ConfigError(f"deployment.lora.max_rank: {lora.max_rank} is less than 1")
    unknown = [target for target in lora.targets if target not in TARGETS]
    if unknown or not lora.targets:
        raise ConfigError(
            f"deployment.lora.targets: {unknown[0] if unknown else 'empty'}"
            f"\n  what works: some of {', '.join(TARGETS)}"
        )
    targets = tuple(target for target in TARGETS if target in lora.targets)
    return LoraLimits(max_adapters=count, max_rank=lora.max_rank, targets=targets)


def open_adapters(
    deployment: DeploymentConfig, checkpoint: Checkpoint, stages: Sequence[Placement]
) -> Mapping[str, Adapter]:
    """A deployment's adapters by name.

    Raises:
        ConfigError: If a folder is no adapter, or does not fit the model or the limits.
    """
    limits = lora_limits(deployment)
    if limits is None:
        return {}
    sizes = whole_sizes(checkpoint.settings, stages, limits)
    if not sizes:
        raise ConfigError(
            f"deployment.lora: {checkpoint.settings.family} has no product that adapters may add to"
        )
    adapters = {}
    for name, folder in deployment.lora.adapters.items():
        adapters[name] = open_adapter(Path(folder).expanduser(), checkpoint.family.canonical)
        check_adapter(adapters[name], limits, sizes)
    return adapters
