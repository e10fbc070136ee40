"""What DeepSeek-V2 and DeepSeek-V3 share: latent attention, and experts behind dense layers."""

from __future__ import annotations

from typing import Any

from models.families.base import ConfigReader, dense_settings, expert_settings
from models.settings import LatentSettings, ModelSettings, RouterSettings


def deepseek_settings(
    reader: ConfigReader,
    family: str,
    *,
    router: RouterSettings,
    scale: float,
    interleaved: bool,
    top_k: int | None,
    num_experts: int,
    shared: int,
    expert_size: int,
    first_expert_layer: int,
    **family_facts: Any,
) -> ModelSettings:
    """The settings of either family.

    Args:
        reader: The configuration.
        family: The family's name.
        router: How experts are chosen.
        scale: What the attention's scale is multiplied with.
        interleaved: Whether the rotated dimensions are neighbouring pairs.
        top_k: The family's default of ``num_experts_per_tok``.
        num_experts: The family's default of ``n_routed_experts``.
        shared: The family's default of ``n_shared_experts``.
        expert_size: The family's default of ``moe_intermediate_size``.
        first_expert_layer: The family's default of ``first_k_dense_replace``.
        family_facts: What the family sets differently, by ``ModelSettings`` field.

    Raises:
        ConfigError: If a value is missing, of the wrong type, or not computed by our layers.
    """
    num_layers = reader.integer("num_hidden_layers")
    if reader.integer("moe_layer_freq", 1) != 1:
        raise reader.error("moe_layer_freq", "only 1 is supported")
    nope_dim = reader.integer("qk_nope_head_dim", 128)
    rope_dim = reader.integer("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise reader.error("qk_rope_head_dim", f"{rope_dim} is odd; rotations need an even one")
    expert_size = reader.integer("moe_intermediate_size", expert_size)
    first = reader.integer("first_k_dense_replace", first_expert_layer, least=0)
    latent = LatentSettings(
        # Without a default, as null says that queries are not compressed.
        query_rank=None
        if reader.config.get("q_lora_rank", 1536) is None
        else reader.integer("q_lora_rank", 1536),
        kv_rank=reader.integer("kv_lora_rank", 512),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=reader.integer("v_head_dim", 128),
        scale=scale * (nope_dim + rope_dim) ** -0.5,
        bias=reader.flag("attention_bias"),
        interleaved=interleaved,
    )
    experts = None
    if first < num_layers:
        experts = expert_settings(
            reader,
            "n_routed_experts",
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=expert_size,
            shared_size=reader.integer("n_shared_experts", shared, least=0) * expert_size,
            router=router,
            layers=frozenset(range(first, num_layers)),
        )
    return dense_settings(
        reader,
        family,
        head_dim=rope_dim,
        # One latent, which all heads share.
        num_kv_heads=1,
        latent=latent,
        experts=experts,
        unread_layers=reader.integer("num_nextn_predict_layers", 0, least=0),
        **family_facts,
    )
