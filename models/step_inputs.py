"""How a step's inputs reach the devices of a stage, inside the graph."""

from __future__ import annotations

from collections.abc import Sequence

from max import tree
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, TensorValue, ops
from max.nn.kv_cache import KVCacheInputsPerDevice

from models.collectives import Collectives
from models.config import DecoderConfig
from models.kernels.accelerators import plan_latent_prefill
from models.layers.step import Step
from models.placement import Placement
from models.role_contracts import DecoderInputs

Inputs = DecoderInputs[TensorValue, BufferValue]
"""A stage's contract as graph values."""


def split_batch(
    placement: Placement, inputs: Inputs, collectives: Collectives
) -> tuple[list[TensorValue], list[TensorValue]]:
    """Per device, its replica's tokens and their row offsets.

    Args:
        placement: The stage's devices.
        inputs: The contract.
        collectives: Exchanges between the devices.
    """
    tokens = collectives.broadcast(inputs.tokens)
    offsets = collectives.broadcast(inputs.input_row_offsets)
    if placement.data == 1:
        return tokens, offsets
    assert inputs.data_parallel_splits is not None
    # MAX's own ``split_batch_replicated`` computes with constants, which are compiled and run
    # while the graph is compiled: a third of the time that takes.
    starts = replica_starts(inputs)
    firsts = _one_by_one(inputs.data_parallel_splits)
    lasts = _one_by_one(inputs.data_parallel_splits + 1)
    split_tokens, split_offsets = [], []
    for holder in range(len(placement.devices)):
        replica = placement.replica(holder)
        own = slice(starts[replica], starts[replica + 1])
        split_tokens.append(
            ops.slice_tensor(tokens[holder], [(own, f"replica_input_split_{replica}")])
        )
        rows = slice(firsts[replica], lasts[replica + 1])
        bounds = ops.slice_tensor(offsets[holder], [(rows, f"replica_offset_split_{replica}")])
        first = slice(firsts[replica], lasts[replica])
        split_offsets.append(bounds - ops.slice_tensor(offsets[holder], [(first, 1)]))
    return split_tokens, split_offsets


def _one_by_one(values: TensorValue) -> list[TensorValue]:
    """Each of some values, [1]."""
    return ops.split(values, [1] * int(values.shape[0]), axis=0)


def replica_starts(inputs: Inputs) -> list[TensorValue]:
    """Where each replica's tokens begin, and the last's end, int64 [1] on the CPU.

    Args:
        inputs: The contract.
    """
    if inputs.data_parallel_splits is None:
        length = ops.shape_to_tensor(inputs.tokens.shape)
        return [length * 0, length]
    assert inputs.host_input_row_offsets is not None
    offsets = ops.cast(inputs.host_input_row_offsets, DType.int64)
    starts = ops.gather(offsets, inputs.data_parallel_splits, axis=0)
    return _one_by_one(starts)


def split_positions(
    placement: Placement, inputs: Inputs, tokens: Sequence[TensorValue]
) -> list[TensorValue]:
    """Per device, the positions of its replica's tokens.

    Args:
        placement: The stage's devices.
        inputs: The contract, with ``token_positions``.
        tokens: Per device, its replica's tokens.
    """
    positions = inputs.token_positions
    assert positions is not None
    if placement.data == 1:
        return [positions.to(device) for device in placement.devices]
    starts = [start.reshape(()) for start in replica_starts(inputs)]
    parts = []
    for holder, device in enumerate(placement.devices):
        replica = placement.replica(holder)
        rows = ops.range(
            starts[replica],
            starts[replica + 1],
            1,
            out_dim=tokens[holder].shape[0],
            dtype=DType.int64,
            device=DeviceRef.CPU(),
        )
        parts.append(ops.gather(positions.to(device), rows.to(device), axis=0))
    return parts


def steps_of(
    config: DecoderConfig,
    inputs: Inputs,
    offsets: Sequence[TensorValue],
    tables: Sequence[TensorValue] | None,
) -> list[Step]:
    """Per device, what every layer of this step shares.

    Args:
        config: The stage's configuration.
        inputs: The contract.
        offsets: Per device, the row offsets of its replica's tokens.
        tables: Per device, its table of rotations, where the stage rotates.
    """
    placement = config.placement
    caches = tree.leaves(inputs.kv, leaf=KVCacheInputsPerDevice)
    lengths = inputs.batch_context_lengths
    per_device = config.declarations.device_context_length_dtype is not None
    steps = []
    for holder, rows in enumerate(offsets):
        length = prefill = None
        if lengths is not None:
            length = lengths[holder if per_device else placement.replica(holder)]
            length = ops.cast(length.to(DeviceRef.CPU()), DType.int32)
            if not placement.on_host:
                assert config.kv_params is not None
                context = config.max_context_length
                prefill = plan_latent_prefill(config.kv_params, rows, caches[holder], context)
        steps.append(
            Step(
                row_offsets=rows,
                kv=caches[holder] if caches else None,
                rope=None if tables is None else tables[holder],
                context_length=length,
                prefill=prefill,
                state=None if inputs.state is None else inputs.state[holder],
                workspace=None if inputs.scratch is None else inputs.scratch[holder],
            )
        )
    return steps
