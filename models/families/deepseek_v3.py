"""DeepSeek-V3 and R1: a sigmoid router with a correction bias, limited to groups of experts."""

from __future__ import annotations

from models.families.base import ConfigReader, Family, rope_parameters, yarn_temperature
from models.families.deepseek import deepseek_settings
from models.settings import ModelSettings, RouterSettings


def _settings(reader: ConfigReader) -> ModelSettings:
    reader.choice("scoring_func", ("sigmoid",), "sigmoid")
    reader.choice("topk_method", ("noaux_tc",), "noaux_tc")
    return deepseek_settings(
        reader,
        "deepseek_v3",
        router=RouterSettings(
            scoring="sigmoid",
            correction_bias=True,
            num_groups=reader.integer("n_group", 8),
            top_groups=reader.integer("topk_group", 4),
            group_score="top2",
            normalize=reader.flag("norm_topk_prob", True),
            sum_floor=1e-20,
            scale=reader.number("routed_scaling_factor", 2.5),
        ),
        scale=_temperature(reader) ** 2,
        interleaved=reader.flag("rope_interleave", True),
        top_k=8,
        num_experts=256,
        shared=1,
        expert_size=2048,
        first_expert_layer=3,
        num_heads=reader.integer("num_attention_heads", 128),
    )


def _temperature(reader: ConfigReader) -> float:
    """Yarn's temperature of queries and keys, where the rotation is stretched and names one."""
    rope = rope_parameters(reader)
    if rope is None or "default" in (rope.config.get("rope_type"), rope.config.get("type")):
        return 1.0
    if not rope.config.get("mscale_all_dim"):
        return 1.0
    return yarn_temperature(rope.number("factor"), rope.number("mscale_all_dim"))


FAMILY = Family(name="deepseek_v3", architectures=("DeepseekV3ForCausalLM",), settings=_settings)
