"""Serves a graph-API DECODER module as a MAX pipeline model.

Source: the reference page of ``max.pipelines.lib.registration_graph_api``, which no released
``max`` package holds, on the base classes of 26.7.0. This is the one place that builds,
compiles, initialises and executes a decoder; our own runner uses it too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from max import tree
from max.driver import Buffer, Device
from max.engine import InferenceSession, Model
from max.graph import DeviceRef
from max.graph.weights import Weights, WeightsAdapter
from max.nn.kv_cache import KVCacheParams
from max.nn.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines.context import TextContext
from max.pipelines.kv_cache.config import KVCacheConfig
from max.pipelines.lib.config import PipelineConfig
from max.pipelines.lib.graph_specs import GraphSpec
from max.pipelines.lib.interfaces.pipeline_model import (
    ModelInputs,
    ModelOutputs,
    PipelineModelWithKVCache,
)
from max.pipelines.lib.log_probabilities import (
    _LOGPROBS_HEAP_LEVELS,
    LogProbabilitiesMixin,
    log_probabilities_ragged_graph,
)
from max.pipelines.lib.memory_estimation import MemoryPlan

from models.batch_processor import (
    GraphApiDecoderBatchProcessor,
    GraphApiDecoderModelInputs,
    wait_for_copies,
)
from models.checkpoints.max_weights import LoadedWeights
from models.collectives import allocate_signals
from models.config import DecoderConfig
from models.exchange import ExpertParallelExchange, exchange_buffers
from models.graph_api import GraphApiModule
from models.graphs import VISION_ROLE, Loaded, LoadedGraphs, RoleModules, lasting_inputs, load_specs
from models.images import ImageStore
from models.log_writer import yielding_log_writer
from models.lora import AdapterStore
from models.placement import stage_role
from models.repeated_step import RepeatedStep, can_repeat
from models.role_contracts import ImageInputs
from models.state import RequestStateStore
from models.vision import VisionEncoder
from models.weights import WeightLoader

HIDDEN_STATES = (
    ReturnHiddenStates.NONE,
    ReturnHiddenStates.LAST,
    ReturnHiddenStates.ALL,
    ReturnHiddenStates.ALL_NORMALIZED,
)
"""The hidden states that a decoder can return."""


def check_data_parallelism(
    decoder_cls: type[GraphApiModule], replicas: int, num_devices: int
) -> None:
    """The decoder serves so many replicas, and each device is one.

    Args:
        decoder_cls: The DECODER module.
        replicas: MAX's ``data_parallel_degree``.
        num_devices: Devices.

    Raises:
        ValueError: If it doesn't, or they aren't.
    """
    if replicas == 1:
        return
    if not decoder_cls.supports_data_parallelism:
        raise ValueError(
            f"data_parallel_degree={replicas}, but {decoder_cls.__name__} does not support data "
            "parallelism"
        )
    if replicas != num_devices:
        raise ValueError(
            f"data_parallel_degree={replicas} over {num_devices} devices: each device needs a "
            "replica of its own"
        )


class GraphApiDecoderPipelineModel(
    LogProbabilitiesMixin, PipelineModelWithKVCache[TextContext, Any, Model]
):
    """Serves a registered graph-API DECODER module.

    :func:`graph_api_pipeline_model` subclasses it for each registration. The decoder is
    constructed as ``decoder_cls(config)`` from the finalized configuration, completed with the
    deployment and expert-parallel runtime before construction. Constructing the model builds,
    compiles and initialises the decoder graph.

    Args:
        pipeline_config: MAX's configuration of the pipeline.
        session: The session that compiles and runs the graphs.
        devices: The devices; simulated ones are the one CPU several times.
        kv_cache_config: MAX's configuration of the KV cache.
        weights: The checkpoint, or what makes its values, which other models may share.
        adapter: Renames the checkpoint's weights.
        return_logits: Which logits the graph returns.
        memory_plan: The limits that planning settled.
        return_hidden_states: Which hidden states the graph returns.
        max_batch_size: The most requests in one batch of one replica.

    Raises:
        ValueError: If data parallelism is on and the decoder doesn't support it, or doesn't give
            each device its own replica.
    """

    batch_processor_cls = GraphApiDecoderBatchProcessor
    decoder_cls: ClassVar[type[GraphApiModule]]
    """The registered DECODER class."""

    vision_cls: ClassVar[type[VisionEncoder] | None] = None
    """The registered VISION class; ``None`` where the model takes text alone."""

    ep_comm_initializer: ExpertParallelExchange | None = None
    """The expert-parallel exchange, under expert parallelism."""

    shared_graphs: ClassVar[LoadedGraphs | None] = None
    """Graphs that are loaded already, of an equal configuration."""

    graph_prefix: ClassVar[str] = ""
    """What is before each role, where graphs of several registrations are loaded together."""

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        weights: Weights | WeightLoader,
        adapter: WeightsAdapter | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        *,
        memory_plan: MemoryPlan,
        return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE,
        max_batch_size: int = 1,
    ) -> None:
        # Past the mixin's constructor: it compiles its graph at once, and ours is compiled when
        # log probabilities are first asked for.
        super(LogProbabilitiesMixin, self).__init__(
            pipeline_config,
            session,
            devices,
            kv_cache_config,
            weights,
            adapter,
            return_logits,
            memory_plan=memory_plan,
            return_hidden_states=return_hidden_states,
            max_batch_size=max_batch_size,
        )
        self.arch_config.max_batch_size = max_batch_size
        self._logprobs_device = devices[0]
        self._logprobs_session = session
        self.kv_params = self.arch_config.get_kv_params()
        replicas = pipeline_config.model.data_parallel_degree
        check_data_parallelism(self.decoder_cls, replicas, len(devices))
        self.state = RequestStateStore(
            [config.declarations.state for config in self.stages],
            self.stages[0].placement.data,
            self.stages[0].max_batch_size,
        )
        limits = self.stages[0].lora
        self.adapters = (
            None
            if limits is None
            else AdapterStore(
                [config.placement for config in self.stages],
                self.stages[0].settings,
                self.stages[0].dtype,
                limits,
            )
        )
        self.images = None
        if self.stages[0].declarations.vision:
            self.images = ImageStore(self.arch_config.vision)
        if any(config.declarations.ep is not None for config in self.stages):
            self.ep_comm_initializer = exchange_buffers(self.stages)
        self._models = self.load_graphs(session)

    @cached_property
    def _logprobs_model(self) -> Model:
        device = DeviceRef.from_device(self._logprobs_device)
        graph = log_probabilities_ragged_graph(device, levels=_LOGPROBS_HEAP_LEVELS)
        return self._logprobs_session.load(graph)

    @cached_property
    def signal_buffers(self) -> list[Buffer]:
        """None of MAX's: each stage's contract says which signals it takes."""
        return []

    @cached_property
    def stages(self) -> tuple[DecoderConfig, ...]:
        """The finalized configuration of each stage."""
        configs: tuple[DecoderConfig, ...] = self.arch_config.stages
        return configs

    @property
    def model(self) -> Model:
        """The compiled and initialized decoder; its last stage, where there are several."""
        return self.models[-1]

    @cached_property
    def models(self) -> tuple[Model, ...]:
        """The compiled and initialized decoder of each stage."""
        roles = (f"{self.graph_prefix}{stage_role(config.placement)}" for config in self.stages)
        return tuple(self._models[role] for role in roles)

    def _create_model_config(self, state_dict: dict[str, Any]) -> tuple[DecoderConfig, ...]:
        del state_dict
        if self.return_hidden_states not in HIDDEN_STATES:
            raise ValueError(
                f"return_hidden_states={self.return_hidden_states.value} is not supported; "
                f"{', '.join(mode.value for mode in HIDDEN_STATES)} are"
            )
        return tuple(
            replace(
                config,
                return_logits=self.return_logits,
                return_hidden_states=self.return_hidden_states,
            )
            for config in self.stages
        )

    def _load_state_dict(self) -> dict[str, Any]:
        # The decoder's declarations say what to read, once it is constructed.
        return {}

    def graph_specs(self, model_config: tuple[DecoderConfig, ...]) -> dict[str, GraphSpec]:
        """Returns the decoder graph, with the checkpoint loaded into it, and the VISION graph.

        Args:
            model_config: The finalized configuration of each stage; one graph each.
        """
        # Kept for the model's lifetime: on the CPU the graph reads the arrays where they are.
        self._weights = (
            self.weights
            if isinstance(self.weights, WeightLoader)
            else WeightLoader(LoadedWeights(super()._load_state_dict()))
        )
        vision = self.arch_config.vision if model_config[0].declarations.vision else None
        self._modules = RoleModules.of(self.decoder_cls, self.vision_cls, model_config, vision)
        # Graphs that are loaded have their weights.
        specs = self._modules.specs(
            None if self.shared_graphs is not None else self._weights, self.graph_prefix
        )
        if self._weights is not self.weights:
            # Nobody has held MAX's tensors against the declarations, and compiling takes minutes.
            self._weights.wait()
        return specs

    @staticmethod
    def graph_loader(session: InferenceSession, specs: Mapping[str, GraphSpec]) -> Loaded:
        """Compiles and initializes graphs; replaced where those of several models load together."""
        return load_specs(session, specs)

    def load_graphs(self, session: InferenceSession) -> dict[str, Model]:
        """Loads the graphs with the session used to initialize EP first.

        Args:
            session: The session that compiles and initializes the graphs.

        Returns:
            The initialized models, keyed by role.
        """
        if self.ep_comm_initializer is not None:
            self.ep_comm_initializer.initialize(session)
        specs = self.graph_specs(self._create_model_config(self._load_state_dict()))
        shared = self.shared_graphs
        loaded = self.graph_loader(session, specs) if shared is None else shared.loaded
        self.compiled_artifacts, models = loaded
        self.loaded_graphs = LoadedGraphs(self._weights, loaded)
        assert self.batch_processor is not None
        self.batch_processor.bind_lasting_inputs(
            [lasting_inputs(decoder, self._weights) for decoder in self._modules.decoders]
        )
        if self.images is not None:
            self.batch_processor.bind_images(self.images)
            assert self._modules.vision is not None
            signals = self._modules.vision.inputs.signals
            self._vision_signals = None if signals is None else allocate_signals(signals)
        self.batch_processor.bind_state(self.state)
        if self.adapters is not None:
            self.batch_processor.bind_adapters(self.adapters)
        self._bind_ep_comm_initializer()
        return models

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the graphs."""
        return tuple(role for role, _ in self._modules.by_role())

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Runs the decoder on the prepared batch.

        Args:
            model_inputs: What the batch processor prepared.
        """
        with yielding_log_writer(self.devices):
            return self._executed(model_inputs)

    def _executed(self, model_inputs: ModelInputs) -> ModelOutputs:
        assert isinstance(model_inputs, GraphApiDecoderModelInputs)
        assert self.batch_processor is not None
        # The KV manager's copies too.
        wait_for_copies(self.devices)
        first, *others = model_inputs.stages
        if self.images is not None:
            assert model_inputs.images is not None
            vision = self.images.inputs(model_inputs.images, self._encode, self._vision_signals)
            first = replace(first, vision=vision)
        *before, last = first, *others
        boundary: Any = None
        for model, inputs, following in zip(self.models[:-1], before, self.stages[1:], strict=True):
            returned = model.execute(*tree.leaves(replace(inputs, stage_boundary=boundary)))
            boundary = tuple(
                value.to(following.placement.devices[first].to_device())
                for value, first in zip(returned, following.placement.firsts, strict=True)
            )
        inputs = replace(last, stage_boundary=boundary)
        return self.batch_processor.process_outputs(self.model.execute(*tree.leaves(inputs)))

    def repeated(self, model_inputs: ModelInputs) -> RepeatedStep | None:
        """The steps after one in which every sequence decoded; ``None`` where they need more.

        Args:
            model_inputs: What that step was prepared with.
        """
        assert isinstance(model_inputs, GraphApiDecoderModelInputs)
        first, *others = model_inputs.stages
        # What a step takes of images is put in as it is executed.
        if others or self.images is not None or not can_repeat(first):
            return None
        assert isinstance(self.kv_params, KVCacheParams)
        return RepeatedStep(self.model, first, self.kv_params.page_size)

    def _encode(self, inputs: ImageInputs[Buffer, Buffer]) -> list[Buffer]:
        """Runs the VISION graph."""
        model = self._models[f"{self.graph_prefix}{VISION_ROLE}"]
        return list(model.execute(*tree.leaves(inputs)))

    def release(self, request_id: Hashable) -> None:
        """Frees what is kept of a request outside its KV pages; MAX calls it where it is there.

        Args:
            request_id: The request.
        """
        self.state.release(request_id)
        if self.images is not None:
            self.images.release(request_id)


def graph_api_pipeline_model(
    decoder_cls: type[GraphApiModule],
    model_config_cls: type[Any],
    **attributes: Any,
) -> type[GraphApiDecoderPipelineModel]:
    """Makes the pipeline model class of one registration.

    Args:
        decoder_cls: The DECODER module.
        model_config_cls: MAX's architecture configuration class; its instances carry the
            decoders' finalized configurations as ``stages``, and the image encoder's as
            ``vision``.
        attributes: Further class attributes of the registration.

    Returns:
        A subclass of :class:`GraphApiDecoderPipelineModel`.
    """
    name = f"{decoder_cls.__name__}PipelineModel"
    members: Mapping[str, Any] = {
        "__doc__": f"Serves {decoder_cls.__name__}.",
        "decoder_cls": decoder_cls,
        "model_config_cls": model_config_cls,
        **attributes,
    }
    return type(name, (GraphApiDecoderPipelineModel,), dict(members))
