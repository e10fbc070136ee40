"""Step 4, compile: a registration to a loaded model, through MAX's compile cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from max.driver import CPU
from max.engine import InferenceSession

from builder.build import Registration
from models.registration_graph_api import GraphApiDecoderPipelineModel


@dataclass(frozen=True)
class Compiled:
    """A deployment that is ready to run."""

    registration: Registration
    """What it was made from."""

    session: InferenceSession
    """The session that runs it."""

    model: GraphApiDecoderPipelineModel
    """The loaded pipeline model."""

    cache_hit: bool
    """Whether every graph came out of MAX's compile cache."""


@cache
def process_session() -> InferenceSession:
    """The one session of this process, shared by its deployments."""
    return InferenceSession(devices=[CPU()])


def compile_cache_folder() -> Path:
    """Where MAX 26.7 keeps compiled graphs, one file per graph."""
    root = os.environ.get("MODULAR_CACHE_DIR")
    base = Path(root) if root else Path.home() / ".cache" / "modular"
    return base / ".max_cache" / "mof" / "mef"


def compile_registration(registration: Registration, session: InferenceSession) -> Compiled:
    """Builds, compiles and initialises the registration's graphs.

    Args:
        registration: What to build.
        session: The session to compile with and run in.
    """
    before = _cached_graphs()
    plan, config = registration.plan, registration.pipeline_config
    model = registration.model_cls(
        config,
        session,
        registration.devices,
        config.model.kv_cache,
        plan.checkpoint,
        return_logits=plan.stages[-1].config.return_logits,
        memory_plan=registration.memory_plan,
        max_batch_size=plan.deployment.batch.max_batch_size,
    )
    return Compiled(registration, session, model, cache_hit=_cached_graphs() <= before)


def _cached_graphs() -> set[Path]:
    return set(compile_cache_folder().glob("*/*"))
