"""What MAX's own commands serve with our decoders: ``--custom-architectures models.architectures``.

``ARCHITECTURES`` overrides MAX's implementation of the families of ``models/families`` that take
text alone. The pipeline model class is the one that our own runner uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from max.dtype import DType
from max.graph import DeviceRef
from max.graph.weights import WeightData, Weights, WeightsFormat
from max.nn.kv_cache import KVCacheParamInterface
from max.pipelines.context import TextContext
from max.pipelines.kv_cache.config import KVCacheConfig
from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner
from max.pipelines.lib import PipelineConfig, SupportedArchitecture, TextTokenizer
from max.pipelines.lib.config import MAXModelConfig
from max.pipelines.lib.interfaces.arch_config import ArchConfigWithBoundedMaxSeqLen
from max.pipelines.modeling.types import PipelineTask

from models.batch_processor import GraphApiDecoderBatchProcessor
from models.checkpoints import open_checkpoint
from models.checkpoints.base import canonical_name
from models.config import DecoderConfig, VisionConfig
from models.decoder import CausalDecoder
from models.families import FAMILIES
from models.families.base import Family
from models.finalize import ServingLimits, check_accelerated_model, decoder_config
from models.kv_cache import stages_kv_params
from models.placement import Placement
from models.registration_graph_api import (
    check_data_parallelism,
    graph_api_pipeline_model,
)

ENCODINGS = {"float32": DType.float32, "bfloat16": DType.bfloat16}
"""What weights, activations and the KV cache are in, by MAX's name; MAX refuses the second on the
CPU."""

DEFAULT_BATCH_SIZE = 8
"""The sequences of a step where neither the user nor MAX's plan says."""

DEFAULT_BATCH_INPUT_TOKENS = 512
"""The tokens of a step where MAX's configuration says none."""


class ServedConfig(ArchConfigWithBoundedMaxSeqLen):
    """MAX's view of a decoder's configuration, made from MAX's of the pipeline.

    Args:
        pipeline_config: MAX's configuration of the pipeline.
        model_config: MAX's configuration of the model.
        max_seq_len: The longest sequence served.
    """

    DEFAULT_ENCODING: ClassVar[str] = "float32"
    SUPPORTED_ENCODINGS: ClassVar[set[str]] = set(ENCODINGS)

    vision: ClassVar[VisionConfig | None] = None
    """No images: what MAX's command prepares them with needs PyTorch."""

    def __init__(
        self, pipeline_config: PipelineConfig, model_config: MAXModelConfig, *, max_seq_len: int
    ) -> None:
        self.max_seq_len = max_seq_len
        self.max_batch_size = pipeline_config.runtime.max_batch_size or DEFAULT_BATCH_SIZE
        self._pipeline_config = pipeline_config
        self._model_config = model_config
        self._settings = open_checkpoint(Path(model_config.model_path)).settings

    @classmethod
    def initialize(
        cls,
        pipeline_config: PipelineConfig,
        model_config: MAXModelConfig | None = None,
        *,
        max_seq_len: int,
    ) -> ServedConfig:
        """Makes the configuration of a pipeline.

        Args:
            pipeline_config: MAX's configuration of the pipeline.
            model_config: MAX's configuration of the model; the pipeline's main one by default.
            max_seq_len: The longest sequence served.

        Raises:
            ConfigError: If the checkpoint is of no family, or can't be computed.
            ValueError: If there are replicas, and a device is none.
        """
        chosen = pipeline_config.model if model_config is None else model_config
        replicas, devices = chosen.data_parallel_degree, chosen.device_specs
        check_data_parallelism(CausalDecoder, replicas, len(devices))
        config = cls(pipeline_config, chosen, max_seq_len=max_seq_len)
        if not config.devices[0].is_cpu():
            check_accelerated_model(config._settings)
            encoding = chosen.quantization_encoding
            if encoding != "bfloat16":
                raise ValueError(
                    f"quantization_encoding={encoding}, but accelerators compute in bfloat16"
                )
        return config

    @property
    def devices(self) -> list[DeviceRef]:
        """The devices."""
        specs = self._model_config.device_specs
        return [DeviceRef(spec.device_type, spec.id) for spec in specs]

    @property
    def stages(self) -> tuple[DecoderConfig, ...]:
        """The finalized configuration of the one stage."""
        config, runtime = self._model_config, self._pipeline_config.runtime
        devices, replicas = self.devices, config.data_parallel_degree
        settings = self._settings
        return (
            decoder_config(
                settings,
                Placement(
                    devices=tuple(devices),
                    tensor=len(devices) // replicas,
                    data=replicas,
                    expert=runtime.ep_size,
                    layers=range(settings.num_layers),
                ),
                ENCODINGS[config.quantization_encoding or self.DEFAULT_ENCODING],
                ServingLimits(
                    max_seq_len=self.max_seq_len,
                    max_batch_size=self.max_batch_size,
                    max_batch_input_tokens=runtime.max_batch_input_tokens
                    or DEFAULT_BATCH_INPUT_TOKENS,
                    page_size=config.kv_cache.kv_cache_page_size,
                    # A page says nothing of the state that a request has beside it.
                    prefix_caching=config.kv_cache.enable_prefix_caching
                    and not settings.recurrent(range(settings.num_layers)),
                ),
            ),
        )

    @staticmethod
    def construct_kv_params(
        huggingface_config: Any,
        pipeline_config: PipelineConfig,
        devices: list[DeviceRef],
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
    ) -> KVCacheParamInterface:
        """The KV cache's parameters, as MAX asks for them before there is a configuration."""
        del huggingface_config, devices, kv_cache_config, cache_dtype
        length = pipeline_config.model.max_length
        assert length is not None, "MAX resolves the longest sequence first"
        return ServedConfig.initialize(pipeline_config, max_seq_len=length).get_kv_params()

    def get_kv_params(self) -> KVCacheParamInterface:
        """The KV cache's parameters."""
        return stages_kv_params(self.stages)


# MAX's server sends the class to its worker by its name, so it is where that says.
ServedDecoder = graph_api_pipeline_model(
    CausalDecoder, ServedConfig, __module__=__name__, __qualname__="ServedDecoder"
)
"""The pipeline model class of every architecture."""


def canonical_state_dict(
    family: Family, state_dict: Mapping[str, Weights], **_: Any
) -> dict[str, WeightData]:
    """Names a checkpoint's tensors as our layers do (MAX's ``WeightsAdapter``).

    Args:
        family: The family that serves it.
        state_dict: The tensors by the names of the checkpoint.
    """
    named = {canonical_name(family, name): weight for name, weight in state_dict.items()}
    return {name: weight.data() for name, weight in named.items() if name is not None}


def _architecture(family: Family, name: str) -> SupportedArchitecture:
    return SupportedArchitecture(
        name=name,
        example_repo_ids=[],
        default_encoding="float32",
        supported_encodings=set(ENCODINGS),
        pipeline_model=ServedDecoder,
        task=PipelineTask.TEXT_GENERATION,
        tokenizer=TextTokenizer,
        default_weights_format=WeightsFormat.safetensors,
        context_type=TextContext,
        config=ServedConfig,
        weight_adapters={WeightsFormat.safetensors: partial(canonical_state_dict, family)},
        multi_gpu_supported=True,
        batching=GraphApiDecoderBatchProcessor,
        memory_planner=PagedMemoryPlanner,
        # A step is prepared when the one before it has its tokens.
        supports_overlap_scheduler=False,
        supports_device_graph_capture=False,
        required_arguments={"enable_prefix_caching": False} if family.keeps_state else {},
    )


ARCHITECTURES: list[SupportedArchitecture] = [
    _architecture(family, name)
    for family in FAMILIES
    if not family.takes_images
    for name in family.architectures
]
"""What MAX imports."""
