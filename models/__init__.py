"""Decoders: layers, model families, checkpoints, and the contract between them and MAX.

Nothing here knows Hydra or YAML: a decoder is given a ``DecoderConfig`` and is built from it.
"""
