"""The engines, one module each, which run as processes of their own.

A module imports nothing of ours but the protocol, so that an interpreter that has only the
engine can run it; ``rolecall`` and ``max_pipeline`` run in the builder's.
"""
