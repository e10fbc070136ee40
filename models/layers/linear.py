"""Matrix products with weights from the checkpoint, and what adapters add to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from max.graph import TensorValue, ops
from max.nn.layer import Module

from models.config import Placed
from models.kernels import Matrix, can_fuse, lora_products
from models.lora import AdapterSlot, Routing
from models.storage import Storage, storage_of
from models.weights import DeclaredWeight, FromCheckpoint, Piece


@dataclass(frozen=True)
class _Bound:
    """What adapters add with in one step."""

    routing: Routing[TensorValue]
    first_row: TensorValue
    max_tokens: int
    stacks: tuple[tuple[TensorValue, TensorValue] | None, ...]


class Linear(Module):
    """``x @ weight.T + bias``, the weight stacked by rows from pieces of the checkpoint.

    The bias is added in the product's own rank, [tokens, out]: MAX 26.7 miscompiles its own CPU
    product where it is reshaped to another rank and then broadcast against.

    Where the checkpoint's encodings are kept, pieces of different encodings are weights of their
    own, whose products lie side by side.

    Args:
        config: The configuration.
        holder: The position of the device that holds it.
        pieces: Where the rows of the weight come from, in order.
        in_dim: Columns of the weight.
        out_dim: Rows of the weight.
        bias: Where the bias comes from; ``None`` for none.
        adapted: The parts of the rows, each with its width and where adapters add to it.
    """

    def __init__(
        self,
        config: Placed,
        holder: int,
        pieces: tuple[Piece, ...],
        in_dim: int,
        out_dim: int,
        bias: tuple[Piece, ...] | None = None,
        adapted: Sequence[tuple[int, AdapterSlot | None]] = (),
    ) -> None:
        super().__init__()
        device = config.placement.devices[holder]
        self._names: list[str] = []
        for storage, alike in groupby(pieces, partial(_storage, config, out_dim, in_dim)):
            run = tuple(alike)
            rows = out_dim if len(run) == len(pieces) else sum(_rows(piece) for piece in run)
            # Where one encoding is kept, as ever: "weight".
            name = f"weight_{len(self._names)}" if self._names else "weight"
            shape, source = (rows, in_dim), FromCheckpoint(run)
            weight = DeclaredWeight(name, config.dtype, shape, device, source, holder, storage)
            setattr(self, name, weight)
            self._names.append(name)
        self.bias = (
            None
            if bias is None
            else DeclaredWeight(
                "bias", config.dtype, (out_dim,), device, FromCheckpoint(bias), holder
            )
        )
        self.adapted = tuple(adapted) if any(slot for _, slot in adapted) else ()
        self._bound: _Bound | None = None

    def bind_adapters(
        self,
        routing: Routing[TensorValue],
        first_row: TensorValue,
        max_tokens: int,
        stacks: Iterator[TensorValue],
    ) -> None:
        """Receives this step's adapters, before the decoder is called.

        Args:
            routing: Which tokens have which adapter.
            first_row: int64 [1] on the CPU: where this device's tokens begin in the batch.
            max_tokens: The most tokens of a step.
            stacks: An A and a B per part that adapters add to.
        """
        self._bound = _Bound(
            routing,
            first_row,
            max_tokens,
            tuple(
                None if slot is None else (next(stacks), next(stacks)) for _, slot in self.adapted
            ),
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """[tokens, in_dim] to [tokens, out_dim]."""
        parts = [getattr(self, name).matrix.product(x) for name in self._names]
        y = parts[0] if len(parts) == 1 else ops.concat(parts, axis=1)
        if self.bias is not None:
            y = y + self.bias
        return y if self._bound is None else y + self._added(x, self._bound)

    @property
    def alone(self) -> Matrix | None:
        """Its matrix, where the product with that is all and a kernel of several takes it."""
        if len(self._names) > 1 or self.bias is not None or self._bound is not None:
            return None
        matrix: Matrix = getattr(self, self._names[0]).matrix
        return matrix if can_fuse(matrix) else None

    def _added(self, x: TensorValue, bound: _Bound) -> TensorValue:
        parts = []
        for (width, _), stacks in zip(self.adapted, bound.stacks, strict=True):
            if stacks is None:
                zero = ops.constant(0, x.dtype, x.device)
                parts.append(ops.broadcast_to(zero, (x.shape[0], width)))
            else:
                parts.append(self._products(x, stacks, bound))
        return parts[0] if len(parts) == 1 else ops.concat(parts, axis=1)

    def _products(
        self, x: TensorValue, stacks: tuple[TensorValue, TensorValue], bound: _Bound
    ) -> TensorValue:
        return lora_products(x, *stacks, bound.routing, bound.first_row, bound.max_tokens)


def _storage(config: Placed, out_dim: int, in_dim: int, piece: Piece) -> Storage | None:
    """How rows of a product's weight are kept; ``None`` where they are converted."""
    encoding = None if piece.transposed else config.stored.get(piece.tensor)
    rows = out_dim if piece.rows is None else _rows(piece)
    ends = (in_dim, *(piece.columns or ()))
    return storage_of(encoding, rows, *ends, rounds=config.rounds_activations)


def _rows(piece: Piece) -> int:
    assert piece.rows is not None, "a tensor that is stacked with others says its rows"
    return piece.rows[1] - piece.rows[0]
