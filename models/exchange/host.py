"""The exchange between simulated devices, through buffers on the host, one set per device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from max import tree
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, BufferValue, DeviceRef, Dim, TensorValue, ops

from models.buffers import zeroed
from models.config import DecoderConfig
from models.exchange.base import DeviceExperts, Route, weighted_sum
from models.kernels import dispatch_tokens, read_rows, return_results
from models.placement import Placement
from models.settings import ExpertSettings

BufferT = TypeVar("BufferT")


@tree.dataclass
@dataclass(frozen=True, kw_only=True)
class ExchangeBuffers(Generic[BufferT]):
    """What one device receives through. T tokens of a step at most, k choices each."""

    tokens: BufferT
    """[T, hidden]: activations, each in the row of its token in the batch."""

    experts: BufferT
    """int32 [T, k]: the experts they are for, by their position on this device, or -1."""

    results: BufferT
    """[tokens of this device * k, hidden]: the results of this device's own choices."""


def exchange_types(
    experts: ExpertSettings, placement: Placement, hidden_size: int, max_tokens: int
) -> tuple[ExchangeBuffers[BufferType], ...]:
    """The buffers of each device of a stage, large enough for every token to choose one device.

    Args:
        experts: The model's mixture of experts.
        placement: The stage's devices.
        hidden_size: Width of the residual stream.
        max_tokens: The most tokens of one replica's step.
    """
    total = placement.data * max_tokens
    # A device dispatches its share of its replica's tokens, rounded up.
    own = -(-max_tokens // placement.group)
    return tuple(
        ExchangeBuffers(
            tokens=BufferType(DType.float32, [total, hidden_size], device),
            experts=BufferType(DType.int32, [total, experts.top_k], device),
            results=BufferType(DType.float32, [own * experts.top_k, hidden_size], device),
        )
        for device in placement.devices
    )


class HostExchange:
    """The exchange between simulated devices, inside a graph.

    Tokens are sent once to each device that they chose an expert of, into the row that is theirs
    in the whole batch, so no routing, however uneven, loses one.

    Args:
        experts: The model's mixture of experts.
        placement: The stage's devices.
        buffers: Per device.
    """

    def __init__(
        self,
        experts: ExpertSettings,
        placement: Placement,
        buffers: Sequence[ExchangeBuffers[BufferValue]],
    ) -> None:
        self._buffers = buffers
        self._held = [
            placement.experts(experts, holder) for holder in range(len(placement.devices))
        ]
        self._chosen: Sequence[TensorValue] = ()
        self._firsts: list[TensorValue] = []

    def __call__(
        self,
        xs: Sequence[TensorValue],
        routes: Sequence[Route],
        experts: Sequence[DeviceExperts],
    ) -> list[TensorValue]:
        """Sends each device's tokens to the experts they chose, and gets the results back."""
        received = self._dispatch(xs, [chosen for chosen, _ in routes])
        results = [
            device.choices(x, chosen) for device, (x, chosen) in zip(experts, received, strict=True)
        ]
        return [
            weighted_sum(rows, weights)
            for rows, (_, weights) in zip(self._combine(results), routes, strict=True)
        ]

    def _dispatch(
        self, xs: Sequence[TensorValue], chosen: Sequence[TensorValue]
    ) -> list[tuple[TensorValue, TensorValue]]:
        """Per device the batch's activations, of which those it was sent are filled.

        Beside them int32 [total_seq_len, k]: the experts they are for, or -1.
        """
        self._chosen, self._firsts = chosen, _first_rows(xs)
        every = Dim("total_seq_len")
        received = []
        for buffers, held in zip(self._buffers, self._held, strict=True):
            for x, ids, first in zip(xs, chosen, self._firsts, strict=True):
                dispatch_tokens(buffers.tokens, buffers.experts, x, ids, first, held)
            received.append((read_rows(buffers.tokens, every), read_rows(buffers.experts, every)))
        return received

    def _combine(self, results: Sequence[TensorValue]) -> list[TensorValue]:
        """Per device, the results of its tokens' choices, [tokens of the device * k, hidden]."""
        returned = []
        for buffers, chosen, first in zip(self._buffers, self._chosen, self._firsts, strict=True):
            for result, held in zip(results, self._held, strict=True):
                return_results(buffers.results, result, chosen, first, held)
            returned.append(read_rows(buffers.results, chosen.shape[0] * chosen.shape[1]))
        return returned


class HostExchangeBuffers:
    """The exchange between simulated devices, outside of graphs.

    Args:
        stages: The configuration of each pipeline stage; each has buffers of its own.
    """

    def __init__(self, stages: Sequence[DecoderConfig]) -> None:
        self._stages = stages
        self._buffers: list[object] = []

    def input_tree(self, stage: int = 0) -> object:
        """The tree of types of a stage's ``ep`` inputs."""
        return self._stages[stage].declarations.ep

    def initialize(self, session: InferenceSession) -> None:
        """Allocates the buffers with the session that runs the decoder."""
        del session  # The host's memory needs none.
        self._buffers = [
            tree.map(zeroed, self.input_tree(stage), leaf=BufferType)
            for stage in range(len(self._stages))
        ]

    def model_inputs(self, stage: int = 0) -> object:
        """A stage's buffers, in ``input_tree()``'s structure."""
        return self._buffers[stage]


def _first_rows(xs: Sequence[TensorValue]) -> list[TensorValue]:
    """Where each device's tokens begin in the batch, int64 [1] on the CPU."""
    firsts = [ops.constant(np.zeros(1, np.int64), device=DeviceRef.CPU())]
    for x in xs[:-1]:
        firsts.append(firsts[-1] + ops.shape_to_tensor(x.shape)[:1])
    return firsts
