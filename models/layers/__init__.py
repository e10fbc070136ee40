"""The layers that decoders are composed of.

Each takes one activation per device of the stage and returns one per device, so the same layer
serves one device and many.
"""
