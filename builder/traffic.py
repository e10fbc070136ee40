"""The bytes of weights that a decode step has to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from builder.resolve import Plan
from models.config import DecoderConfig
from models.decoder import CausalDecoder, constant_weights, projecting
from models.layers.experts import MixtureOfExperts
from models.layers.vocabulary import TOKEN_EMBEDDING
from models.weights import DeclaredWeight, declared_weights


def step_weight_bytes(plan: Plan, batch_size: int) -> int:
    """The bytes of weights that a step reads in which every sequence decodes one token.

    Counted per device, each weight once, as it is computed with:

    - the matrices, norms and biases of every layer, and the output projection, whole. A tied
      table is the output projection where it projects;
    - of tables that are looked up in (token embedding, learned positions, rotations) one row per
      token;
    - of a layer's routed experts as many as the batch's tokens can choose at most.

    A replica without a sequence reads nothing, and the image encoder is not run. KV pages, states
    and adapters are not weights.

    Args:
        plan: The plan.
        batch_size: Sequences over all replicas, spread as evenly as can be.
    """
    replicas = plan.num_replicas
    sequences = [len(range(replica, batch_size, replicas)) for replica in range(replicas)]
    return sum(_stage_bytes(stage.config, sequences) for stage in plan.stages)


def _stage_bytes(config: DecoderConfig, sequences: Sequence[int]) -> int:
    placement = config.placement
    decoder = CausalDecoder(config)
    experts = {id(weight) for weight in _routed(decoder)}
    embedding = constant_weights(config).get(TOKEN_EMBEDDING, _weights(decoder, "embed_tokens"))
    rotations = _weights(decoder, "rope")
    positions = _weights(getattr(decoder, "embed_positions", None), "shards")
    looked_up = {id(weight) for weight in (*embedding, *rotations, *positions)}
    total = 0
    for weight in declared_weights(decoder).values():
        tokens = sequences[placement.replica(weight.holder)]
        if id(weight) in experts:
            total += _expert_bytes(config, weight, tokens, sum(sequences))
        elif id(weight) not in looked_up and tokens:
            total += weight.num_bytes
    for weight in (*rotations, *positions):
        total += sequences[placement.replica(weight.holder)] * _row_bytes(weight)
    # Where no table of its own projects, the embedding's does.
    projects = placement.is_last and not hasattr(decoder, "output")
    whole = projecting(placement, config.settings) if projects else ()
    for weight in embedding:
        tokens = sequences[placement.replica(weight.holder)]
        if tokens and weight.holder in whole:
            total += weight.num_bytes
        elif placement.is_first:
            total += tokens * _row_bytes(weight)
    return total


def _expert_bytes(config: DecoderConfig, weight: DeclaredWeight, own: int, every: int) -> int:
    """The part of a layer's experts that is chosen at most, were they divided evenly."""
    experts = config.settings.experts
    assert experts is not None
    tokens = every if config.placement.expert > 1 else own
    chosen = min(experts.num_experts, tokens * experts.top_k)
    return weight.num_bytes * chosen // experts.num_experts


def _routed(decoder: CausalDecoder) -> Iterable[DeclaredWeight]:
    for layer in decoder.layers:
        if isinstance(layer.feed_forward, MixtureOfExperts):
            for shard in layer.feed_forward.shards:
                yield from (shard.gate_up_proj, shard.down_proj)


def _weights(parent: object, name: str) -> list[DeclaredWeight]:
    """The weight of each module of a list that a module may not have."""
    return [module.weight for module in getattr(parent, name, ())]


def _row_bytes(weight: DeclaredWeight) -> int:
    return weight.num_bytes // weight.sizes[0]
