"""The version of the sources that decoders are built from."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sources_version(folder: Path) -> str:
    """What tells the Python sources of a folder from all others.

    Args:
        folder: The folder, and what is below it.
    """
    digest = hashlib.sha256()
    for source in sorted(folder.rglob("*.py")):
        # Editors leave links to nowhere beside what they edit.
        if source.is_file():
            digest.update(str(source.relative_to(folder)).encode() + source.read_bytes())
    return digest.hexdigest()
