"""Decoders: layers, model families, checkpoints, and the contract between them and MAX.

Nothing here knows Hydra or YAML: a decoder is given a ``DecoderConfig`` and is built from it.
"""

from pathlib import Path

from models.sources import sources_version

SOURCES_VERSION = sources_version(Path(__file__).parent)
"""Tells the sources that this process runs from all others, also if they are edited meanwhile."""
