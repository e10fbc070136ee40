"""The paged KV cache on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from max.driver import Buffer
from max.nn.kv_cache import MHAKVCacheParams
from max.nn.kv_cache.cache_params import KVCacheBuffer


@dataclass(kw_only=True)
class HostMHAKVCacheParams(MHAKVCacheParams):
    """MAX's parameters, with pages that cost nothing until they are written.

    MAX fills a pool with zeros at once, about three seconds per GiB on a small machine; memory
    that the operating system zeroes when it is first touched starts at once.
    """

    def allocate_buffers(self, total_num_pages: int, _prefix: str = "") -> list[KVCacheBuffer]:
        """One zeroed pool per device, grouped by replica.

        Args:
            total_num_pages: Pages per replica, the null page included.
        """
        shape = (total_num_pages, *self.shape_per_block)
        dtype = self.dtype.to_numpy()
        return [
            KVCacheBuffer(
                leaf_id=self.leaf_id(_prefix),
                values=[Buffer.from_numpy(np.zeros(shape, dtype)) for _ in devices],
                scales=None,
                replicates_kv_across_tp=self.replicates_kv_across_tp,
            )
            for devices in self.devices_per_replica
        ]
