"""The base of graph-API role modules: a module that takes a role contract's inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from max import tree
from max.graph import BufferType, BufferValue, Graph, TensorType, TensorValue, Type, Value
from max.graph import Module as GraphModule
from max.nn.layer import Module

from models.config import DecoderConfig, Placed
from models.contract import resolve_contract
from models.kernels import kernel_library
from models.role_contracts import DecoderInputs, DecoderOutputs
from models.weights import DeclaredWeight


class RoleModule(Module):
    """A module with a graph of its own, whose inputs are the leaves of one tree."""

    config: Placed
    """What it was constructed from."""

    @property
    @abstractmethod
    def inputs(self) -> Any:
        """The types of the graph's inputs."""

    @property
    def kernel_libraries(self) -> tuple[Path, ...]:
        """The custom kernels that its graph uses: ours, which are the host's."""
        return (kernel_library(),) if self.config.placement.on_host else ()

    @abstractmethod
    def __call__(self, inputs: Any) -> Any:
        """From the tree of graph values to the tree of outputs."""

    def bind(self, inputs: Any) -> None:
        """Binds what layers need of the inputs, before the module is called."""

    def trace(
        self,
        *input_types: Type[Any],
        name: str | None = None,
        module: GraphModule | None = None,
        custom_extensions: Iterable[Path] = (),
        is_device_graph: bool = False,
    ) -> Graph:
        """Traces the graph whose inputs are the leaves of ``inputs``.

        Args:
            input_types: Those leaves; given by MAX's ``GraphSpec``.
            name: The graph's name.
            module: The MLIR module to add the graph to.
            custom_extensions: Custom kernel libraries the graph uses beside its own.
            is_device_graph: Whether to build a device graph.
        """
        leaves, structure = tree.flatten(self.inputs)
        assert list(input_types) == leaves, "the graph takes its contract and nothing else"

        def forward(*values: Value[Any]) -> tuple[Value[Any], ...]:
            # The tree of values mirrors the tree of types; leaves keep their kind.
            typed = [
                value.buffer if isinstance(leaf, BufferType) else value.tensor
                for value, leaf in zip(values, leaves, strict=True)
            ]
            inputs = tree.unflatten(structure, typed)
            self.bind(inputs)
            return tuple(tree.leaves(self(inputs)))

        return Graph(
            type(self).__qualname__ if name is None else name,
            forward,
            input_types=input_types,
            custom_extensions=list({*self.kernel_libraries, *custom_extensions}),
            module=module,
            is_device_graph=is_device_graph,
        )


class GraphApiModule(RoleModule):
    """A DECODER module built with the graph API.

    A subclass is constructed from a ``DecoderConfig`` and implements ``__call__`` over
    ``DecoderInputs`` of graph values. Its graph takes the leaves of its contract, in order.

    Args:
        config: The finalized configuration, completed with the deployment.
    """

    supports_data_parallelism: ClassVar[bool] = False
    """Whether the module serves more than one replica."""

    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.contract = resolve_contract(config)

    @property
    def inputs(self) -> DecoderInputs[TensorType, BufferType]:
        """The types of the graph's inputs."""
        return self.contract.inputs

    def constant_weights(self) -> dict[str, tuple[DeclaredWeight, ...]]:
        """The weights behind the contract's ``constants``, per name one per device."""
        return {}

    def bind(self, inputs: DecoderInputs[TensorValue, BufferValue]) -> None:
        """Binds the contract's ``lora`` into the module's LoRA layers."""
        if inputs.lora is not None:
            self.bind_adapters(inputs)

    def bind_adapters(self, inputs: DecoderInputs[TensorValue, BufferValue]) -> None:
        """Binds the contract's ``lora`` into the module's LoRA layers, before it is called."""
        assert inputs.lora is None, f"{type(self).__name__} declares adapters and binds none"

    @abstractmethod
    def __call__(
        self, inputs: DecoderInputs[TensorValue, BufferValue]
    ) -> DecoderOutputs[TensorValue] | Any:
        """Computes the step; a stage before the last returns its boundary tree."""
