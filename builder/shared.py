"""What the jobs of one process share: opened checkpoints, their tensors, and loaded graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from max.nn.layer import Module

from builder.machine import memory_bytes
from builder.resolve import Plan
from models.checkpoints import Checkpoint, open_checkpoint
from models.checkpoints.kept import KeptTensors
from models.decoder import CausalDecoder, constant_weights
from models.vision import VisionEncoder
from models.weights import (
    DeclaredWeight,
    FromCheckpoint,
    TensorReader,
    WeightLoader,
    declared_weights,
)

if TYPE_CHECKING:
    from models.graphs import LoadedGraphs

KEPT_PART = 0.25
"""The part of this machine's memory that tensors may take, and that weights of graphs may take
which no job is using."""

Stamp = tuple[tuple[str, int, int], ...]
"""The names, sizes and times of a checkpoint's files."""


@dataclass(frozen=True)
class _Kept:
    """Graphs that were loaded, and what they were loaded for."""

    plan: Plan
    graphs: LoadedGraphs

    def serves(self, plan: Plan) -> bool:
        """Whether a plan's graphs are these."""
        own = self.plan
        return (
            own.checkpoint is plan.checkpoint
            and own.vision == plan.vision
            and own.deployment.artifact == plan.deployment.artifact
            and [stage.config for stage in own.stages] == [stage.config for stage in plan.stages]
        )

    @property
    def num_bytes(self) -> int:
        """What its weights take on the host."""
        return self.plan.weights.host


class Shared:
    """What one process has opened and loaded so far.

    Args:
        several: Whether more than one deployment of a checkpoint is loaded in it, so that its
            tensors are worth keeping.
    """

    def __init__(self, *, several: bool) -> None:
        self.several = several
        """Whether its process may have run other jobs, or loads several deployments."""
        self._checkpoints: dict[Path, tuple[Stamp, Checkpoint, TensorReader]] = {}
        self._graphs: list[_Kept] = []

    def checkpoint(self, path: Path) -> Checkpoint:
        """Opens a checkpoint, once unless its files change.

        Args:
            path: A GGUF file, or a folder in Hugging Face's layout.

        Raises:
            ConfigError: If it can't be opened.
        """
        stamp = _stamp(path)
        known = self._checkpoints.get(path)
        if known is None or known[0] != stamp:
            opened = open_checkpoint(path)
            limit = int(KEPT_PART * self._memory)
            reader = KeptTensors(opened, limit) if self.several else opened
            known = self._checkpoints[path] = (stamp, opened, reader)
        return known[1]

    @contextmanager
    def weights(self, plan: Plan) -> Iterator[WeightLoader]:
        """Begins to make the values of a plan's weights, for graphs that are compiled meanwhile.

        Args:
            plan: The plan; where its graphs are loaded, their weights are given.
        """
        graphs = self.graphs(plan)
        if graphs is not None:
            yield graphs.weights
            return
        weights = WeightLoader(self._reader(plan.checkpoint))
        try:
            weights.begin(_read_weights(plan))
            yield weights
        except BaseException:
            # The process would end only when all are read.
            weights.stop()
            raise

    def _reader(self, checkpoint: Checkpoint) -> TensorReader:
        known = self._checkpoints.get(checkpoint.path)
        return known[2] if known is not None and known[1] is checkpoint else checkpoint

    def graphs(self, plan: Plan) -> LoadedGraphs | None:
        """The graphs of a plan, where they are loaded.

        Args:
            plan: The plan.
        """
        for kept in self._graphs:
            if kept.serves(plan):
                # The one that was used last is dropped last.
                self._graphs.remove(kept)
                self._graphs.append(kept)
                return kept.graphs
        return None

    def keep(self, plan: Plan, graphs: LoadedGraphs) -> None:
        """Keeps a plan's graphs, and drops those used longest ago where they are too many.

        Args:
            plan: The plan.
            graphs: Its loaded graphs.
        """
        self._graphs.append(_Kept(plan, graphs))
        limit = KEPT_PART * self._memory
        while sum(kept.num_bytes for kept in self._graphs[:-1]) > limit:
            del self._graphs[0]

    @cached_property
    def _memory(self) -> int:
        return memory_bytes()


def _read_weights(plan: Plan) -> Iterator[DeclaredWeight]:
    """The weights of a plan's graphs that are read from its checkpoint."""
    configs = [stage.config for stage in plan.stages]
    modules: list[Module] = [CausalDecoder(config) for config in configs]
    if plan.vision is not None:
        modules.append(VisionEncoder(plan.vision))
    taken = (shards for config in configs for shards in constant_weights(config).values())
    declared = (declared_weights(module).values() for module in modules)
    for weight in chain.from_iterable([*declared, *taken]):
        if isinstance(weight.source, FromCheckpoint):
            yield weight


def _stamp(path: Path) -> Stamp:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    facts = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, fact.st_size, fact.st_mtime_ns) for name, fact in facts)
