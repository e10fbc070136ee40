"""Nothing in a graph is computed from constants alone: MAX would compile that first, and run it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import FAMILIES, LFM2_STAGES, LORA_PARALLEL, VISION_PARALLEL, plan_for

from models.decoder import CausalDecoder
from models.graphs import RoleModules
from models.vision import VisionEncoder

GIVEN = ("rmo.reshape", "rmo.concat", "rmo.mo.range")
"""What MAX does with constants without compiling anything."""

DIVIDED = (
    *((model, deployment) for model in FAMILIES for deployment in ("dp2", "tp2")),
    *(("tiny_deepseek_v3", deployment) for deployment in ("ep2", "ep2_tp2", "ep4_dp4")),
)


@pytest.mark.parametrize(
    "overrides",
    [
        *((f"model={model}",) for model in FAMILIES),
        *((f"model={model}", f"deployment={deployment}") for model, deployment in DIVIDED),
        *(LFM2_STAGES, *LORA_PARALLEL, *VISION_PARALLEL),
    ],
    ids=lambda overrides: "-".join(word.partition("=")[2] for word in overrides[:2]),
)
def test_nothing_is_computed_from_constants_alone(overrides: tuple[str, ...]) -> None:
    assert list(computed_from_constants(*overrides)) == []


def computed_from_constants(*overrides: str) -> Iterator[str]:
    """The operations whose operands are constants; a division by one, which MAX inverts, too."""
    plan = plan_for(*overrides)
    stages = [stage.config for stage in plan.stages]
    modules = RoleModules.of(CausalDecoder, VisionEncoder, stages, plan.vision)
    for spec in modules.specs(None).values():
        (region,) = spec.trace(None)._mlir_op.regions
        constants: list[Any] = []
        for operation in (operation for block in region.blocks for operation in block.operations):
            name = str(operation.name)
            operands = [value in constants for value in operation.operands]
            if name == "mo.constant" or (name in GIVEN and operands and all(operands)):
                constants.extend(operation.results)
            elif operands and (all(operands) or (name == "rmo.div" and operands[1])):
                yield name
