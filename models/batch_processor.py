"""Fills a decoder's contract from a batch of requests, and reads what its graph returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from max import tree
from max.driver import Buffer, Device
from max.graph import BufferType, DeviceRef, TensorType
from max.nn.kv_cache import KVCacheInputs, KVCacheParamInterface
from max.nn.transformer import ReturnHiddenStates, ReturnLogits
from max.pipelines.context import TextContext
from max.pipelines.lib.interfaces.batch_processor import (
    RAGGED_INPUT_ROW_OFFSETS,
    RAGGED_INPUT_TOKENS,
    BatchProcessorRuntime,
    RaggedBatchProcessor,
)
from max.pipelines.lib.interfaces.pipeline_model import ModelInputs, ModelOutputs

from models.config import DecoderConfig, VisionConfig
from models.contract import resolve_contract
from models.exchange import ExpertParallelExchange
from models.images import ImageStore, StepImages
from models.lora import AdapterStore, routing_of
from models.placement import stage_role
from models.role_contracts import DecoderInputs, DecoderOutputs
from models.state import DeviceState, RequestStateStore, StateRow


class DecoderArchConfig(Protocol):
    """The architecture configuration that a registration brings (MAX's ``ArchConfigWithKVCache``).

    Its ``stages`` are the finalized configurations that the decoders are constructed from: one, or
    one per pipeline stage; they are read once ``max_batch_size`` is known. ``vision`` is the image
    encoder's, where there is one.
    """

    max_batch_size: int
    vision: VisionConfig | None

    @property
    def stages(self) -> tuple[DecoderConfig, ...]:
        """One configuration per stage."""
        ...

    def get_kv_params(self) -> KVCacheParamInterface:
        """The KV cache parameters."""
        ...

    def get_max_seq_len(self) -> int:
        """The longest sequence served."""
        ...


def wait_for_copies(devices: Sequence[Device]) -> None:
    """Waits until what was staged for a CPU is there.

    On the CPU of MAX 26.7, ``batch_inplace_copy`` returns before it has copied and a graph does
    not wait for it: on a busy machine a step would read the tokens of the step before. An
    accelerator's stream keeps the order by itself.
    """
    for device in devices:
        if device.is_host:
            device.synchronize()


@dataclass(kw_only=True)
class GraphApiDecoderModelInputs(ModelInputs):
    """One prepared batch."""

    stages: tuple[DecoderInputs[Buffer, Buffer], ...]
    """Each stage's contract as driver buffers; boundaries are filled in as stages return them."""

    images: StepImages | None = None
    """What of images the step takes; the first stage's ``vision`` is filled in from it."""

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
        self._one = Buffer.from_numpy(np.ones(1, np.int64))
        self._ep: ExpertParallelExchange | None = None
        self._state: RequestStateStore | None = None
        self._adapters: AdapterStore | None = None
        self._images: ImageStore | None = None
        self._lasting: tuple[dict[str, Any], ...] = ()

    @cached_property
    def _stages(self) -> tuple[DecoderConfig, ...]:
        # Read at the first step: the batch's size is known by then.
        stages: tuple[DecoderConfig, ...] = self.config.stages
        return stages

    def bind_lasting_inputs(self, per_stage: Sequence[dict[str, Any]]) -> None:
        """Receives the inputs that are the same buffers every step.

        Args:
            per_stage: Each stage's, by field: signals, constants and scratch.
        """
        self._lasting = tuple(per_stage)

    def bind_adapters(self, adapters: AdapterStore) -> None:
        """Receives the adapters that are served."""
        self._adapters = adapters

    def bind_images(self, images: ImageStore) -> None:
        """Receives the store of images' embeddings."""
        self._images = images

    def bind_state(self, state: RequestStateStore) -> None:
        """Receives the store of what is kept per request."""
        self._state = state

    def bind_ep_comm_initializer(self, initializer: ExpertParallelExchange | None) -> None:
        """Receives the exchange whose buffers every batch carries."""
        self._ep = initializer

    def get_symbolic_inputs(
        self, *, kv_params: KVCacheParamInterface, device_refs: list[DeviceRef]
    ) -> list[TensorType | BufferType]:
        """The first graph's inputs; the contract already knows the KV params and the devices."""
        del kv_params, device_refs
        return [leaf.type for leaf in resolve_contract(self._stages[0]).leaves]

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
            row_offsets = host_offsets.copy()
        # While the host side is still held: it is freed, and reused, at once.
        wait_for_copies(self.runtime.devices)
        shared: dict[str, Any] = {
            "tokens": device_tokens,
            "input_row_offsets": device_offsets,
            "return_n_logits": self._one
            if return_n_logits == 1
            else Buffer.from_numpy(np.array([return_n_logits], np.int64)),
        }
        positions = None
        if any(config.declarations.token_positions for config in self._stages):
            positions = _positions(contexts, self._stages[0].placement.devices[0])
        if len(replica_batches) > 1:
            ends = np.cumsum([0, *map(len, replica_batches)], dtype=np.int64)
            # A copy: on accelerators what is staged from is no memory of the CPU's.
            shared["host_input_row_offsets"] = Buffer.from_numpy(row_offsets)
            shared["data_parallel_splits"] = Buffer.from_numpy(ends)
        routing = self._routing(contexts)
        stages = tuple(
            DecoderInputs(
                **self._at(config, shared),
                token_positions=positions if config.declarations.token_positions else None,
                kv=_stage_kv(kv_cache_inputs, config, len(self._stages)),
                state=self._state_inputs(stage, config, replica_batches),
                batch_context_lengths=_context_lengths(config, replica_batches),
                ep=None if self._ep is None else self._ep.model_inputs(stage),
                lora=self._lora_inputs(stage, config, routing),
                **lasting,
            )
            for stage, (config, lasting) in enumerate(zip(self._stages, self._lasting, strict=True))
        )
        return GraphApiDecoderModelInputs(
            kv_cache_inputs=kv_cache_inputs,
            stages=stages,
            images=None if self._images is None else self._images.step(replica_batches),
        )

    def _state_inputs(
        self, stage: int, config: DecoderConfig, replica_batches: Sequence[Sequence[TextContext]]
    ) -> tuple[DeviceState[Buffer, Buffer], ...] | None:
        if config.declarations.state is None:
            return None
        assert self._state is not None
        batches = [
            [StateRow(c.request_id, c.tokens.processed_length > 0) for c in batch]
            for batch in replica_batches
        ]
        return self._state.inputs(stage, config.placement, batches)

    def _at(self, config: DecoderConfig, shared: dict[str, Buffer]) -> dict[str, Buffer]:
        """What all stages take, where a stage takes it; host values stay there."""
        device = config.placement.devices[0]
        if device == self._stages[0].placement.devices[0]:
            return shared
        there = device.to_device()
        return {
            name: buffer if buffer.device.is_host else buffer.to(there)
            for name, buffer in shared.items()
        }

    def _lora_inputs(
        self, stage: int, config: DecoderConfig, routing: dict[str, Buffer]
    ) -> tuple[Buffer, ...] | None:
        if self._adapters is None:
            return None
        return (*self._at(config, routing).values(), *self._adapters.stacks(stage))

    def _routing(self, contexts: Sequence[TextContext]) -> dict[str, Buffer]:
        """The same for every stage; a request's ``model_name`` is its adapter's."""
        if self._adapters is None:
            return {}
        routing = routing_of(
            [self._adapters.slot(context.model_name) for context in contexts],
            [context.tokens.active_length for context in contexts],
        )
        device = self._stages[0].placement.devices[0].to_device()
        return {
            "ids": Buffer.from_numpy(routing.ids).to(device),
            "offsets": Buffer.from_numpy(routing.offsets).to(device),
            "end": Buffer.from_numpy(routing.end),
        }

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


def _context_lengths(
    config: DecoderConfig, replica_batches: Sequence[Sequence[TextContext]]
) -> tuple[Buffer, ...] | None:
    """Each replica's context with this step's tokens, each sequence's rounded up to whole pages."""
    declared = config.declarations
    if not declared.takes_batch_context_lengths:
        return None
    assert config.kv_params is not None
    size = config.kv_params.page_size
    lengths = [
        sum(-(-context.tokens.current_position // size) * size for context in batch)
        for batch in replica_batches
    ]
    dtype = declared.device_context_length_dtype
    if dtype is None:
        return tuple(Buffer.from_numpy(np.array([length], np.int32)) for length in lengths)
    placement = config.placement
    return tuple(
        Buffer.from_numpy(np.array([lengths[placement.replica(holder)]], dtype.to_numpy())).to(
            device.to_device()
        )
        for holder, device in enumerate(placement.devices)
    )


def _positions(contexts: Sequence[TextContext], device: DeviceRef) -> Buffer:
    """Each token's position in its sequence, int64 ``[total_seq_len]``."""
    ranges = [
        np.arange(context.tokens.processed_length, context.tokens.current_position)
        for context in contexts
    ]
    positions = np.concatenate(ranges, dtype=np.int64) if ranges else np.zeros(0, np.int64)
    return Buffer.from_numpy(positions).to(device.to_device())


def _stage_kv(inputs: Any, config: DecoderConfig, num_stages: int) -> Any:
    """A stage's KV inputs, on its own devices: MAX's manager makes all on the first stage's."""
    if config.kv_params is None:
        return ()
    if num_stages == 1:
        return inputs
    own = inputs[stage_role(config.placement)]
    if config.placement.on_host:
        return own
    types, structure = tree.flatten(config.kv_params.get_symbolic_inputs())
    moved = [
        buffer if buffer.device.is_host else buffer.to(type_.device.to_device())
        for buffer, type_ in zip(tree.leaves(own), types, strict=True)
    ]
    return tree.unflatten(structure, moved)
