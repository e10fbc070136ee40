"""Which device of a stage holds what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from max.graph import DeviceRef

from models.settings import ExpertSettings, ModelSettings

DECODER_ROLE = "decoder"
"""MAX's ``GraphRole.DECODER``, whose module imports the pipelines."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The devices of one pipeline stage and what each holds.

    Devices are replica-major: device ``d`` is tensor rank ``d % tensor`` of replica
    ``d // group``. A replica's devices share its weights (tensor parallel), or, where only experts
    are divided, each has all the others. Ranges are of the whole model's heads, columns, rows,
    experts and layers.
    """

    devices: tuple[DeviceRef, ...]
    """The stage's devices. Simulated devices are several references to the one CPU."""

    tensor: int = 1
    """Devices that share each layer's weights."""

    data: int = 1
    """Replicas, each with sequences and KV pages of its own."""

    expert: int = 1
    """Devices that routed experts are divided over: 1, or all of the stage's."""

    layers: range
    """The layers this stage computes, by their index in the model."""

    stage: int = 0
    """This stage's position."""

    num_stages: int = 1
    """How many stages the model is split into."""

    def __post_init__(self) -> None:
        assert self.expert in (1, len(self.devices)), "experts are divided over all devices"
        assert self.tensor * self.data in (
            len(self.devices),
            1 if self.expert > 1 else len(self.devices),
        ), "devices = tensor x data, or those of the experts"

    @property
    def on_host(self) -> bool:
        """Whether the devices are the one CPU, rather than accelerators."""
        return self.devices[0].is_cpu()

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage returns logits."""
        return self.stage == self.num_stages - 1

    @property
    def group(self) -> int:
        """Devices of one replica."""
        return len(self.devices) // self.data

    @property
    def firsts(self) -> range:
        """Each replica's first device."""
        return range(0, len(self.devices), self.group)

    def rank(self, device: int) -> int:
        """A device's position among those that share its replica's weights."""
        return device % self.tensor

    def replica(self, device: int) -> int:
        """The replica that a device serves."""
        return device // self.group

    def heads(self, settings: ModelSettings, device: int) -> range:
        """The query heads a device computes."""
        return _share(settings.num_heads, self.tensor, self.rank(device))

    def kv_heads(self, settings: ModelSettings, device: int) -> range:
        """The key-value heads a device holds; one that others hold too, where tensor exceeds them.

        A model with latent attention has one latent, which every device holds. Query heads ``h``
        read key-value head ``h // (num_heads / num_kv_heads)``, so the heads of a rank always read
        the ones it holds.
        """
        if self.tensor <= settings.num_kv_heads:
            return _share(settings.num_kv_heads, self.tensor, self.rank(device))
        head = self.rank(device) * settings.num_kv_heads // self.tensor
        return range(head, head + 1)

    def inner_columns(self, size: int, device: int) -> range:
        """The inner columns of a feed-forward of some size that a device computes."""
        return _share(size, self.tensor, self.rank(device))

    def expert_columns(self, experts: ExpertSettings, device: int) -> range:
        """The inner columns of each of its experts that a device computes."""
        if self.expert > 1:
            return range(experts.intermediate_size)
        return self.inner_columns(experts.intermediate_size, device)

    def experts(self, experts: ExpertSettings, device: int) -> range:
        """The routed experts of each layer that a device holds."""
        return _share(experts.num_experts, self.expert, device % self.expert)

    def splits_vocabulary(self, settings: ModelSettings) -> bool:
        """Whether the embedding table's rows are divided; otherwise each device has all."""
        return self.tensor > 1 and settings.vocab_size % self.tensor == 0

    def vocabulary(self, settings: ModelSettings, device: int) -> range:
        """The rows of the embedding table and output projection a device holds."""
        if not self.splits_vocabulary(settings):
            return range(settings.vocab_size)
        return _share(settings.vocab_size, self.tensor, self.rank(device))


def stage_role(placement: Placement) -> str:
    """The role of a stage's graph: ``decoder``, or ``decoder_0`` and so on where there are several.

    MAX's compile cache ignores graph names, so equal graphs of two models share an entry, and
    ``init_graphs`` looks it up by the name it was cached with: the role is the name.
    """
    return DECODER_ROLE if placement.num_stages == 1 else f"{DECODER_ROLE}_{placement.stage}"


def _share(count: int, parts: int, part: int) -> range:
    assert count % parts == 0, f"{count} over {parts} is refused at resolve"
    size = count // parts
    return range(part * size, (part + 1) * size)


def split_layers(num_layers: int, counts: Sequence[int]) -> tuple[range, ...]:
    """Consecutive layers per stage, each layer in exactly one.

    Args:
        num_layers: The model's layers.
        counts: Layers per stage.
    """
    assert sum(counts) == num_layers, "a partition covers every layer exactly once"
    ranges, start = [], 0
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return tuple(ranges)


def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage as even as can be; the first stages have the extra ones."""
    least, extra = divmod(num_layers, num_stages)
    return tuple(least + (stage < extra) for stage in range(num_stages))
