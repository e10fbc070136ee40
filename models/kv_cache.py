"""The paged KV cache: its parameters, and what is the host's own of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from max.driver import Buffer
from max.dtype import DType
from max.graph import BufferType, TensorType
from max.nn.kv_cache import (
    KVCacheInputsPerDevice,
    KVCacheParamInterface,
    KVCacheParams,
    MHAKVCacheParams,
    MLAKVCacheParams,
    MultiKVCacheParams,
)
from max.nn.kv_cache.cache_params import KVCacheBuffer

from models.buffers import zeroed
from models.config import DecoderConfig
from models.placement import Placement, stage_role
from models.settings import ModelSettings


def kv_cache_params(
    settings: ModelSettings,
    placement: Placement,
    dtype: DType,
    page_size: int,
    prefix_caching: bool = False,
) -> KVCacheParams | None:
    """The KV cache of a stage's layers; ``None`` where none of them attends.

    Args:
        settings: The model.
        placement: The stage's devices and layers.
        dtype: The dtype of what is cached.
        page_size: Tokens of a page.
        prefix_caching: Whether sequences that begin alike share pages.
    """
    if not settings.attending(placement.layers):
        return None
    shared: dict[str, Any] = {
        "dtype": dtype,
        "num_layers": len(settings.attending(placement.layers)),
        "page_size": page_size,
        "devices": list(placement.devices),
        "data_parallel_degree": placement.data,
        "enable_prefix_caching": prefix_caching,
        # MAX would copy a page between replicas; on the CPU a graph does not wait for its copies.
        "enable_dp_cross_replica_prefix_copy": False,
        # Pages are told apart by their hash alone, so by one in which no two prompts collide.
        "kv_hash_algo": "sha256",
    }
    # MAX divides heads over all devices of a replica; where each of them has all, it is given more.
    copies = placement.group // placement.tensor
    if settings.latent is not None:
        latents = HostMLAKVCacheParams if placement.on_host else MLAKVCacheParams
        return latents(
            **shared,
            head_dim=settings.latent.cached_dim,
            num_q_heads=settings.num_heads * copies,
        )
    heads = HostMHAKVCacheParams if placement.on_host else MHAKVCacheParams
    return heads(
        **shared,
        head_dim=settings.head_dim,
        n_kv_heads=settings.num_kv_heads * copies,
        allow_kv_head_replication=True,
    )


def with_prefix_caching(
    params: KVCacheParamInterface, prefix_caching: bool
) -> KVCacheParamInterface:
    """The same cache, where sequences that begin alike share pages, or don't.

    A graph takes the same inputs either way: sharing is what the manager puts into them.

    Args:
        params: The cache of a graph, or of several stages.
        prefix_caching: Whether they share.
    """
    assert isinstance(params, KVCacheParams | MultiKVCacheParams)
    return replace(params, enable_prefix_caching=prefix_caching)


class _OnHost(KVCacheParams):
    """MAX's parameters, without the inputs that only accelerators' kernels read.

    Pages cost nothing until they are written. MAX fills a pool with zeros at once, about three
    seconds per GiB on a small machine; memory that the operating system zeroes when it is first
    touched starts at once.
    """

    def allocate_buffers(self, total_num_pages: int, _prefix: str = "") -> list[KVCacheBuffer]:
        """One zeroed pool per device, grouped by replica.

        Args:
            total_num_pages: Pages per replica, the null page included.
        """
        shape = (total_num_pages, *self.shape_per_block)
        return [
            KVCacheBuffer(
                leaf_id=self.leaf_id(_prefix),
                values=[zeroed(BufferType(self.dtype, shape, device)) for device in devices],
                scales=None,
                replicates_kv_across_tp=self.replicates_kv_across_tp,
            )
            for devices in self.devices_per_replica
        ]

    def _get_symbolic_inputs_for_replica(
        self, *args: Any, **kwargs: Any
    ) -> list[KVCacheInputsPerDevice[TensorType, BufferType]]:
        inputs = super()._get_symbolic_inputs_for_replica(*args, **kwargs)
        return [_without_dispatch(device) for device in inputs]

    def _build_kvcache_inputs_per_device(
        self, *args: Any, **kwargs: Any
    ) -> KVCacheInputsPerDevice[Buffer, Buffer]:
        return _without_dispatch(super()._build_kvcache_inputs_per_device(*args, **kwargs))


@dataclass(kw_only=True)
class HostMHAKVCacheParams(_OnHost, MHAKVCacheParams):
    """A cache of keys and values."""


@dataclass(kw_only=True)
class HostMLAKVCacheParams(_OnHost, MLAKVCacheParams):
    """A cache of latents."""


def _without_dispatch(inputs: Any) -> Any:
    return replace(inputs, attention_dispatch_metadata=None, mla_num_partitions=None)


def stages_kv_params(stages: Sequence[DecoderConfig]) -> KVCacheParamInterface:
    """The KV cache of all stages: one stage's, or a tree with one subtree per stage."""
    params = {stage_role(s.placement): s.kv_params for s in stages if s.kv_params is not None}
    assert params, "a model in which no layer attends is refused"
    if len(stages) == 1:
        return next(iter(params.values()))
    return MultiKVCacheParams.from_params(params)
