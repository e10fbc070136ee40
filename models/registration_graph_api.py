"""Serves a graph-API DECODER module as a MAX pipeline model.

Source: the reference page of ``max.pipelines.lib.registration_graph_api``, which no released
``max`` package holds, on the base classes of 26.7.0. This is the one place that builds,
compiles, initialises and executes a decoder; our own runner uses it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
from max import tree
from max.driver import Buffer, Device
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, TensorType
from max.graph.weights import Weights, WeightsAdapter
from max.nn.kv_cache import KVCacheInputs, KVCacheParamInterface, MultiKVCacheParams
from max.nn.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines.context import TextContext
from max.pipelines.kv_cache.config import KVCacheConfig
from max.pipelines.lib.config import PipelineConfig
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec, compile_graphs, init_graphs
from max.pipelines.lib.interfaces.batch_processor import (
    RAGGED_INPUT_ROW_OFFSETS,
    RAGGED_INPUT_TOKENS,
    BatchProcessorRuntime,
    RaggedBatchProcessor,
)
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

from models.config import DecoderConfig
from models.graph_api import GraphApiModule
from models.kernels import KERNELS
from models.role_contracts import DecoderInputs, DecoderOutputs
from models.weights import TensorReader, WeightLoader, declared_weights

HIDDEN_STATES = (
    ReturnHiddenStates.NONE,
    ReturnHiddenStates.LAST,
    ReturnHiddenStates.ALL,
    ReturnHiddenStates.ALL_NORMALIZED,
)
"""The hidden states that a decoder can return."""


class DecoderArchConfig(Protocol):
    """The architecture configuration that a registration brings (MAX's ``ArchConfigWithKVCache``).

    Its ``stages`` are the finalized configurations that the decoders are constructed from: one,
    or one per pipeline stage.
    """

    stages: tuple[DecoderConfig, ...]

    def get_kv_params(self) -> KVCacheParamInterface:
        """The KV cache parameters."""
        ...

    def get_max_seq_len(self) -> int:
        """The longest sequence served."""
        ...


class ExpertParallelExchange(Protocol):
    """Sets up and describes the buffers that experts are exchanged through."""

    def input_tree(self) -> Any:
        """The tree of types of the decoder's ``ep`` inputs."""
        ...

    def initialize(self, session: InferenceSession) -> None:
        """Allocates the buffers with the session that runs the decoder."""
        ...

    def model_inputs(self) -> Any:
        """The buffers, in ``input_tree()``'s structure."""
        ...


@dataclass(kw_only=True)
class GraphApiDecoderModelInputs(ModelInputs):
    """One prepared batch."""

    stages: tuple[DecoderInputs[Buffer, Buffer], ...]
    """Each stage's contract as driver buffers; boundaries are filled in as stages return them."""

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The first graph's inputs in order."""
        return tuple(tree.leaves(self.stages[0]))

    @property
    def tokens(self) -> Buffer:
        """The ragged tokens, where ``LogProbabilitiesMixin`` looks for them."""
        return self.stages[0].tokens

    @property
    def input_row_offsets(self) -> Buffer:
        """The row offsets, where ``LogProbabilitiesMixin`` looks for them."""
        return self.stages[0].input_row_offsets


class GraphApiDecoderBatchProcessor(
    RaggedBatchProcessor[TextContext, GraphApiDecoderModelInputs, Any]
):
    """Fills a decoder's contract from a batch of requests, and reads its outputs.

    Args:
        config: The registration's architecture configuration.
        runtime: Limits and devices, from the pipeline model.
    """

    def __init__(self, config: DecoderArchConfig, runtime: BatchProcessorRuntime) -> None:
        super().__init__(config, runtime)
        self._stages = config.stages
        self._one = Buffer.from_numpy(np.ones(1, np.int64))
        self._ep: ExpertParallelExchange | None = None
        self._lasting: tuple[dict[str, Any], ...] = ({},) * len(config.stages)

    def bind_lasting_inputs(self, per_stage: Sequence[dict[str, Any]]) -> None:
        """Receives the inputs that are the same buffers every step.

        Args:
            per_stage: Each stage's, by field: signals and constants.
        """
        self._lasting = tuple(per_stage)

    def bind_ep_comm_initializer(self, initializer: ExpertParallelExchange | None) -> None:
        """Receives the exchange whose buffers every batch carries."""
        self._ep = initializer

    def get_symbolic_inputs(
        self, *, kv_params: KVCacheParamInterface, device_refs: list[DeviceRef]
    ) -> list[TensorType | BufferType]:
        """The graph's inputs; the contract already knows the KV params and the devices."""
        del kv_params, device_refs
        assert self.input_tree is not None, "the model binds the graph's inputs first"
        return tree.leaves(self.input_tree)

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[TextContext]],
        kv_cache_inputs: KVCacheInputs[Buffer, Buffer] | None = None,
        return_n_logits: int = 1,
    ) -> GraphApiDecoderModelInputs:
        """Makes one step's inputs.

        Args:
            replica_batches: Each replica's requests, in order.
            kv_cache_inputs: The KV manager's runtime inputs for the same batches.
            return_n_logits: Rows of logits per request; other than 1 only for a graph that
                returns variable logits.

        Raises:
            ValueError: If the graph can't return so many logits, or a request has fewer tokens
                in this step.
        """
        contexts = [context for batch in replica_batches for context in batch]
        lengths = [context.tokens.active_length for context in contexts]
        self._check_return_n_logits(return_n_logits, lengths)
        with self._stager.stage() as staging:
            tokens, (device_tokens,) = staging.get(RAGGED_INPUT_TOKENS, (sum(lengths),))
            offsets, (device_offsets,) = staging.get(RAGGED_INPUT_ROW_OFFSETS, (len(lengths) + 1,))
            host_offsets = offsets.to_numpy()
            host_offsets[0] = 0
            np.cumsum(lengths, out=host_offsets[1:])
            np.concatenate([context.tokens.active for context in contexts], out=tokens.to_numpy())
        # While the host side is still held: it is freed, and reused, at once.
        wait_for_copies(self.runtime.devices)
        shared: dict[str, Any] = {
            "tokens": device_tokens,
            "input_row_offsets": device_offsets,
            "return_n_logits": self._one
            if return_n_logits == 1
            else Buffer.from_numpy(np.array([return_n_logits], np.int64)),
            "ep": None if self._ep is None else self._ep.model_inputs(),
        }
        if len(replica_batches) > 1:
            ends = np.cumsum([0, *map(len, replica_batches)], dtype=np.int64)
            shared["host_input_row_offsets"] = offsets
            shared["data_parallel_splits"] = Buffer.from_numpy(ends)
        stages = tuple(
            DecoderInputs(**shared, kv=_stage_kv(kv_cache_inputs, config), **lasting)
            for config, lasting in zip(self._stages, self._lasting, strict=True)
        )
        return GraphApiDecoderModelInputs(kv_cache_inputs=kv_cache_inputs, stages=stages)

    def _check_return_n_logits(self, wanted: int, lengths: Sequence[int]) -> None:
        mode = self.runtime.return_logits
        if mode is not ReturnLogits.VARIABLE:
            if wanted != 1:
                raise ValueError(
                    f"return_n_logits={wanted}, but the graph returns {mode.value} logits and "
                    "takes 1; build it with return_logits=variable"
                )
        elif not 1 <= wanted <= min(lengths):
            raise ValueError(
                f"return_n_logits={wanted}, but the shortest request of this step has "
                f"{min(lengths)} tokens"
            )

    def process_outputs(self, outputs: Sequence[Buffer | object]) -> ModelOutputs:
        """Names what the graph returned, in ``DecoderOutputs``' order."""
        has_rows = self.runtime.return_logits is not ReturnLogits.LAST_TOKEN
        has_hidden = self.runtime.return_hidden_states is not ReturnHiddenStates.NONE
        names = ["next_token_logits"]
        names += ["logits", "logit_offsets"] if has_rows else []
        names += ["hidden_states"] if has_hidden else []
        named: DecoderOutputs[Any] = DecoderOutputs(**dict(zip(names, outputs, strict=True)))
        return ModelOutputs(
            logits=named.next_token_logits if named.logits is None else named.logits,
            next_token_logits=named.next_token_logits,
            logit_offsets=named.logit_offsets,
            hidden_states=named.hidden_states,
        )


def wait_for_copies(devices: Sequence[Device]) -> None:
    """Waits until what was staged for a CPU is there.

    On the CPU of MAX 26.7, ``batch_inplace_copy`` returns before it has copied and a graph does
    not wait for it: on a busy machine a step would read the tokens of the step before. An
    accelerator's stream keeps the order by itself.
    """
    for device in devices:
        if device.is_host:
            device.synchronize()


def stage_role(config: DecoderConfig) -> str:
    """The role of a stage's graph: ``decoder``, or ``decoder_0`` and so on where there are several.

    MAX's compile cache ignores graph names, so equal graphs of two models share an entry, and
    ``init_graphs`` looks it up by the name it was cached with: the role is the name.
    """
    placement = config.placement
    name = GraphRole.DECODER.value
    return name if placement.num_stages == 1 else f"{name}_{placement.stage}"


def stages_kv_params(stages: Sequence[DecoderConfig]) -> KVCacheParamInterface:
    """The KV cache of all stages: one stage's, or a tree with one subtree per stage."""
    if len(stages) == 1:
        return stages[0].kv_params
    return MultiKVCacheParams.from_params({stage_role(s): s.kv_params for s in stages})


def _stage_kv(inputs: Any, config: DecoderConfig) -> Any:
    return inputs if config.placement.num_stages == 1 else inputs[stage_role(config)]


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
        weights: The checkpoint.
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

    ep_comm_initializer: ExpertParallelExchange | None = None
    """The expert-parallel exchange, under expert parallelism."""

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        weights: Weights | TensorReader,
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
        self._logprobs_device = devices[0]
        self._logprobs_session = session
        self.kv_params = self.arch_config.get_kv_params()
        self._check_data_parallelism()
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

    @property
    def stages(self) -> tuple[DecoderConfig, ...]:
        """The finalized configuration of each stage."""
        configs: tuple[DecoderConfig, ...] = self.arch_config.stages
        return configs

    @property
    def model(self) -> Model:
        """The compiled and initialized decoder; its last stage, where there are several."""
        return self.models[-1]

    @property
    def models(self) -> tuple[Model, ...]:
        """The compiled and initialized decoder of each stage."""
        return tuple(self._models[stage_role(config)] for config in self.stages)

    def _check_data_parallelism(self) -> None:
        replicas = self.pipeline_config.model.data_parallel_degree
        if replicas == 1:
            return
        if not self.decoder_cls.supports_data_parallelism:
            raise ValueError(
                f"data_parallel_degree={replicas}, but {self.decoder_cls.__name__} does not "
                "support data parallelism"
            )
        if replicas != len(self.devices):
            raise ValueError(
                f"data_parallel_degree={replicas} over {len(self.devices)} devices: each device "
                "needs a replica of its own"
            )

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
        """Returns the decoder graph, with the checkpoint loaded into it.

        Args:
            model_config: The finalized configuration of each stage; one graph each.
        """
        specs: dict[str, GraphSpec] = {}
        lasting = []
        loaded = WeightLoader(self._reader())
        for config in model_config:
            decoder = self.decoder_cls(config)
            role = stage_role(config)
            specs[role] = GraphSpec(
                decoder,
                role,
                tree.leaves(decoder.inputs),
                loaded.load(declared_weights(decoder, f"{role}.")),
                # Stages compile together, which shares the kernels that are alike.
                group=GraphRole.DECODER.value if len(model_config) > 1 else None,
                # Each graph loads our kernels; a module of graphs is given them once.
                custom_extensions=() if specs else (KERNELS,),
            )
            lasting.append(_lasting_inputs(decoder, loaded))
        assert self.batch_processor is not None
        self.batch_processor.bind_lasting_inputs(lasting)
        return specs

    def _reader(self) -> TensorReader:
        assert not isinstance(self.weights, Weights), "MAX's own weights come with registration"
        return self.weights

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
        self.compiled_artifacts = compile_graphs(session, specs)
        models = init_graphs(session, self.compiled_artifacts, specs)
        self._bind_ep_comm_initializer()
        return models

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Runs the decoder on the prepared batch.

        Args:
            model_inputs: What the batch processor prepared.
        """
        assert isinstance(model_inputs, GraphApiDecoderModelInputs)
        assert self.batch_processor is not None
        # The KV manager's copies too.
        wait_for_copies(self.devices)
        *before, last = model_inputs.stages
        boundary: Any = None
        for model, inputs in zip(self.models, before, strict=False):
            returned = model.execute(*tree.leaves(replace(inputs, stage_boundary=boundary)))
            boundary = tuple(returned)
        inputs = replace(last, stage_boundary=boundary)
        return self.batch_processor.process_outputs(self.model.execute(*tree.leaves(inputs)))


def _lasting_inputs(decoder: GraphApiModule, loaded: WeightLoader) -> dict[str, Any]:
    """The buffers that a stage takes unchanged every step, by field."""
    inputs: dict[str, Any] = {}
    if decoder.inputs.signals is not None:
        inputs["signals"] = tuple(
            Buffer.zeros(
                [int(dim) for dim in signal.shape], signal.dtype, signal.device.to_device()
            )
            for signal in decoder.inputs.signals
        )
    constants = decoder.constant_weights()
    if constants:
        inputs["constants"] = {
            name: tuple(Buffer.from_numpy(loaded.values(weight)) for weight in shards)
            for name, shards in constants.items()
        }
    return inputs


def graph_api_pipeline_model(
    decoder_cls: type[GraphApiModule],
    model_config_cls: type[Any],
    **attributes: Any,
) -> type[GraphApiDecoderPipelineModel]:
    """Makes the pipeline model class of one registration.

    Args:
        decoder_cls: The DECODER module.
        model_config_cls: MAX's architecture configuration class; its instances carry the
            decoder's finalized configuration as ``decoder``.
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
