"""What each device of a plan holds: layers, heads, rows, and bytes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from max.dtype import DType
from max.nn.transformer import ReturnLogits

from models.buffers import buffer_bytes
from models.config import DecoderConfig
from models.contract import Contract
from models.exchange import exchange_bytes, exchanged_rows
from models.layers.vocabulary import EMBED_TOKENS, LM_HEAD
from models.lora import adapter_slots
from models.storage import Storage
from models.weights import DeclaredWeight, FromCheckpoint, Source


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """One device's share of the model, and its memory in bytes."""

    device: int
    """Its number among all devices of the deployment."""

    stage: int
    """Its pipeline stage."""

    replica: int
    """The replica of the stage that it serves."""

    rank: int
    """Its position among the devices that share the replica's weights."""

    layers: range
    """The layers it computes."""

    heads: range
    """Its query heads."""

    kv_heads: range
    """Its key-value heads."""

    inner_columns: range
    """Its columns of the dense feed-forward; empty where no layer of the stage has one."""

    experts: range
    """Its routed experts of each layer; empty where no layer of the stage has any."""

    expert_columns: range
    """Its columns of each of these experts."""

    vocabulary: range
    """Its rows of the embedding table or output projection; empty where it has neither."""

    weights: int
    """The decoder's weights and tables, as they are computed with."""

    constants: int
    """Weights taken as inputs."""

    kv_pages: int
    """The paged KV cache, the null page included."""

    kv_bytes_per_token: int
    """What one token takes of them."""

    signals: int
    """Signal buffers."""

    exchange: int
    """The buffers that experts are exchanged through."""

    scratch: int
    """The workspace that the decoder declares."""

    state: int
    """What is kept per request beside the KV cache."""

    lora: int
    """The stacks of adapters."""

    vision: int
    """The weights of the image encoder."""

    activations: int
    """The largest intermediate values of a step on an accelerator, beyond those that fit into the
    memory that is not planned with; 0 on the host."""

    @property
    def total(self) -> int:
        """The sum of the bytes."""
        held = self.weights + self.vision + self.constants + self.kv_pages
        return held + self.workspace + self.activations

    @property
    def workspace(self) -> int:
        """Buffers that a step works in."""
        return self.signals + self.exchange + self.scratch + self.state + self.lora


@dataclass(frozen=True, kw_only=True)
class WeightItems:
    """Where the bytes of all devices' weights come from."""

    checkpoint: int
    """Every tensor that is read, once, as it is kept."""

    replicated: Mapping[str, int]
    """What further copies take, by tensor; the layer's number is left out."""

    computed: Mapping[str, int]
    """Tables that are no tensor of the checkpoint, by name, and what a layout is padded with."""

    kept: Mapping[str, int]
    """The bytes of all devices' weights by how they are kept: in a dtype or in an encoding."""

    host: int
    """What simulated devices take of the host, which holds equal weights of theirs once."""

    @property
    def total(self) -> int:
        """The sum, which is the sum over devices."""
        return self.checkpoint + sum(self.replicated.values()) + sum(self.computed.values())


def device_shares(
    stages: Sequence[
        tuple[DecoderConfig, Contract, Iterable[DeclaredWeight], Iterable[DeclaredWeight]]
    ],
    num_pages: int,
    encoder: Iterable[DeclaredWeight] = (),
) -> tuple[DeviceShare, ...]:
    """Every device's share.

    Args:
        stages: Each stage's configuration, contract, weights and constants.
        num_pages: KV pages per replica.
        encoder: The weights of the image encoder, on the devices of the first stage.
    """
    shares: list[DeviceShare] = []
    encoding = _bytes_by_holder(encoder)
    counted = False
    for config, contract, weights, constants in stages:
        placement, settings = config.placement, config.settings
        weights, constants = list(weights), list(constants)
        held = _bytes_by_holder(weights)
        # Stages of the host share a constant's buffers: they are counted with the first.
        inputs = _bytes_by_holder([] if counted and placement.on_host else constants)
        counted = counted or bool(constants)
        tables = _table_rows([*weights, *constants])
        experts = settings.experts
        routed = experts is not None and not experts.layers.isdisjoint(placement.layers)
        dense = experts is None or not experts.layers.issuperset(placement.layers)
        for holder in range(len(placement.devices)):
            shares.append(
                DeviceShare(
                    device=len(shares),
                    stage=placement.stage,
                    replica=placement.replica(holder),
                    rank=placement.rank(holder),
                    layers=placement.layers,
                    heads=placement.heads(settings, holder),
                    kv_heads=placement.kv_heads(settings, holder),
                    inner_columns=placement.inner_columns(settings.intermediate_size, holder)
                    if dense
                    else range(0),
                    experts=placement.experts(experts, holder) if experts and routed else range(0),
                    expert_columns=placement.expert_columns(experts, holder)
                    if experts and routed
                    else range(0),
                    vocabulary=tables.get(holder, range(0)),
                    weights=held[holder],
                    constants=inputs[holder],
                    kv_pages=(num_pages + 1) * page_bytes(config),
                    kv_bytes_per_token=page_bytes(config) // page_size(config),
                    signals=_buffer_bytes(contract.inputs.signals, holder),
                    exchange=exchange_bytes(config, holder),
                    scratch=_buffer_bytes(contract.inputs.scratch, holder),
                    state=_buffer_bytes(contract.inputs.state, holder),
                    lora=_lora_bytes(config, holder),
                    vision=encoding[holder] if placement.is_first else 0,
                    activations=activation_bytes(
                        config, holder, config.max_batch_size, config.max_context_length
                    ),
                )
            )
    return tuple(shares)


def page_bytes(config: DecoderConfig) -> int:
    """The bytes of one KV page on one device of a stage."""
    params = config.kv_params
    if params is None:
        return 0
    return math.prod(params.shape_per_block) * params.dtype.size_in_bytes


def page_size(config: DecoderConfig) -> int:
    """The tokens of one KV page."""
    return 1 if config.kv_params is None else config.kv_params.page_size


def activation_bytes(config: DecoderConfig, holder: int, sequences: int, context: int) -> int:
    """The largest intermediate values of one of a device's steps, on an accelerator.

    One layer, or the output projection, is computed at a time: the largest of them counts. What
    scales with the step's tokens alone and is small beside it is left to the memory that is not
    planned with.

    Args:
        config: The stage's configuration.
        holder: The device's position.
        sequences: Sequences of a replica's step.
        context: The tokens that their pages hold.
    """
    settings, placement = config.settings, config.placement
    if placement.on_host:
        return 0
    hidden, tokens = settings.hidden_size, config.max_batch_input_tokens
    columns = placement.inner_columns(settings.intermediate_size, holder)
    values = [tokens * (hidden + 2 * len(columns))]
    if settings.latent is not None:
        # Prefill makes the keys and values of every token of its sequences.
        width = settings.latent.nope_dim + settings.latent.value_dim
        values.append(context * len(placement.heads(settings, holder)) * width)
    if settings.experts is not None:
        rows = tokens * settings.experts.top_k
        if placement.expert > 1:
            rows = exchanged_rows(config)
        inner = len(placement.expert_columns(settings.experts, holder))
        # What goes in and the gate with what it gates, or these and their product.
        values.append(rows * max(hidden + 2 * inner, 3 * inner))
    largest = max(values) * config.dtype.size_in_bytes
    if not placement.is_last:
        return largest
    rows = sequences if config.return_logits is ReturnLogits.LAST_TOKEN else tokens
    logits = rows * placement.data * settings.vocab_size * DType.float32.size_in_bytes
    return max(largest, logits)


def row_bytes(config: DecoderConfig) -> int:
    """The bytes that one token has at once in a layer of a stage, on all devices together.

    They are a feed-forward's input, its gate and what that gates, or those of the token's experts.

    Args:
        config: The stage's configuration.
    """
    settings, placement = config.settings, config.placement
    holders = range(len(placement.devices))
    widths = [0]
    if settings.dense_layers:
        columns = (placement.inner_columns(settings.intermediate_size, n) for n in holders)
        widths.append(sum(settings.hidden_size + 2 * len(own) for own in columns))
    if settings.experts is not None:
        # A token's experts are on some of the devices, or each has columns of all of them.
        several = range(placement.data) if placement.expert > 1 else holders
        columns = (placement.expert_columns(settings.experts, n) for n in several)
        chosen = sum(settings.hidden_size + 2 * len(own) for own in columns)
        widths.append(settings.experts.top_k * chosen)
    return max(widths) * config.dtype.size_in_bytes


def kv_bytes_per_token(configs: Iterable[DecoderConfig]) -> int:
    """The bytes of one token's keys and values, or latents, in all layers; copies not counted."""
    total = 0
    for config in configs:
        settings = config.settings
        per_layer = (
            2 * settings.num_kv_heads * settings.head_dim
            if settings.latent is None
            else settings.latent.cached_dim
        )
        attending = settings.attending(config.placement.layers)
        total += len(attending) * per_layer * config.dtype.size_in_bytes
    return total


def _lora_bytes(config: DecoderConfig, holder: int) -> int:
    """The bytes of one device's stacks of adapters."""
    if config.lora is None:
        return 0
    values = sum(
        config.lora.max_rank * (len(slot.rows) + len(slot.columns))
        for slot in adapter_slots(config.settings, config.placement, config.lora, holder)
    )
    return config.lora.max_adapters * values * config.dtype.size_in_bytes


def _buffer_bytes(per_device: Any, holder: int) -> int:
    """The bytes of one device's part of a field that has a tree per device."""
    return 0 if per_device is None else buffer_bytes(per_device[holder])


def weight_items(
    weights: Iterable[DeclaredWeight], shapes: Mapping[str, tuple[int, ...]]
) -> WeightItems:
    """Itemises the bytes of weights against the checkpoint they are read from.

    Args:
        weights: Every weight and constant of every device.
        shapes: The shape of each tensor they are read from.
    """
    held: Counter[str] = Counter()
    computed: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    once: dict[str, int] = {}
    distinct: dict[tuple[Source, Storage | None], DeclaredWeight] = {}
    for weight in weights:
        distinct[weight.source, weight.storage] = weight
        kept[_encoding(weight)] += weight.num_bytes
        if not isinstance(weight.source, FromCheckpoint):
            computed[_kind(weight.name)] += weight.num_bytes
            continue
        for piece in weight.source.pieces:
            whole = shapes[piece.tensor]
            held[piece.tensor] += _bytes_of(weight, math.prod(piece.shape(whole)))
            once[piece.tensor] = max(once.get(piece.tensor, 0), _bytes_of(weight, math.prod(whole)))
        computed["padding"] += weight.num_bytes - _bytes_of(weight, math.prod(weight.sizes))
    replicated: Counter[str] = Counter()
    for name, total in held.items():
        replicated[_kind(name)] += total - once[name]
    return WeightItems(
        checkpoint=sum(once.values()),
        replicated={kind: extra for kind, extra in sorted(replicated.items()) if extra},
        computed={kind: size for kind, size in sorted(computed.items()) if size},
        kept=dict(sorted(kept.items())),
        host=sum(weight.num_bytes for weight in distinct.values()),
    )


def _bytes_of(weight: DeclaredWeight, values: int) -> int:
    """The bytes of some of a weight's values, as it is kept."""
    if weight.storage is None:
        return values * weight.dtype.size_in_bytes
    return weight.storage.bytes_of(values)


def _encoding(weight: DeclaredWeight) -> str:
    return weight.dtype.name if weight.storage is None else weight.storage.encoding


def _table_rows(weights: Iterable[DeclaredWeight]) -> dict[int, range]:
    """The rows of the vocabulary's tables that each device holds."""
    return {
        weight.holder: range(*piece.rows)
        for weight in weights
        if isinstance(weight.source, FromCheckpoint)
        for piece in weight.source.pieces
        if piece.tensor in (EMBED_TOKENS, LM_HEAD) and piece.rows is not None
    }


def _bytes_by_holder(weights: Iterable[DeclaredWeight]) -> Counter[int]:
    held: Counter[int] = Counter()
    for weight in weights:
        held[weight.holder] += weight.num_bytes
    return held


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
