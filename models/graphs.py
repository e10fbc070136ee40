"""A registration's graphs: the modules that they are traced from, their weights and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from max import tree
from max.engine import InferenceSession, Model
from max.pipelines.lib.graph_specs import (
    CompiledArtifacts,
    GraphRole,
    GraphSpec,
    compile_graphs,
    init_graphs,
)

from models.buffers import zeroed
from models.collectives import allocate_signals
from models.config import DecoderConfig, VisionConfig
from models.graph_api import GraphApiModule, RoleModule
from models.placement import stage_role
from models.vision import VisionEncoder
from models.weights import WeightLoader, declared_weights

VISION_ROLE = GraphRole.VISION.value
"""The role of the graph that encodes images."""

Loaded = tuple[CompiledArtifacts, dict[str, Model]]
"""Compiled graphs, and their initialized models by role."""


@dataclass(frozen=True)
class LoadedGraphs:
    """A registration's graphs and their weights, for another model of the same configuration."""

    weights: WeightLoader
    """The values, which the graphs read where they are."""

    loaded: Loaded
    """The graphs."""


@dataclass(frozen=True)
class RoleModules:
    """The modules that a registration's graphs are traced from."""

    decoders: tuple[GraphApiModule, ...]
    """One per stage."""

    vision: VisionEncoder | None = None
    """The VISION module; ``None`` where none is registered."""

    @classmethod
    def of(
        cls,
        decoder_cls: type[GraphApiModule],
        vision_cls: type[VisionEncoder] | None,
        stages: Sequence[DecoderConfig],
        vision: VisionConfig | None,
    ) -> RoleModules:
        """Constructs the modules.

        Args:
            decoder_cls: The DECODER class.
            vision_cls: The VISION class; ``None`` where the model takes text alone.
            stages: The finalized configuration of each stage.
            vision: The image encoder's; ``None`` where no images are served.
        """
        assert vision is None or vision_cls is not None, "images are served with their encoder"
        encoder = None if vision is None or vision_cls is None else vision_cls(vision)
        return cls(tuple(decoder_cls(config) for config in stages), encoder)

    def by_role(self) -> Iterator[tuple[str, RoleModule]]:
        """Each module with its role."""
        for decoder in self.decoders:
            yield stage_role(decoder.config.placement), decoder
        if self.vision is not None:
            yield VISION_ROLE, self.vision

    def specs(self, loaded: WeightLoader | None, prefix: str = "") -> dict[str, GraphSpec]:
        """The graphs, with the checkpoint loaded into them.

        Args:
            loaded: The checkpoint's values; ``None`` for graphs that are compiled alone.
            prefix: Before each role.
        """
        several = len(self.decoders) > 1 or self.vision is not None
        specs: dict[str, GraphSpec] = {}
        for name, module in self.by_role():
            role = f"{prefix}{name}"
            weights = declared_weights(module, f"{role}.")
            specs[role] = GraphSpec(
                module,
                role,
                tree.leaves(module.inputs),
                {} if loaded is None else loaded.load(weights),
                # They compile together, which shares the kernels that are alike.
                group=GraphRole.DECODER.value if several else None,
                # Each graph loads our kernels; a module of graphs is given them once.
                custom_extensions=() if specs else module.kernel_libraries,
            )
        return specs


def load_specs(session: InferenceSession, specs: Mapping[str, GraphSpec]) -> Loaded:
    """Compiles and initializes graphs.

    Args:
        session: The session to do it with.
        specs: The graphs, by role.
    """
    artifacts = compile_graphs(session, specs)
    return artifacts, init_graphs(session, artifacts, specs)


def lasting_inputs(decoder: GraphApiModule, loaded: WeightLoader) -> dict[str, Any]:
    """The buffers that a stage takes unchanged every step, by field.

    Args:
        decoder: The stage.
        loaded: The checkpoint's values.
    """
    inputs: dict[str, Any] = {}
    if decoder.inputs.signals is not None:
        inputs["signals"] = allocate_signals(decoder.inputs.signals)
    if decoder.inputs.scratch is not None:
        inputs["scratch"] = tuple(map(zeroed, decoder.inputs.scratch))
    constants = decoder.constant_weights()
    if constants:
        inputs["constants"] = {
            name: tuple(map(loaded.buffer, shards)) for name, shards in constants.items()
        }
    return inputs
