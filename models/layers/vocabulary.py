"""From token ids to the residual stream, and from there to logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.layer import Module
from max.nn.transformer import ReturnHiddenStates, ReturnLogits

from models.collectives import Collectives
from models.config import DecoderConfig
from models.kernels import Matrix
from models.layers.norm import ReplicatedNorm
from models.layers.shards import Sharded
from models.role_contracts import DecoderOutputs
from models.storage import Storage, storage_of
from models.weights import DeclaredWeight, Piece, rows_of

EMBED_POSITIONS = "embed_positions.weight"
"""The checkpoint tensor of learned positions."""

TOKEN_EMBEDDING = "token_embedding"
"""The table's name among a deployment's constants."""

EMBED_TOKENS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
"""The checkpoint tensors of the two tables."""


def declare_table(
    config: DecoderConfig, tensor: str, holder: int, gathers: bool = False
) -> DeclaredWeight:
    """One device's rows of a table with one row per token id.

    Args:
        config: The decoder's configuration.
        tensor: The checkpoint tensor.
        holder: The position of the device that holds it.
        gathers: Whether tokens' rows are looked up in it.
    """
    rows = config.placement.vocabulary(config.settings, holder)
    return DeclaredWeight(
        "weight",
        config.dtype,
        (len(rows), config.settings.hidden_size),
        config.placement.devices[holder],
        rows_of(tensor, rows).alone(),
        holder,
        _table_storage(config, tensor, len(rows), gathers),
    )


def projects_from_embedding(config: DecoderConfig) -> bool:
    """Whether the output projection can read the table that tokens are looked up in."""
    kept = _table_storage(config, EMBED_TOKENS, config.settings.vocab_size, gathers=False)
    return config.settings.tie_word_embeddings and (kept is None or kept.gathers)


def _table_storage(config: DecoderConfig, tensor: str, rows: int, gathers: bool) -> Storage | None:
    encoding, width = config.stored.get(tensor), config.settings.hidden_size
    storage = storage_of(encoding, rows, width, rounds=config.rounds_activations)
    return None if storage is not None and gathers and not storage.gathers else storage


class TableShard(Module):
    """One device's rows of a table.

    Args:
        config: The decoder's configuration.
        tensor: The checkpoint tensor.
        holder: The position of the device that holds it.
        gathers: Whether tokens' rows are looked up in it.
    """

    def __init__(
        self, config: DecoderConfig, tensor: str, holder: int, gathers: bool = False
    ) -> None:
        super().__init__()
        self.weight = declare_table(config, tensor, holder, gathers)

    def __call__(self) -> Matrix:
        """[rows, hidden]."""
        return self.weight.matrix


class PositionTable(Sharded):
    """Learned absolute positions, on every device.

    Args:
        config: The decoder's configuration.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, partial(_PositionTableCopy, config))

    def __call__(
        self, xs: Sequence[TensorValue], positions: Sequence[TensorValue]
    ) -> list[TensorValue]:
        """Per device [tokens, hidden] and int64 [tokens] to [tokens, hidden]."""
        return [copy(x, at) for copy, x, at in zip(self.shards, xs, positions, strict=True)]


class _PositionTableCopy(Module):
    def __init__(self, config: DecoderConfig, holder: int) -> None:
        super().__init__()
        settings = config.settings
        self.weight = DeclaredWeight(
            "weight",
            config.dtype,
            (settings.max_position_embeddings, settings.hidden_size),
            config.placement.devices[holder],
            Piece(EMBED_POSITIONS).alone(),
            holder,
        )

    def __call__(self, x: TensorValue, positions: TensorValue) -> TensorValue:
        return x + ops.gather(self.weight, positions, axis=0).rebind(x.shape)


def embed(
    config: DecoderConfig,
    tables: Sequence[Matrix],
    tokens: Sequence[TensorValue],
    collectives: Collectives,
) -> list[TensorValue]:
    """Looks up each token's row.

    Where the rows are divided, each device looks up the tokens it has, the others give zeros,
    and the sum over a replica's devices is the row.

    Args:
        config: The decoder's configuration.
        tables: Per device, its rows of the table.
        tokens: Per device, int64 [tokens].
        collectives: Sums over a replica's devices.

    Returns:
        Per device [tokens, hidden].
    """
    if not config.placement.splits_vocabulary(config.settings):
        return [table.gather(ids) for table, ids in zip(tables, tokens, strict=True)]
    parts = []
    for holder, (table, ids) in enumerate(zip(tables, tokens, strict=True)):
        rows = config.placement.vocabulary(config.settings, holder)
        device = ids.device
        first, last = (
            ops.constant(value, DType.int64, device) for value in (rows.start, rows.stop - 1)
        )
        local = ops.max(ops.min(ids, last), first)
        held = ops.unsqueeze(ops.cast(ops.equal(local, ids), config.dtype), 1)
        parts.append(table.gather(local - first) * held)
    return collectives.sum_in_replicas(parts)


class OutputHead(Module):
    """The last norm, the choice of rows, and the output projection.

    Args:
        config: The decoder's configuration.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = ReplicatedNorm(config, "norm")

    def __call__(
        self,
        xs: Sequence[TensorValue],
        tables: Sequence[Matrix],
        ends: Sequence[TensorValue],
        row_offsets: TensorValue,
        return_n_logits: TensorValue,
        collectives: Collectives,
    ) -> DecoderOutputs[TensorValue]:
        """Makes the decoder's outputs, on the first device.

        Args:
            xs: Per device, [tokens, hidden] of the last layer.
            tables: The output projection's rows, per device that projects.
            ends: Per device, int64 [sequences]: the end of each sequence in its tokens.
            row_offsets: uint32 [sequences + 1] of the whole batch.
            return_n_logits: int64 [1] on the CPU. A graph for last-token or all-token logits
                takes 1, and reads its next-token logits at that distance from each sequence's
                end; one for variable logits returns so many rows per sequence.
            collectives: Exchanges between the devices.
        """

        def logits_of(rows: Sequence[TensorValue]) -> TensorValue:
            return self._project(self.norm(rows), tables, collectives)

        mode = self.config.return_logits
        last = self.next_token_rows(xs, ends, return_n_logits)
        logits = offsets = None
        if mode is ReturnLogits.VARIABLE:
            logits = logits_of(
                [
                    ops.gather(x, _last_rows(end, return_n_logits), axis=0)
                    for x, end in zip(xs, ends, strict=True)
                ]
            )
            offsets = _multiples(row_offsets, return_n_logits)
        elif mode is ReturnLogits.ALL:
            logits = logits_of(xs)
            offsets = ops.cast(row_offsets, DType.int64)
        return DecoderOutputs(
            next_token_logits=logits_of(last),
            logits=logits,
            logit_offsets=offsets,
            hidden_states=self._hidden_states(xs, last, collectives),
        )

    def next_token_rows(
        self, xs: Sequence[TensorValue], ends: Sequence[TensorValue], return_n_logits: TensorValue
    ) -> list[TensorValue]:
        """The rows that next-token logits are of, of the same arguments.

        Returns:
            Per device, [sequences, hidden].
        """
        distance = [return_n_logits.to(x.device) for x in xs]
        if self.config.return_logits is ReturnLogits.VARIABLE:
            distance = [ops.constant(1, DType.int64, x.device) for x in xs]
        rows = zip(xs, ends, distance, strict=True)
        return [ops.gather(x, end - n, axis=0) for x, end, n in rows]

    def next_token(
        self,
        rows: Sequence[TensorValue],
        tables: Sequence[Matrix],
        collectives: Collectives,
    ) -> DecoderOutputs[TensorValue]:
        """Makes the outputs where these are next-token logits alone.

        Args:
            rows: Per device, ``next_token_rows`` of the last layer.
            tables: The output projection's rows, per device that projects.
            collectives: Exchanges between the devices.
        """
        logits = self._project(self.norm(rows), tables, collectives)
        return DecoderOutputs(next_token_logits=logits)

    def _project(
        self,
        hidden: Sequence[TensorValue],
        tables: Sequence[Matrix],
        collectives: Collectives,
    ) -> TensorValue:
        placement = self.config.placement
        if placement.splits_vocabulary(self.config.settings):
            parts = [_logits(h, table) for h, table in zip(hidden, tables, strict=True)]
            whole = collectives.concat_in_replicas(parts)[:: placement.group]
        else:
            # Each replica's first device projects for the replica.
            firsts = hidden[:: placement.group]
            whole = [_logits(h, table) for h, table in zip(firsts, tables, strict=True)]
        return collectives.concat_replicas(whole)

    def _hidden_states(
        self, xs: Sequence[TensorValue], last: Sequence[TensorValue], collectives: Collectives
    ) -> TensorValue | None:
        mode = self.config.return_hidden_states
        if mode is ReturnHiddenStates.NONE:
            return None
        if mode is ReturnHiddenStates.LAST:
            rows = last
        elif mode is ReturnHiddenStates.ALL:
            rows = xs
        else:
            assert mode is ReturnHiddenStates.ALL_NORMALIZED, (
                f"{mode} is refused before the graph is built"
            )
            rows = self.norm(xs)
        return collectives.concat_replicas(rows[:: self.config.placement.group])


def _logits(hidden: TensorValue, table: Matrix) -> TensorValue:
    return ops.cast(table.product(hidden), DType.float32)


def _last_rows(ends: TensorValue, count: TensorValue) -> TensorValue:
    """The last ``count`` rows before each end, int64 [sequences * count]."""
    distances = ops.range(
        count.reshape(()),
        0,
        -1,
        out_dim="return_n_logits",
        dtype=DType.int64,
        device=ends.device,
    )
    return (ops.unsqueeze(ends, 1) - distances).reshape((-1,))


def _multiples(row_offsets: TensorValue, count: TensorValue) -> TensorValue:
    """0, count, 2 count, ... of the length of ``row_offsets``, int64."""
    length = row_offsets.shape[0]
    steps = ops.range(0, length, 1, out_dim=length, dtype=DType.int64, device=row_offsets.device)
    return steps * count.to(row_offsets.device)
