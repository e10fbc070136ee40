"""The accelerators that deployments name: what MAX compiles for them as, and their memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from builder.checks import stage_devices
from builder.schema import DeploymentConfig, DeviceKind, DevicesConfig, Encoding
from models.errors import ConfigError
from models.finalize import check_accelerated_model
from models.settings import ModelSettings

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of accelerator."""

    name: str
    """What reports call it."""

    api: str
    """MAX's name of its programming interface."""

    arch: str
    """MAX's name of its target."""

    memory: int
    """Its memory in bytes."""

    @property
    def target(self) -> str:
        """MAX's name of what is compiled for, such as ``cuda:sm_90a``."""
        return f"{self.api}:{self.arch}"


# What nvidia-smi, and on AMD amd-smi, reports as a device's total, in MiB.
_KNOWN = {
    "a100": ("cuda", "sm_80", 81920),
    "h100": ("cuda", "sm_90a", 81559),
    "h200": ("cuda", "sm_90a", 143771),
    "b200": ("cuda", "sm_100a", 183359),
    "mi300x": ("hip", "gfx942", 196592),
    "mi325x": ("hip", "gfx942", 262128),
    "mi355x": ("hip", "gfx950", 294896),
}

KNOWN = {
    name: Accelerator(name=name, api=api, arch=arch, memory=mib * MIB)
    for name, (api, arch, mib) in _KNOWN.items()
}
"""The accelerators whose facts are known, by the name that a deployment gives."""

TARGETS = {
    "cuda": ("sm_80", "sm_90", "sm_90a", "sm_100a"),
    "hip": ("gfx942", "gfx950"),
}
"""The targets that MAX 26.7 was measured to compile for, by programming interface."""


def accelerator_of(devices: DevicesConfig) -> Accelerator | None:
    """The accelerator that a deployment's devices are; ``None`` where they are the CPU.

    Args:
        devices: The deployment's devices.

    Raises:
        ConfigError: If it is not known, or a value is missing or none of MAX's.
    """
    given = {
        "accelerator": devices.accelerator,
        "api": devices.api,
        "arch": devices.arch,
        "memory_gib": devices.memory_gib,
    }
    if devices.memory_gib is not None and not 0 < devices.memory_gib < math.inf:
        raise ConfigError(
            f"deployment.devices.memory_gib: {devices.memory_gib} is not a number above 0"
        )
    if not 0 < devices.memory_utilization <= 1:
        raise ConfigError(
            f"deployment.devices.memory_utilization: {devices.memory_utilization} is not between 0 "
            "and 1"
        )
    if devices.kind is DeviceKind.cpu:
        for key, value in given.items():
            # The host's memory may be limited.
            if value is not None and key != "memory_gib":
                raise ConfigError(
                    f"deployment.devices.{key}: {value}, but the devices are the CPU\n"
                    "  what works: deployment.devices.kind=virtual, or gpu on a machine that has "
                    "them"
                )
        return None
    known = None
    if devices.accelerator is not None:
        known = KNOWN.get(devices.accelerator)
        if known is None:
            raise ConfigError(
                f"deployment.devices.accelerator: {devices.accelerator!r} is none whose facts are "
                f"known\n  what works: {', '.join(KNOWN)}; or instead of it "
                "deployment.devices.api, arch and memory_gib"
            )
    api = devices.api or (known.api if known else "")
    arch = devices.arch or (known.arch if known else "")
    memory = known.memory if known else 0
    if devices.memory_gib is not None:
        memory = int(devices.memory_gib * 2**30)
    for key, fact in {"api": api, "arch": arch, "memory_gib": memory}.items():
        if not fact:
            raise ConfigError(
                f"deployment.devices.{key}: missing, and no accelerator is named that says it\n"
                f"  what works: deployment.devices.accelerator={' or '.join(KNOWN)}, or a value"
            )
    if arch not in TARGETS.get(api, ()):
        names = "; ".join(f"api={api} with arch={' or '.join(a)}" for api, a in TARGETS.items())
        raise ConfigError(
            f"deployment.devices.arch: api={api} with arch={arch} is no target of MAX 26.7\n"
            f"  what works: {names}"
        )
    return Accelerator(name=devices.accelerator or arch, api=api, arch=arch, memory=memory)


MAX_STAGE_DEVICES = 8
"""Accelerators that MAX's collectives reach (``max.nn.comm.Signals``)."""

PAGE_SIZES = (128, 256)
"""The KV page sizes that MAX's attention kernels for accelerators take."""


def check_accelerated(
    encoding: Encoding, deployment: DeploymentConfig, settings: ModelSettings
) -> None:
    """The deployment is one whose layers have a form for accelerators.

    Args:
        encoding: How weights are held and computed.
        deployment: The deployment.
        settings: The model.

    Raises:
        ConfigError: If it is not, with the reason.
    """
    parallel = deployment.parallel
    if encoding is not Encoding.bfloat16:
        raise ConfigError(
            f"model.encoding: {encoding.value} is not computed on accelerators\n"
            "  what works: model.encoding=bfloat16 (a checkpoint in another encoding is converted)"
        )
    if deployment.kv.page_size not in PAGE_SIZES:
        raise ConfigError(
            f"deployment.kv.page_size: {deployment.kv.page_size} is no size that MAX's kernels for "
            f"accelerators take\n  what works: {' or '.join(map(str, PAGE_SIZES))}"
        )
    if deployment.vision:
        raise ConfigError(
            "deployment.vision: images are encoded on the CPU only, not on accelerators\n"
            "  what works: deployment.vision=false"
        )
    check_accelerated_model(settings)
    if stage_devices(parallel) > MAX_STAGE_DEVICES:
        key = max(("tensor", "data", "expert"), key=lambda name: getattr(parallel, name))
        raise ConfigError(
            f"deployment.parallel.{key}: {stage_devices(parallel)} accelerators in a stage; MAX "
            f"26.7 exchanges between {MAX_STAGE_DEVICES} at most\n  what works: "
            f"deployment.parallel.{key}={MAX_STAGE_DEVICES}, or more stages "
            "(deployment.parallel.pipeline)"
        )
    if parallel.expert > 1 and parallel.pipeline > 1:
        raise ConfigError(
            f"deployment.parallel.expert: {parallel.expert} with pipeline={parallel.pipeline}: "
            "MAX 26.7 exchanges experts between all accelerators of a deployment\n"
            "  what works: pipeline=1, or expert=1"
        )


_GENERAL = (
    "function instantiation failed",
    "failed to run the pass manager",
    "could not elaborate",
)
"""What MAX's compiler says of any failure."""


def max_reason(error: BaseException) -> str:
    """What MAX says is wrong, in one line: what its compiler came to, rather than from where.

    Args:
        error: What it raised.
    """
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        said += [line.strip() for line in str(cause).splitlines() if line.strip()]
        cause = cause.__cause__
    failed = [line for line in said if "constraint failed" in line]
    wrong = [line for line in said if "error:" in line and not any(g in line for g in _GENERAL)]
    return (failed or wrong or said or [type(error).__name__])[0]


def compile_error(accelerator: Accelerator, reason: str) -> ConfigError:
    """What a user is told where MAX can't compile.

    Args:
        accelerator: What for.
        reason: MAX's own reason.
    """
    return ConfigError(
        f"deployment.devices: MAX can't compile this for {accelerator.target}: {reason}"
    )
