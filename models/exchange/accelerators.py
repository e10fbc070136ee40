"""The exchange between accelerators: MAX's own expert parallelism (``max.nn.comm.ep``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max import tree
from max.driver import Buffer
from max.engine import InferenceSession
from max.graph import BufferType, TensorType, TensorValue
from max.nn.comm.ep import EPBatchManager, EPCommInitializer, EPConfig

from models.buffers import buffer_bytes
from models.config import DecoderConfig
from models.exchange.base import DeviceExperts, Route
from models.kernels.accelerators import ExpertGroups
from models.placement import Placement


def exchange_config(config: DecoderConfig) -> EPConfig:
    """MAX's configuration of a stage's exchange, large enough for every token to choose one device.

    Args:
        config: The stage's configuration.
    """
    experts, placement = config.settings.experts, config.placement
    assert experts is not None, "expert parallelism of a dense model is refused"
    return EPConfig(
        dispatch_dtype=config.dtype,
        combine_dtype=config.dtype,
        hidden_size=config.settings.hidden_size,
        top_k=experts.top_k,
        n_experts=experts.num_experts,
        # A device dispatches its share of its replica's tokens, rounded up.
        max_tokens_per_rank=-(-config.max_batch_input_tokens // placement.group),
        n_gpus_per_node=len(placement.devices),
        n_nodes=1,
        node_id=0,
    )


def input_types(config: EPConfig) -> Any:
    """The tree of types of the exchange's inputs: counters on the devices, addresses on the CPU."""
    return EPBatchManager(config).input_tree()


def accelerator_bytes(config: EPConfig) -> int:
    """What each device holds: buffers whose addresses are the graph's inputs, and counters.

    Args:
        config: MAX's configuration of the exchange.
    """
    inputs = input_types(config)
    groups = len(inputs["send_buf_ptrs"])
    counters = sum(map(buffer_bytes, inputs["atomic_counters"])) // config.n_gpus_per_node
    return int(config.estimate_memory_usage()) * groups + counters


class AcceleratorExchange:
    """The exchange inside a graph.

    Args:
        config: MAX's configuration of it.
        placement: The stage's devices.
        inputs: The contract's ``ep``.
    """

    def __init__(self, config: EPConfig, placement: Placement, inputs: Any) -> None:
        self._manager = EPBatchManager(config)
        self._manager.fetch_buffers(tree.leaves(inputs))
        self._devices = [device.id for device in placement.devices]

    def __call__(
        self,
        xs: Sequence[TensorValue],
        routes: Sequence[Route],
        experts: Sequence[DeviceExperts],
    ) -> list[TensorValue]:
        """Sends each device's tokens to the experts they chose, and gets the results back."""
        received = self._manager.ep_dispatch_all(
            list(xs), [chosen for chosen, _ in routes], self._devices
        )
        results = [
            device.grouped(rows, ExpertGroups(*groups))
            for device, (rows, *groups) in zip(experts, received, strict=True)
        ]
        summed = self._manager.ep_combine_all(
            results, [weights for _, weights in routes], self._devices
        )
        return [rows.cast(x.dtype) for rows, x in zip(summed, xs, strict=True)]


class AcceleratorExchangeBuffers:
    """The exchange outside of graphs.

    Args:
        config: MAX's configuration of it.
    """

    def __init__(self, config: EPConfig) -> None:
        self._config = config
        self._initializer: EPCommInitializer | None = None

    def input_tree(self, stage: int = 0) -> object:
        """The tree of types of the stage's ``ep`` inputs; there is one stage."""
        assert stage == 0
        return input_types(self._config)

    def initialize(self, session: InferenceSession) -> None:
        """Allocates the buffers with the session that runs the decoder."""
        self._initializer = EPCommInitializer(self._config)
        self._initializer.ep_init(session)

    def model_inputs(self, stage: int = 0) -> object:
        """The buffers, in ``input_tree()``'s structure."""
        assert self._initializer is not None, "the exchange is initialized first"
        types, structure = tree.flatten(self.input_tree(stage), leaf=(BufferType, TensorType))
        buffers: list[Buffer] = self._initializer.model_inputs()
        assert len(buffers) == len(types), "MAX gives what it declares"
        return tree.unflatten(structure, buffers)
