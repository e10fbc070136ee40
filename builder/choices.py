"""What a deployment leaves open: the value that is taken, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.machine import last_level_cache_bytes, memory_bytes
from builder.memory import row_bytes
from builder.schema import BatchConfig, DeploymentConfig
from models.errors import ConfigError
from models.settings import ModelSettings

if TYPE_CHECKING:
    from builder.resolve import Plan

MAX_BATCH_SIZE = 64
"""The most sequences that are chosen: by then a step computes for longer than it reads weights, so
that more sequences make each wait longer and all together hardly faster."""

INPUT_TOKENS = (128, 2048)
"""The least and most tokens that are chosen. A product of fewer rows takes longer to read its
weights than to compute; more rows let what decodes wait long for its next token."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One key's value, and why."""

    key: str
    """The configuration's key."""

    value: int | bool
    """What it is taken for."""

    because: str
    """Why, with the arithmetic of a number."""


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The limits of one step of a replica, all of them settled."""

    max_batch_size: int
    """Sequences."""

    max_batch_input_tokens: int
    """Tokens."""


def settled(batch: BatchConfig) -> BatchLimits:
    """The limits of a deployment that leaves none open."""
    size, tokens = batch.max_batch_size, batch.max_batch_input_tokens
    assert size is not None, "resolve chooses one"
    assert tokens is not None, "resolve chooses one"
    return BatchLimits(max_batch_size=size, max_batch_input_tokens=tokens)


def host_memory(deployment: DeploymentConfig) -> tuple[str, int]:
    """The host's memory as far as a deployment may use it, and who says so."""
    total, limit = memory_bytes(), deployment.devices.memory_gib
    if limit is not None and limit * 2**30 < total:
        return "deployment.devices.memory_gib allows", int(limit * 2**30)
    return "this machine has", total


def choose_prefix_caching(deployment: DeploymentConfig, settings: ModelSettings) -> Choice:
    """Whether prompts that begin alike share pages.

    Args:
        deployment: The deployment.
        settings: The model.

    Raises:
        ConfigError: If they are to, and can't.
    """
    key, asked = "deployment.kv.prefix_caching", deployment.kv.prefix_caching
    size = deployment.kv.page_size
    because = f"prompts that begin alike share whole pages of {size} tokens, computed once"
    if asked is False:
        because = "asked for; every prompt is computed in full"
    elif settings.recurrent(range(settings.num_layers)):
        # It is what all tokens before made of it, and is kept where a sequence is, not per page.
        kept = "short convolutions" if settings.conv is not None else "the gated delta rule"
        because = f"{settings.family} has {kept}, whose state at a page's end is not kept"
        if asked:
            raise ConfigError(f"{key}: true, but {because}\n  what works: {key}=false")
        return Choice(key=key, value=False, because=because)
    return Choice(key=key, value=asked is not False, because=because)


def choose_input_tokens(plan: Plan) -> Choice:
    """How many tokens a replica's step takes.

    On the CPU a layer's rows go from one product to the next through the processor's cache, half
    of which is left to the weights that stream through it.

    Args:
        plan: The deployment, with any number.
    """
    page, sequences = plan.deployment.kv.page_size, plan.batch.max_batch_size
    least, most = INPUT_TOKENS
    tokens, because = most, "the most that is chosen; a prompt then reads the weights least often"
    if plan.capacity is None:
        cache = last_level_cache_bytes()
        row = max(row_bytes(stage.config) for stage in plan.stages)
        rows = cache // 2 // row
        tokens = min(max(rows // page * page, least), most)
        because = (
            f"half of {_mib(cache)} of cache / {row} bytes that a token has in a layer = {rows} "
            f"tokens; whole pages of {page}, {least} to {most}"
        )
    return Choice(
        key="deployment.batch.max_batch_input_tokens",
        value=-(-max(tokens, sequences) // page) * page,
        because=because,
    )


def choose_batch_size(plan: Plan) -> Choice:
    """How many sequences a replica computes together: what its memory has pages for.

    Args:
        plan: The deployment of one sequence.
    """
    length = plan.max_length
    if plan.deployment.kv.num_pages is not None:
        pages = -(-length // plan.deployment.kv.page_size)
        fitting = plan.num_pages // pages
        because = f"{plan.num_pages} pages / {pages} of a sequence of {length} tokens = {fitting}"
    elif plan.capacity is not None:
        fitting = plan.capacity.largest_batch
        because = (
            f"{fitting} sequences of {length} tokens fit into {plan.capacity.accelerator.name}"
        )
    else:
        one = sum(
            share.kv_pages // (plan.num_pages + 1) * plan.num_pages + share.state + share.scratch
            for share in plan.devices
        )
        held = sum(share.kv_pages + share.workspace for share in plan.devices)
        rest = plan.weights.host + held - one
        usable = int(host_memory(plan.deployment)[1] * plan.deployment.devices.memory_utilization)
        fitting = max(usable - rest, 0) // one
        because = (
            f"({_mib(usable)} of memory - {_mib(rest)} of weights and workspace) / {_mib(one)} of "
            f"a sequence of {length} tokens = {fitting}"
        )
    limit = min(max(fitting, 1), MAX_BATCH_SIZE, plan.batch.max_batch_input_tokens)
    return Choice(
        key="deployment.batch.max_batch_size",
        value=1 << (limit.bit_length() - 1),
        because=f"{because}; a power of two, at most {MAX_BATCH_SIZE}",
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
