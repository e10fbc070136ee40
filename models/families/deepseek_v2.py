"""DeepSeek-V2 and V2-Lite: a softmax router that may limit each token to some groups of experts.

As in Hugging Face transformers, yarn's temperature does not enter the attention's scale.
"""

from __future__ import annotations

from models.families.base import ConfigReader, Family
from models.families.deepseek import deepseek_settings
from models.settings import ModelSettings, RouterSettings

_METHODS = ("greedy", "group_limited_greedy")


def _settings(reader: ConfigReader) -> ModelSettings:
    reader.choice("scoring_func", ("softmax",), "softmax")
    if reader.flag("norm_topk_prob"):
        raise reader.error(
            "norm_topk_prob",
            "true is not supported: the model's own code normalises then, transformers does not",
        )
    limited = reader.choice("topk_method", _METHODS, "greedy") == "group_limited_greedy"
    return deepseek_settings(
        reader,
        "deepseek_v2",
        router=RouterSettings(
            num_groups=reader.integer("n_group") if limited else 1,
            top_groups=reader.integer("topk_group") if limited else 1,
            scale=reader.number("routed_scaling_factor", 1.0),
        ),
        scale=1.0,
        interleaved=True,
        top_k=None,
        num_experts=64,
        shared=2,
        expert_size=1407,
        first_expert_layer=0,
        mlp_bias=reader.flag("mlp_bias"),
    )


FAMILY = Family(name="deepseek_v2", architectures=("DeepseekV2ForCausalLM",), settings=_settings)
