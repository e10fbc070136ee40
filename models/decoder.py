"""The decoder: embeddings, layers of a mixer and a feed-forward, and the output head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from max.dtype import DType
from max.graph import BufferType, BufferValue, TensorType, TensorValue, ops
from max.nn.layer import LayerList, Module
from max.nn.transformer import ReturnHiddenStates, ReturnLogits

from models.collectives import Collectives, collectives_for
from models.config import DecoderConfig
from models.exchange import Exchange, exchange_for
from models.graph_api import GraphApiModule
from models.kernels import Matrix, place_rows
from models.layers.attention import Attention
from models.layers.delta import GatedDelta
from models.layers.experts import MixtureOfExperts
from models.layers.latent_attention import LatentAttention, workspace_types
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.norm import ReplicatedNorm
from models.layers.rope import RopeTable, rope_table
from models.layers.shards import SummedMixer
from models.layers.short_conv import ShortConv
from models.layers.step import Step
from models.layers.vocabulary import (
    EMBED_TOKENS,
    LM_HEAD,
    TOKEN_EMBEDDING,
    OutputHead,
    PositionTable,
    TableShard,
    declare_table,
    embed,
    projects_from_embedding,
)
from models.lora import Routing
from models.placement import Placement
from models.role_contracts import DecoderInputs, DecoderOutputs
from models.settings import ModelSettings
from models.step_inputs import replica_starts, split_batch, split_positions, steps_of
from models.weights import Computed, DeclaredWeight

Boundary = tuple[TensorValue, ...]
"""What a stage before the last returns: [tokens, hidden] of each replica's first device."""


class DecoderLayer(Module):
    """One pre-norm layer: ``x + mixer(norm(x))``, then ``x + feed_forward(norm(x))``.

    Args:
        config: The decoder's configuration.
        layer: The layer's index in the model.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = ReplicatedNorm(config, f"layers.{layer}.input_layernorm")
        self.mixer = _mixer(config, layer)
        self.post_attention_norm = ReplicatedNorm(
            config, f"layers.{layer}.post_attention_layernorm"
        )
        self.feed_forward = _feed_forward(config, layer)
        placement = config.placement
        # A half is one kernel where nothing is exchanged within it.
        alone = placement.on_host and placement.group == 1 and config.dtype == DType.float32
        self.fuses = alone and config.settings.norm != "layer"

    def __call__(
        self,
        xs: Sequence[TensorValue],
        steps: Sequence[Step],
        collectives: Collectives,
        exchange: Exchange | None,
    ) -> list[TensorValue]:
        """Per device [tokens, hidden] to [tokens, hidden]."""
        return self.feed(self.mix(xs, steps, collectives), collectives, exchange)

    def mix(
        self, xs: Sequence[TensorValue], steps: Sequence[Step], collectives: Collectives
    ) -> list[TensorValue]:
        """The layer's first half: its mixer, in which tokens see others."""
        if self.fuses and isinstance(self.mixer, Attention) and self.mixer.is_plain:
            return self.mixer.with_norm(xs, list(self.input_norm.shards), steps)
        return _add(xs, self.mixer(self.input_norm(xs), steps, collectives))

    def feed(
        self,
        xs: Sequence[TensorValue],
        collectives: Collectives,
        exchange: Exchange | None,
    ) -> list[TensorValue]:
        """Its second half: its feed-forward, in which each token is computed by itself."""
        if isinstance(self.feed_forward, MixtureOfExperts):
            normed = self.post_attention_norm(xs)
            return _add(xs, self.feed_forward(normed, collectives, exchange))
        if self.fuses and self.feed_forward.is_plain:
            return self.feed_forward.with_norm(xs, list(self.post_attention_norm.shards))
        return _add(xs, self.feed_forward(self.post_attention_norm(xs), collectives))

    def adapted(self, holder: int) -> list[Linear]:
        """A device's products that adapters may add to, in the contract's order."""
        products: list[Linear] = []
        if isinstance(self.mixer, Attention):
            shard = self.mixer.shards[holder]
            products += [shard.qkv_proj, shard.o_proj]
        if isinstance(self.feed_forward, MLP):
            shard = self.feed_forward.shards[holder]
            products += [shard.gate_up_proj, shard.down_proj]
        return [product for product in products if product.adapted]


def _mixer(config: DecoderConfig, layer: int) -> Attention | SummedMixer:
    settings = config.settings
    latent, conv, delta = settings.latent, settings.conv, settings.delta
    if conv is not None and layer in conv.layers:
        return ShortConv(config, conv, layer)
    if delta is not None and layer in delta.layers:
        return GatedDelta(config, delta, layer)
    return Attention(config, layer) if latent is None else LatentAttention(config, latent, layer)


def _feed_forward(config: DecoderConfig, layer: int) -> MLP | MixtureOfExperts:
    experts = config.settings.experts
    if experts is None or layer not in experts.layers:
        return MLP(config, f"layers.{layer}.mlp", config.settings.intermediate_size, layer)
    return MixtureOfExperts(config, experts, layer)


class CausalDecoder(GraphApiModule):
    """A decoder-only language model, or one pipeline stage of it.

    Args:
        config: The finalized configuration, completed with the deployment.
    """

    supports_data_parallelism: ClassVar[bool] = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        settings, placement = config.settings, config.placement
        holders = range(len(placement.devices))
        if settings.rope is not None and settings.attending(placement.layers):
            table = Computed(
                partial(rope_table, settings.rope, settings.rotary_dim, config.max_seq_len)
            )
            self.rope = LayerList([RopeTable(config, holder, table) for holder in holders])
        if config.declarations.token_positions:
            self.embed_positions = PositionTable(config)
        if placement.is_first and not _is_constant(config):
            self.embed_tokens = LayerList(
                [TableShard(config, EMBED_TOKENS, holder, gathers=True) for holder in holders]
            )
        self.layers = LayerList([DecoderLayer(config, layer) for layer in placement.layers])
        if placement.is_last:
            self.head = OutputHead(config)
            tied = settings.tie_word_embeddings
            tensor = EMBED_TOKENS if tied else LM_HEAD
            shares = placement.is_first and projects_from_embedding(config)
            if not (shares or (tied and _is_constant(config))):
                self.output = LayerList(
                    [
                        TableShard(config, tensor, holder)
                        for holder in projecting(placement, settings)
                    ]
                )

    def constant_weights(self) -> dict[str, tuple[DeclaredWeight, ...]]:
        """The weights behind the contract's ``constants``, per name one per device."""
        return constant_weights(self.config)

    def bind_adapters(self, inputs: DecoderInputs[TensorValue, BufferValue]) -> None:
        """Binds the contract's ``lora`` into the products that adapters may add to."""
        assert inputs.lora is not None
        ids, offsets, end, *stacks = inputs.lora
        placement = self.config.placement
        remaining = iter(stacks)
        starts = replica_starts(inputs)
        max_tokens = self.config.max_batch_input_tokens
        for holder, device in enumerate(placement.devices):
            routing = Routing(ids.to(device), offsets.to(device), end)
            start = starts[placement.replica(holder)]
            for layer in self.layers:
                for product in layer.adapted(holder):
                    product.bind_adapters(routing, start, max_tokens, remaining)
        assert next(remaining, None) is None, "every stack is bound"

    def __call__(
        self, inputs: DecoderInputs[TensorValue, BufferValue]
    ) -> DecoderOutputs[TensorValue] | Boundary:
        """Computes one step of a ragged batch, or this stage's part of it."""
        placement = self.config.placement
        collectives = collectives_for(placement, inputs.signals)
        tokens, offsets = split_batch(placement, inputs, collectives)
        tables = [table() for table in self.rope] if hasattr(self, "rope") else None
        steps = steps_of(self.config, inputs, offsets, tables)
        exchange = None if inputs.ep is None else exchange_for(self.config, inputs.ep)
        if placement.is_first:
            xs = embed(self.config, self._embedding_tables(inputs), tokens, collectives)
            if inputs.vision is not None:
                parts = (xs, inputs.vision.embeddings, inputs.vision.scatter_indices)
                xs = [place_rows(x, rows, at) for x, rows, at in zip(*parts, strict=True)]
            if inputs.token_positions is not None:
                xs = self.embed_positions(xs, split_positions(placement, inputs, tokens))
        else:
            xs = self._guarded(inputs.stage_boundary, tokens)
        if not placement.is_last:
            xs = [_poisoned(x, inputs.return_n_logits, 1) for x in xs]
        *layers, last = self.layers
        for layer in layers:
            xs = layer(xs, steps, collectives, exchange)
        if not placement.is_last:
            xs = last(xs, steps, collectives, exchange)
            return tuple(xs[device] for device in placement.firsts)
        ends = [ops.cast(rows[1:], DType.int64) for rows in offsets]
        if self._feeds_last_rows(last):
            # No token sees what another one's last feed-forward gives.
            rows = last.mix(xs, steps, collectives)
            rows = self.head.next_token_rows(rows, ends, inputs.return_n_logits)
            rows = last.feed(rows, collectives, exchange)
            return self.head.next_token(rows, self._output_tables(inputs), collectives)
        return self.head(
            last(xs, steps, collectives, exchange),
            self._output_tables(inputs),
            ends,
            inputs.input_row_offsets,
            inputs.return_n_logits,
            collectives,
        )

    def _feeds_last_rows(self, last: DecoderLayer) -> bool:
        """Whether the last feed-forward is for the rows that next-token logits are of."""
        config = self.config
        returns_more = (
            config.return_logits is not ReturnLogits.LAST_TOKEN
            or config.return_hidden_states is not ReturnHiddenStates.NONE
        )
        # Adapters and exchanges take the rows of the whole batch.
        dense = isinstance(last.feed_forward, MLP) and config.lora is None
        return config.placement.on_host and dense and not returns_more

    def _embedding_tables(
        self, inputs: DecoderInputs[TensorValue, BufferValue]
    ) -> Sequence[Matrix]:
        if inputs.constants is not None:
            declared = self.constant_weights()[TOKEN_EMBEDDING]
            values = inputs.constants[TOKEN_EMBEDDING]
            return [w.matrix_of(value) for w, value in zip(declared, values, strict=True)]
        return [shard() for shard in self.embed_tokens]

    def _output_tables(self, inputs: DecoderInputs[TensorValue, BufferValue]) -> Sequence[Matrix]:
        if hasattr(self, "output"):
            return [shard() for shard in self.output]
        tables = self._embedding_tables(inputs)
        if not self.config.placement.is_first:
            return tables
        return [
            tables[holder] for holder in projecting(self.config.placement, self.config.settings)
        ]

    def _guarded(
        self, boundary: Sequence[TensorValue], tokens: Sequence[TensorValue]
    ) -> list[TensorValue]:
        """The boundary on each device; rows whose token is none of the vocabulary become NaN.

        A later stage needs no token, but it takes them: so a boundary of another batch is seen.
        """
        placement = self.config.placement
        return [
            _poisoned(
                boundary[placement.replica(holder)].to(device),
                tokens[holder],
                0,
                self.config.settings.vocab_size,
            )
            for holder, device in enumerate(placement.devices)
        ]


def boundary_types(config: DecoderConfig) -> tuple[TensorType, ...]:
    """What a stage returns to the next: one activation per replica.

    Args:
        config: The configuration of the stage that takes it.
    """
    placement, hidden = config.placement, config.settings.hidden_size
    dims = (
        ["total_seq_len"]
        if placement.data == 1
        else [f"replica_{replica}_seq_len" for replica in range(placement.data)]
    )
    return tuple(
        TensorType(config.dtype, [dim, hidden], device)
        for dim, device in zip(dims, placement.devices[:: placement.group], strict=True)
    )


def constant_weights(config: DecoderConfig) -> dict[str, tuple[DeclaredWeight, ...]]:
    """The weights behind a stage's constants, per name one per device that reads it."""
    if not _is_constant(config):
        return {}
    placement = config.placement
    holders: Sequence[int] = range(len(placement.devices))
    if not placement.is_first:
        holders = projecting(placement, config.settings)
    return {
        TOKEN_EMBEDDING: tuple(
            # A later stage's is not looked up in; yet stages share a constant's buffers.
            declare_table(config, EMBED_TOKENS, holder, gathers=True)
            for holder in holders
        )
    }


def scratch_types(config: DecoderConfig) -> tuple[BufferType, ...] | None:
    """The workspace that a stage's layers declare, one buffer per device."""
    latent = config.settings.latent
    # MAX's kernels for accelerators allocate their own.
    if latent is None or not config.placement.on_host:
        return None
    return workspace_types(config, latent)


def reads_token_embedding(settings: ModelSettings, placement: Placement) -> bool:
    """Whether a stage reads the token embedding table."""
    return placement.is_first or (placement.is_last and settings.tie_word_embeddings)


def _is_constant(config: DecoderConfig) -> bool:
    return TOKEN_EMBEDDING in config.constants


def projecting(placement: Placement, settings: ModelSettings) -> Sequence[int]:
    """The devices that hold output rows: all where they are divided, else each replica's first."""
    every = range(len(placement.devices))
    return every if placement.splits_vocabulary(settings) else placement.firsts


def _add(xs: Sequence[TensorValue], ys: Sequence[TensorValue]) -> list[TensorValue]:
    return [x + y for x, y in zip(xs, ys, strict=True)]


def _poisoned(
    x: TensorValue, values: TensorValue, least: int, end: int | None = None
) -> TensorValue:
    """``x``, with NaN in each row whose value is below ``least`` or not below ``end``.

    Args:
        x: [rows, hidden].
        values: [rows], or [1] for all rows.
        least: The smallest valid value.
        end: The first value that is too large.
    """
    values = values.to(x.device)
    valid = values >= ops.constant(least, values.dtype, x.device)
    if end is not None:
        valid = ops.logical_and(valid, values < ops.constant(end, values.dtype, x.device))
    zero, nan = (ops.constant(v, x.dtype, x.device) for v in (0.0, float("nan")))
    poison = ops.unsqueeze(ops.where(valid, zero, nan), 1)
    return x + (poison if values.shape[0] == 1 else poison.rebind((x.shape[0], 1)))
