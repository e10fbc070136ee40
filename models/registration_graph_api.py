"""Serves a graph-API DECODER module as a MAX pipeline model.

Source: the reference page of ``max.pipelines.lib.registration_graph_api``, which no released
``max`` package holds, on the base classes of 26.7.0. This is the one place that builds,
compiles, initialises and executes a decoder; our own runner uses it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
from max import tree
from max.driver import Buffer, Device
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, TensorType
from max.graph.weights import Weights, WeightsAdapter
from max.nn.kv_cache import KVCacheInputs, KVCacheParamInterface
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
from models.role_contracts import DecoderInputs, DecoderOutputs
from models.weights import TensorReader, declared_weights, load_weights


class DecoderArchConfig(Protocol):
    """The architecture configuration that a registration brings (MAX's ``ArchConfigWithKVCache``).

    Its ``decoder`` is the finalized configuration that the decoder is constructed from.
    """

    decoder: DecoderConfig

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

    decoder: DecoderInputs[Buffer, Buffer]
    """The contract's leaves as driver buffers."""

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The graph's inputs in order."""
        return tuple(tree.leaves(self.decoder))

    @property
    def tokens(self) -> Buffer:
        """The ragged tokens, where ``LogProbabilitiesMixin`` looks for them."""
        return self.decoder.tokens

    @property
    def input_row_offsets(self) -> Buffer:
        """The row offsets, where ``LogProbabilitiesMixin`` looks for them."""
        return self.decoder.input_row_offsets


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
        self._one = Buffer.from_numpy(np.ones(1, np.int64))
        self._ep: ExpertParallelExchange | None = None

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
        decoder: DecoderInputs[Buffer, Buffer] = DecoderInputs(
            tokens=device_tokens,
            input_row_offsets=device_offsets,
            return_n_logits=self._one
            if return_n_logits == 1
            else Buffer.from_numpy(np.array([return_n_logits], np.int64)),
            kv=kv_cache_inputs,
            ep=None if self._ep is None else self._ep.model_inputs(),
        )
        return GraphApiDecoderModelInputs(kv_cache_inputs=kv_cache_inputs, decoder=decoder)

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
        """None: a single-device graph runs no collective."""
        return []

    @property
    def model(self) -> Model:
        """The compiled and initialized decoder."""
        return self._models[GraphRole.DECODER]

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

    def _create_model_config(self, state_dict: dict[str, Any]) -> DecoderConfig:
        del state_dict
        config: DecoderConfig = self.arch_config.decoder
        return config

    def _load_state_dict(self) -> dict[str, Any]:
        # The decoder's declarations say what to read, once it is constructed.
        return {}

    def graph_specs(self, model_config: DecoderConfig) -> dict[str, GraphSpec]:
        """Returns the decoder graph, with the checkpoint loaded into it.

        Args:
            model_config: The finalized configuration.
        """
        decoder = self.decoder_cls(model_config)
        weights = load_weights(declared_weights(decoder), self._reader())
        inputs = decoder.inputs
        assert self.batch_processor is not None
        self.batch_processor.input_tree = inputs
        # One name for every decoder: MAX's compile cache ignores graph names, so equal graphs of
        # two models share an entry, and init_graphs looks it up by the name it was cached with.
        name = GraphRole.DECODER.value
        return {GraphRole.DECODER: GraphSpec(decoder, name, tree.leaves(inputs), weights)}

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
        return self.batch_processor.process_outputs(self.model.execute(*model_inputs.buffers))


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
