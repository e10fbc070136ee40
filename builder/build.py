"""Step 3, build: a plan to what MAX needs to build its graphs.

The graphs themselves are traced by ``GraphApiDecoderPipelineModel``, the one place that does.
Importing this module imports MAX's pipelines (two seconds), which planning does without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max.driver import CPU, Device, DeviceSpec
from max.nn.kv_cache import KVCacheParamInterface
from max.pipelines.kv_cache.config import KVCacheConfig
from max.pipelines.lib.config import MAXModelConfig, PipelineConfig
from max.pipelines.lib.memory_estimation import MemoryPlan
from max.pipelines.lib.pipeline_runtime_config import PipelineRuntimeConfig
from transformers import PretrainedConfig

from builder.resolve import Plan
from models.config import DecoderConfig
from models.decoder import CausalDecoder
from models.registration_graph_api import (
    GraphApiDecoderPipelineModel,
    graph_api_pipeline_model,
)


@dataclass(frozen=True)
class Registration:
    """A plan in MAX's terms: a pipeline model class and what it is constructed from."""

    plan: Plan
    """The plan."""

    model_cls: type[GraphApiDecoderPipelineModel]
    """The registered class."""

    pipeline_config: PipelineConfig
    """MAX's configuration of the same deployment."""

    devices: list[Device]
    """The devices; simulated ones are the one CPU several times."""

    memory_plan: MemoryPlan
    """The limits that planning settled, as MAX carries them."""


def build(plan: Plan) -> Registration:
    """Registers the plan's decoder and writes its deployment in MAX's configuration."""
    model_config = MAXModelConfig(
        model_path="",
        device_specs=[DeviceSpec.cpu()] * len(plan.decoder.placement.devices),
        quantization_encoding=plan.model.encoding.value,
        max_length=plan.max_length,
        data_parallel_degree=plan.decoder.placement.data,
        kv_cache=KVCacheConfig(
            kv_cache_page_size=plan.deployment.kv.page_size, enable_prefix_caching=False
        ),
    )
    # Seeded, so that MAX looks for no repository: a GGUF file has no config.json to load, and
    # loading the weights is ours.
    model_config._huggingface_config = PretrainedConfig(**plan.checkpoint.config)
    model_config._resolved_dtype_cast = (None, None)
    pipeline_config = PipelineConfig(
        models={"main": model_config},
        runtime=PipelineRuntimeConfig(
            max_batch_size=plan.deployment.batch.max_batch_size,
            max_batch_input_tokens=plan.deployment.batch.max_batch_input_tokens,
        ),
    )
    return Registration(
        plan=plan,
        model_cls=graph_api_pipeline_model(CausalDecoder, _planned(plan.decoder)),
        pipeline_config=pipeline_config,
        devices=[CPU()] * len(plan.decoder.placement.devices),
        memory_plan=MemoryPlan(
            planned_max_batch_size=plan.deployment.batch.max_batch_size,
            footprint=sum(device.total for device in plan.memory),
            planned_max_length=plan.max_length,
        ),
    )


def _planned(decoder: DecoderConfig) -> type[Any]:
    """The architecture configuration class of a deployment that is already resolved."""

    class PlannedConfig:
        """MAX's view of a plan's decoder configuration."""

        DEFAULT_ENCODING = "float32"
        SUPPORTED_ENCODINGS: frozenset[str] = frozenset({"float32"})

        def __init__(self) -> None:
            self.decoder = decoder

        @classmethod
        def initialize(cls, *_: Any, **__: Any) -> PlannedConfig:
            """The plan's configuration, whatever MAX's says: one was made from the other."""
            return cls()

        @staticmethod
        def construct_kv_params(*_: Any, **__: Any) -> KVCacheParamInterface:
            """The plan's KV cache parameters."""
            return decoder.kv_params

        def get_kv_params(self) -> KVCacheParamInterface:
            """The plan's KV cache parameters."""
            return decoder.kv_params

        def get_max_seq_len(self) -> int:
            """The plan's longest sequence."""
            return decoder.max_seq_len

    return PlannedConfig
