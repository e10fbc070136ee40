"""The inputs and outputs of a DECODER graph, as MAX's documents for role contracts define them.

Source: the reference pages of ``max.pipelines.lib.role_contracts.DecoderInputs``. No released
``max`` package holds these classes (26.7.0 is the newest), so they are implemented here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from max import tree

TensorT = TypeVar("TensorT")
SignalT = TypeVar("SignalT")


@tree.dataclass
@dataclass(frozen=True, kw_only=True)
class VisionInputs(Generic[TensorT]):
    """A batch's image embeddings, one shard per device of the stage."""

    embeddings: tuple[TensorT, ...]
    """One per device: activation dtype, ``[num_image_tokens, hidden]``."""

    scatter_indices: tuple[TensorT, ...]
    """One per device: int32 ``[num_image_tokens]``, the rows of ``tokens`` they replace."""


@tree.dataclass
@dataclass(frozen=True, kw_only=True)
class ImageInputs(Generic[TensorT, SignalT]):
    """Everything a VISION graph takes; it returns the crops' embeddings, one value per device."""

    patches: tuple[TensorT, ...]
    """One per replica: activation dtype ``[num_crops, patches, values]``, its first device."""

    signals: tuple[SignalT, ...] | None = None
    """The collectives' signal buffers, where devices share the encoder's layers."""


@tree.dataclass
@dataclass(frozen=True, kw_only=True)
class DecoderInputs(Generic[TensorT, SignalT]):
    """Everything a DECODER graph takes, in the canonical order of its role contract.

    The leaves, in declaration order, are the graph's inputs. A field that is ``None`` is no
    graph input. The same class holds ``TensorType``/``BufferType`` leaves while planning,
    ``TensorValue``/``BufferValue`` leaves inside the graph, and driver ``Buffer`` leaves at run
    time.
    """

    tokens: TensorT
    """The batch's ragged tokens: int64 ``[total_seq_len]``, device 0."""

    vision: VisionInputs[TensorT] | None = None
    """The batch's image embeddings, when a VISION module is registered."""

    input_row_offsets: TensorT
    """Each sequence's start in ``tokens``: uint32 ``[batch_size + 1]``, device 0."""

    token_positions: TensorT | None = None
    """Each ragged token's absolute position: int64 ``[total_seq_len]``, device 0, when declared."""

    host_input_row_offsets: TensorT | None = None
    """A CPU copy of ``input_row_offsets``, under data parallelism."""

    return_n_logits: TensorT
    """How many logits per sequence to return: int64 ``[1]``, CPU."""

    data_parallel_splits: TensorT | None = None
    """Each replica's first sequence: int64 ``[replicas + 1]``, CPU, under data parallelism."""

    signals: tuple[SignalT, ...] | None = None
    """The collectives' signal buffers, uint8, one per device of a multi-device graph."""

    kv: Any
    """The KV cache inputs, in the tree that the KV params declare. Empty where nothing attends."""

    batch_context_lengths: tuple[TensorT, ...] | None = None
    """Page-aligned context lengths: int32 ``[1]`` CPU per replica, or per device on request."""

    ep: Any = None
    """The expert-parallel exchange's buffers, in the tree that its ``input_tree()`` declares."""

    lora: tuple[TensorT, ...] | None = None
    """LoRA routing, then one A and one B stack per target slot, when adapters are served."""

    constants: Any = None
    """Checkpoint-backed deployment inputs, loaded once and held for the model's lifetime."""

    state: tuple[Any, ...] | None = None
    """Per-request state, in the order that the decoder's ``RequestStateStore`` declares."""

    scratch: tuple[Any, ...] | None = None
    """The workspace buffers that the decoder declares with ``scratch_types``."""

    stage_boundary: Any = None
    """What the previous pipeline stage returned, on every stage after the first."""


FIELD_NAMES: tuple[str, ...] = tuple(field.name for field in fields(DecoderInputs))
"""The sixteen fields in canonical order."""


@tree.dataclass
@dataclass(frozen=True, kw_only=True)
class DecoderOutputs(Generic[TensorT]):
    """What a DECODER graph returns, in this order; a field that is ``None`` is no output.

    B sequences, V the vocabulary, H the hidden size.
    """

    next_token_logits: TensorT
    """float32 ``[B, V]``: the logits after each sequence's last token."""

    logits: TensorT | None = None
    """float32 ``[rows, V]``, for variable or all-token logits."""

    logit_offsets: TensorT | None = None
    """Each sequence's first row in ``logits``: int64 ``[B + 1]``."""

    hidden_states: TensorT | None = None
    """``[B, H]`` or ``[total_seq_len, H]``, when asked for."""
