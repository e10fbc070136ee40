"""Step 3, build: a plan to what MAX needs to build its graphs.

The graphs themselves are traced by ``GraphApiDecoderPipelineModel``, the one place that does.
Importing this module imports MAX's pipelines (two seconds), which planning does without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max.driver import Device, DeviceSpec
from max.nn.kv_cache import KVCacheParamInterface
from max.pipelines.kv_cache.config import KVCacheConfig
from max.pipelines.lib.config import MAXModelConfig, PipelineConfig
from max.pipelines.lib.memory_estimation import MemoryPlan
from max.pipelines.lib.pipeline_runtime_config import PipelineRuntimeConfig
from transformers import PretrainedConfig

from builder.resolve import Plan
from models.config import DecoderConfig
from models.decoder import CausalDecoder
from models.kv_cache import stages_kv_params
from models.registration_graph_api import GraphApiDecoderPipelineModel, graph_api_pipeline_model
from models.settings import ModelSettings
from models.vision import VisionEncoder


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
    """The devices of a stage; simulated ones are the one CPU several times."""

    memory_plan: MemoryPlan
    """The limits that planning settled, as MAX carries them."""


def build(plan: Plan) -> Registration:
    """Registers the plan's decoder and writes its deployment in MAX's configuration."""
    stages = tuple(stage.config for stage in plan.stages)
    devices = stages[0].placement.devices
    model_config = MAXModelConfig(
        model_path="",
        device_specs=[DeviceSpec(device.id, device.device_type.value) for device in devices],
        quantization_encoding=plan.dtype.name,
        max_length=plan.max_length,
        data_parallel_degree=plan.num_replicas,
        kv_cache=KVCacheConfig(
            kv_cache_page_size=plan.deployment.kv.page_size,
            enable_prefix_caching=plan.prefix_caching,
        ),
    )
    # Seeded, so that MAX looks for no repository: a GGUF file has no config.json to load, and
    # loading the weights is ours.
    model_config._huggingface_config = _huggingface_config(plan.settings)
    model_config._resolved_dtype_cast = (None, None)
    pipeline_config = PipelineConfig(
        models={"main": model_config},
        runtime=PipelineRuntimeConfig(
            max_batch_size=plan.batch.max_batch_size,
            max_batch_input_tokens=plan.batch.max_batch_input_tokens,
        ),
    )
    return Registration(
        plan=plan,
        model_cls=graph_api_pipeline_model(
            CausalDecoder, _planned(plan, stages), vision_cls=VisionEncoder
        ),
        pipeline_config=pipeline_config,
        devices=[device.to_device() for device in devices],
        memory_plan=MemoryPlan(
            planned_max_batch_size=plan.batch.max_batch_size,
            footprint=sum(device.total for device in plan.devices),
            planned_max_length=plan.max_length,
        ),
    )


def _huggingface_config(settings: ModelSettings) -> PretrainedConfig:
    # What MAX reads, set after construction: its constructor checks keys that MAX never reads.
    config = PretrainedConfig()
    for key, value in {
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
        "head_dim": settings.head_dim,
        "vocab_size": settings.vocab_size,
        "max_position_embeddings": settings.max_position_embeddings,
    }.items():
        setattr(config, key, value)
    return config


def _planned(plan: Plan, stages: tuple[DecoderConfig, ...]) -> type[Any]:
    """The architecture configuration class of a deployment that is already resolved."""

    class PlannedConfig:
        """MAX's view of a plan's decoder configuration."""

        DEFAULT_ENCODING = plan.dtype.name
        SUPPORTED_ENCODINGS: frozenset[str] = frozenset({plan.dtype.name})

        def __init__(self) -> None:
            self.stages = stages
            self.vision = plan.vision
            self.max_batch_size = stages[0].max_batch_size

        @classmethod
        def initialize(cls, *_: Any, **__: Any) -> PlannedConfig:
            """The plan's configuration, whatever MAX's says: one was made from the other."""
            return cls()

        @staticmethod
        def construct_kv_params(*_: Any, **__: Any) -> KVCacheParamInterface:
            """The plan's KV cache parameters."""
            return stages_kv_params(stages)

        def get_kv_params(self) -> KVCacheParamInterface:
            """The plan's KV cache parameters."""
            return stages_kv_params(stages)

        def get_max_seq_len(self) -> int:
            """The plan's longest sequence."""
            return stages[0].max_seq_len

    return PlannedConfig
