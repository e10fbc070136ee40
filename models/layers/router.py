"""The choice of each token's experts."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.layer import Module

from models.config import DecoderConfig
from models.kernels import matmul
from models.settings import ExpertSettings, RouterSettings
from models.weights import DeclaredWeight, FromCheckpoint, Piece


class Router(Module):
    """Chooses the best experts of each token and weighs them.

    Args:
        config: The decoder's configuration.
        experts: The model's mixture of experts.
        layer: The layer's index in the model.
        holder: The position of the device that holds it.
    """

    def __init__(
        self, config: DecoderConfig, experts: ExpertSettings, layer: int, holder: int
    ) -> None:
        super().__init__()
        self.experts = experts
        device = config.placement.devices[holder]
        prefix = f"layers.{layer}.mlp.gate"

        def weight(name: str, *sizes: int) -> DeclaredWeight:
            source = FromCheckpoint((Piece(f"{prefix}.{name}"),))
            return DeclaredWeight(name, DType.float32, sizes, device, source, holder)

        self.weight = weight("weight", experts.num_experts, config.settings.hidden_size)
        self.correction_bias = (
            weight("e_score_correction_bias", experts.num_experts)
            if experts.router.correction_bias
            else None
        )

    def __call__(self, x: TensorValue) -> tuple[TensorValue, TensorValue]:
        """[tokens, hidden] to experts, int32 [tokens, k], and weights, float32 [tokens, k]."""
        router = self.experts.router
        logits = matmul(ops.cast(x, DType.float32), self.weight)
        scores = ops.softmax(logits) if router.scoring == "softmax" else ops.sigmoid(logits)
        ranked = scores if self.correction_bias is None else scores + self.correction_bias
        if router.num_groups > 1:
            ranked = _limit_to_groups(ranked, router, self.experts.num_experts)
        weights, chosen = ops.top_k(ranked, self.experts.top_k, axis=-1)
        if self.correction_bias is not None:
            weights = ops.gather_nd(scores, ops.unsqueeze(chosen, -1), batch_dims=1)
        if router.normalize:
            weights = weights / (ops.sum(weights, axis=-1) + router.sum_floor)
        return ops.cast(chosen, DType.int32), weights * router.scale


def _limit_to_groups(ranked: TensorValue, router: RouterSettings, num_experts: int) -> TensorValue:
    """The scores of each token's best groups of experts, and minus infinity elsewhere.

    Args:
        ranked: float32 [tokens, num_experts].
        router: How many groups, and how they are scored.
        num_experts: Routed experts.
    """
    tokens, groups = ranked.shape[0], router.num_groups
    size = num_experts // groups
    grouped = ranked.reshape((tokens, groups, size))
    count = 1 if router.group_score == "max" else 2
    # [tokens, groups]
    score = ops.sum(ops.top_k(grouped, count, axis=-1)[0], axis=-1).reshape((tokens, groups))
    best = ops.top_k(score, router.top_groups, axis=-1)[1]
    every = ops.range(0, groups, 1, out_dim=groups, dtype=DType.int64, device=ranked.device)
    # [tokens, groups, 1]: how often a group is among the best.
    hits = ops.sum(
        ops.cast(
            ops.equal(
                ops.cast(best, DType.int64).reshape((tokens, 1, router.top_groups)),
                every.reshape((1, groups, 1)),
            ),
            DType.float32,
        ),
        axis=-1,
    )
    kept = ops.broadcast_to(hits > 0.5, (tokens, groups, size)).reshape((tokens, num_experts))
    lowest = ops.constant(float("-inf"), DType.float32, ranked.device)
    return ops.where(kept, ranked, lowest)
