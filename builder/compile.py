"""Step 4, compile: a registration to a loaded model, whose graphs are found or compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from max.driver import CPU, Accelerator
from max.engine import InferenceSession
from max.pipelines.lib.graph_specs import CompiledArtifacts, GraphSpec, init_graphs

from builder import graph_cache
from builder.artifact import check_artifact, read_graphs
from builder.build import Registration
from builder.shared import Shared
from models.graphs import Loaded, RoleModules, load_specs
from models.kernels import kernel_library
from models.kernels.library import max_cache_folder
from models.registration_graph_api import GraphApiDecoderPipelineModel
from models.weights import WeightLoader


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
    """Whether every graph was found compiled, or loaded."""

    reused: bool = False
    """Whether the graphs are those of a job before."""

    @property
    def found(self) -> str:
        """Where the graphs came from, for people."""
        if self.reused:
            return "not asked: loaded by a job before"
        if self.registration.plan.deployment.artifact is not None:
            return "not asked: loaded from the artifact"
        return "hit" if self.cache_hit else "miss"


@cache
def process_session(num_accelerators: int = 0) -> InferenceSession:
    """The one session of this process for so many devices, shared by its deployments.

    Args:
        num_accelerators: Accelerators; 0 is the CPU.
    """
    if num_accelerators == 0:
        return InferenceSession(devices=[CPU()])
    return InferenceSession(devices=[Accelerator(n) for n in range(num_accelerators)])


def compile_cache_folder() -> Path:
    """Where MAX 26.7 keeps compiled graphs, one file per graph."""
    return max_cache_folder() / ".max_cache" / "mof" / "mef"


def compile_registration(
    registration: Registration,
    session: InferenceSession,
    shared: Shared | None = None,
    weights: WeightLoader | None = None,
) -> Compiled:
    """Builds, compiles and initialises the registration's graphs, or takes those of a job before.

    Args:
        registration: What to build.
        session: The session to compile with and run in.
        shared: What the jobs of this process share.
        weights: What makes the weights' values; ``None`` begins to make them.
    """
    plan = registration.plan
    shared = shared or Shared(several=False)
    if weights is None:
        with shared.weights(plan) as begun:
            return compile_registration(registration, session, shared, begun)
    graphs = shared.graphs(plan)
    if graphs is not None:
        model = _loaded(registration, session, {"shared_graphs": graphs}, weights)
        return Compiled(registration, session, model, cache_hit=True, reused=True)
    artifact = check_artifact(plan)
    found = graph_cache.find(plan) if artifact is None else read_graphs(artifact)
    if found is not None:
        members = {"graph_loader": staticmethod(partial(_initialized, found))}
        model = _loaded(registration, session, members, weights)
        hit = True
    else:
        before = _cached_graphs()
        model = _loaded(registration, session, {}, weights)
        hit = _cached_graphs() <= before
        roles = {role: model.compiled_artifacts.artifact(role) for role in model.roles}
        graph_cache.keep(plan, roles)
    shared.keep(plan, model.loaded_graphs)
    return Compiled(registration, session, model, cache_hit=hit)


def _initialized(
    found: CompiledArtifacts, session: InferenceSession, specs: Mapping[str, GraphSpec]
) -> Loaded:
    """Initializes graphs that are compiled, in place of compiling them."""
    return found, init_graphs(session, found, specs)


def _loaded(
    registration: Registration,
    session: InferenceSession,
    members: Mapping[str, Any],
    weights: WeightLoader,
) -> GraphApiDecoderPipelineModel:
    """The registration's model, of a class that has some more members."""
    plan, config = registration.plan, registration.pipeline_config
    parent = registration.model_cls
    model_cls = type(parent.__name__, (parent,), dict(members))
    model: GraphApiDecoderPipelineModel = model_cls(
        config,
        session,
        registration.devices,
        config.model.kv_cache,
        weights,
        return_logits=plan.stages[-1].config.return_logits,
        memory_plan=registration.memory_plan,
        max_batch_size=plan.batch.max_batch_size,
    )
    for name, adapter in plan.adapters.items():
        assert model.adapters is not None
        model.adapters.load(name, adapter)
    return model


def compile_together(
    registrations: Sequence[Registration], session: InferenceSession
) -> list[Compiled]:
    """Does the same of several registrations as one module, which shares the kernels alike.

    Cold, a further graph of such a module takes a fraction of what it takes alone; but the module
    is one entry of the compile cache, which other combinations do not find.

    Args:
        registrations: What to build.
        session: The session to compile with and run in.
    """
    specs: dict[str, GraphSpec] = {}
    loaders = []
    for number, registration in enumerate(registrations):
        loaded = WeightLoader(registration.plan.checkpoint)
        plan, model_cls = registration.plan, registration.model_cls
        stages = [stage.config for stage in plan.stages]
        modules = RoleModules.of(model_cls.decoder_cls, model_cls.vision_cls, stages, plan.vision)
        specs |= modules.specs(loaded, f"{number}.")
        loaders.append(loaded)
    module = {
        role: replace(spec, group="together", custom_extensions=() if at else (kernel_library(),))
        for at, (role, spec) in enumerate(specs.items())
    }
    before = _cached_graphs()
    artifacts, models = load_specs(session, module)
    hit = _cached_graphs() <= before
    compiled = []
    for number, (registration, loader) in enumerate(zip(registrations, loaders, strict=True)):
        members = {
            "graph_prefix": f"{number}.",
            "graph_loader": staticmethod(lambda *_: (artifacts, models)),
        }
        model = _loaded(registration, session, members, loader)
        compiled.append(Compiled(registration, session, model, cache_hit=hit))
    return compiled


def _cached_graphs() -> set[Path]:
    return set(compile_cache_folder().glob("*/*"))
