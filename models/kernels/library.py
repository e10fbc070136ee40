"""The compiled library of our Mojo kernels."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

from mojo.run import subprocess_run_mojo

SOURCES = Path(__file__).parent
"""The folder of the kernels' sources."""


@cache
def kernels_version() -> str:
    """What tells the kernels of these sources and of this MAX from all others."""
    digest = hashlib.sha256(version("max").encode())
    for source in sorted(SOURCES.glob("*.mojo")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def max_cache_folder() -> Path:
    """Where MAX keeps what it compiles."""
    return Path(os.environ.get("MODULAR_CACHE_DIR") or Path.home() / ".cache" / "modular")


def cache_folder() -> Path:
    """Where what we compile is kept, beside it."""
    return max_cache_folder() / "rolecall"


@cache
def kernel_library() -> Path:
    """The file that a graph loads our kernels from.

    It is compiled from the sources once for each version of them and of MAX, and kept beside MAX's
    compiled graphs: given the sources, MAX compiles them anew for every graph, for two seconds.
    """
    library = cache_folder() / kernels_version() / "rolecall_kernels.mojoc"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            # A library keeps the name that it is compiled to.
            made = Path(scratch) / library.name
            done = subprocess_run_mojo(
                ["precompile", str(SOURCES), "-o", str(made)], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            made.replace(library)
    return library
