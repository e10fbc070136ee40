"""The exchange of tokens between devices that hold different experts.

A device dispatches its tokens' activations to the devices of the experts they chose, and gets each
choice's result back, through the decoder's ``ep`` inputs. One interface with two backends: MAX's
own between accelerators, and one for simulated devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from models.buffers import buffer_bytes
from models.config import DecoderConfig
from models.exchange.accelerators import (
    AcceleratorExchange,
    AcceleratorExchangeBuffers,
    accelerator_bytes,
    exchange_config,
    input_types,
)
from models.exchange.base import (
    DeviceExperts,
    Exchange,
    ExpertParallelExchange,
    Route,
    weighted_sum,
)
from models.exchange.host import HostExchange, HostExchangeBuffers, exchange_types

__all__ = [
    "DeviceExperts",
    "Exchange",
    "ExpertParallelExchange",
    "Route",
    "declared_exchange",
    "exchange_buffers",
    "exchange_bytes",
    "exchange_for",
    "exchanged_rows",
    "weighted_sum",
]


def declared_exchange(config: DecoderConfig) -> Any:
    """The tree of types of a stage's ``ep`` inputs; ``None`` without expert parallelism.

    Args:
        config: The stage's configuration.
    """
    experts, placement = config.settings.experts, config.placement
    if placement.expert == 1:
        return None
    assert experts is not None, "expert parallelism of a dense model is refused"
    if placement.on_host:
        hidden = config.settings.hidden_size
        return exchange_types(experts, placement, hidden, config.max_batch_input_tokens)
    return input_types(exchange_config(config))


def exchange_bytes(config: DecoderConfig, holder: int) -> int:
    """What a device holds of the exchange's buffers.

    Args:
        config: The stage's configuration.
        holder: The device's position.
    """
    if config.placement.expert == 1:
        return 0
    if config.placement.on_host:
        return buffer_bytes(config.declarations.ep[holder])
    return accelerator_bytes(exchange_config(config))


def exchanged_rows(config: DecoderConfig) -> int:
    """The most choices that accelerators' exchange gives one device's experts in a step.

    Args:
        config: The stage's configuration.
    """
    return int(exchange_config(config).get_max_recv_tokens())


def exchange_for(config: DecoderConfig, inputs: Any) -> Exchange:
    """The exchange of a stage's devices, inside its graph.

    Args:
        config: The stage's configuration.
        inputs: The contract's ``ep``.
    """
    if config.placement.on_host:
        assert config.settings.experts is not None
        return HostExchange(config.settings.experts, config.placement, inputs)
    return AcceleratorExchange(exchange_config(config), config.placement, inputs)


def exchange_buffers(stages: Sequence[DecoderConfig]) -> ExpertParallelExchange:
    """The exchange of all stages, outside of graphs.

    Args:
        stages: Each stage's configuration.
    """
    if stages[0].placement.on_host:
        return HostExchangeBuffers(stages)
    assert len(stages) == 1, "experts of several stages are refused on accelerators"
    return AcceleratorExchangeBuffers(exchange_config(stages[0]))
