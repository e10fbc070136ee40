"""From token ids to the residual stream, and from there to logits."""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn.layer import LayerList, Module
from max.nn.transformer import ReturnHiddenStates, ReturnLogits

from models.config import DecoderConfig
from models.layers.norm import RMSNorm
from models.role_contracts import DecoderOutputs
from models.weights import DeclaredWeight, FromCheckpoint, Piece


class Embedding(Module):
    """A table with one row per token id.

    Args:
        tensor: The checkpoint tensor of the table.
        config: The decoder's configuration.
        device: Where it resides.
    """

    def __init__(self, tensor: str, config: DecoderConfig, device: DeviceRef) -> None:
        super().__init__()
        shape = (config.settings.vocab_size, config.settings.hidden_size)
        self.weight = DeclaredWeight(
            "weight", config.dtype, shape, device, FromCheckpoint((Piece(tensor),))
        )

    def __call__(self, tokens: TensorValue) -> TensorValue:
        """int64 [tokens] to [tokens, hidden]."""
        return ops.gather(self.weight, tokens, axis=0)

    def logits(self, hidden: TensorValue) -> TensorValue:
        """[rows, hidden] to float32 [rows, vocabulary]: the table as output projection."""
        return ops.cast(hidden @ ops.transpose(self.weight, 0, 1), DType.float32)


class OutputHead(Module):
    """The last norm, the choice of rows, and the output projection.

    Args:
        config: The decoder's configuration.
        embeddings: The token embeddings, reused where the checkpoint ties them.
    """

    def __init__(self, config: DecoderConfig, embeddings: LayerList) -> None:
        super().__init__()
        settings = config.settings
        self.config = config
        self.norm = LayerList(
            [
                RMSNorm(
                    "norm.weight", settings.hidden_size, settings.norm_eps, config.dtype, device
                )
                for device in config.placement.devices
            ]
        )
        if settings.tie_word_embeddings:
            # Not a sublayer here: the weight is the embedding's and is named there.
            self.projections: Sequence[Module] = list(embeddings)
        else:
            self.lm_head = LayerList(
                [Embedding("lm_head.weight", config, device) for device in config.placement.devices]
            )
            self.projections = list(self.lm_head)

    def __call__(
        self,
        xs: Sequence[TensorValue],
        row_offsets: TensorValue,
        return_n_logits: TensorValue,
    ) -> DecoderOutputs[TensorValue]:
        """Makes the decoder's outputs.

        Args:
            xs: Per device, [tokens, hidden] of the last layer.
            row_offsets: uint32 [sequences + 1].
            return_n_logits: int64 [1] on the CPU. A graph for last-token or all-token logits
                takes 1, and reads its next-token logits at that distance from each sequence's
                end; one for variable logits returns so many rows per sequence.
        """
        x, norm, projection = xs[0], self.norm[0], self.projections[0]
        assert isinstance(projection, Embedding)
        device = x.device
        n = return_n_logits.to(device)
        ends = ops.cast(row_offsets[1:], DType.int64)
        mode = self.config.return_logits
        if mode is ReturnLogits.VARIABLE:
            last = ops.gather(x, ends - 1, axis=0)
            next_token_logits = projection.logits(norm(last))
            distances = ops.range(
                return_n_logits.reshape(()),
                0,
                -1,
                out_dim="return_n_logits",
                dtype=DType.int64,
                device=device,
            )
            rows = (ops.unsqueeze(ends, 1) - distances).reshape((-1,))
            logits = projection.logits(norm(ops.gather(x, rows, axis=0)))
            starts = ops.cast(
                ops.range(
                    0,
                    row_offsets.shape[0],
                    1,
                    out_dim=row_offsets.shape[0],
                    dtype=DType.int64,
                    device=device,
                ),
                DType.int64,
            )
            outputs = (next_token_logits, logits, starts * n)
        else:
            last = ops.gather(x, ends - n, axis=0)
            next_token_logits = projection.logits(norm(last))
            if mode is ReturnLogits.ALL:
                offsets = ops.cast(row_offsets, DType.int64)
                outputs = (next_token_logits, projection.logits(norm(x)), offsets)
            else:
                outputs = (next_token_logits, None, None)
        return DecoderOutputs(
            next_token_logits=outputs[0],
            logits=outputs[1],
            logit_offsets=outputs[2],
            hidden_states=self._hidden_states(x, last, norm),
        )

    def _hidden_states(
        self, x: TensorValue, last: TensorValue, norm: RMSNorm
    ) -> TensorValue | None:
        mode = self.config.return_hidden_states
        if mode is ReturnHiddenStates.NONE:
            return None
        if mode is ReturnHiddenStates.LAST:
            return last
        if mode is ReturnHiddenStates.ALL:
            return x
        assert mode is ReturnHiddenStates.ALL_NORMALIZED, f"{mode} is refused at resolve"
        return norm(x)
