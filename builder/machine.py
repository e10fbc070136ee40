"""What this machine has and gives, and what this process took of it."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""Where Linux describes a core's caches."""

UNKNOWN_CACHE = 8 << 20
"""The last-level cache where the system doesn't say."""

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

READS = 8
"""How often the array is read. The fastest counts: whatever else the machine does, it slows."""

LEAST_BYTES = 256 << 20
"""The least that is read at once."""

TIMES_CACHE = 4
"""The array is at least so many times as large as the last cache."""


def memory_bytes() -> int:
    """The host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def last_level_cache_bytes() -> int:
    """The processor's largest cache."""
    texts = [file.read_text().strip() for file in CACHES.glob("index*/size")]
    sizes = [int(text[:-1]) * _UNITS[text[-1]] for text in texts if text[-1:] in _UNITS]
    return max(sizes, default=UNKNOWN_CACHE)


def read_bandwidth() -> float:
    """Bytes per second that this machine reads from memory, with a thread per core.

    An array that no cache holds is reduced by bitwise or, which costs the cores next to nothing:
    what is measured is reading, as a decode step reads weights, and not copying.
    """
    cores = len(os.sched_getaffinity(0))
    # Of ones: the operating system maps pages of zeros to one page.
    parts = np.array_split(np.ones(_array_bytes() // 8, np.int64), cores)
    with ThreadPoolExecutor(cores) as pool:

        def read_all() -> None:
            # numpy gives up the interpreter lock while it reduces.
            list(pool.map(np.bitwise_or.reduce, parts))

        fastest = min(_seconds(read_all) for _ in range(READS))
    return sum(part.nbytes for part in parts) / fastest


def peak_resident_bytes() -> int:
    """The most memory that this process had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _array_bytes() -> int:
    return max(LEAST_BYTES, TIMES_CACHE * last_level_cache_bytes())


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
