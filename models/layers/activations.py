"""The feed-forwards' activations, by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable

from max.graph import TensorValue, ops

ACTIVATIONS: dict[str, Callable[[TensorValue], TensorValue]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_pytorch_tanh": lambda x: ops.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: ops.gelu(x, approximate="tanh"),
    "relu": ops.relu,
}
"""What each name computes; a family accepts no other."""
