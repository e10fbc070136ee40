"""A decode step made of the one before: every sequence goes on by one token, nothing else changes.

On the host most of a step's inputs are then those of the step before, and the others count up.
MAX's managers make them anew each time, which takes a tenth of a small model's step. The weights
that a step reads leave nothing of the interpreter in the caches, so what is done between two steps
is little and simple: values are written through memory views, adding to an array would take 10 us.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from max import tree
from max.driver import Buffer
from max.engine import Model
from max.nn.kv_cache import KVCacheInputsPerDevice

from models.role_contracts import DecoderInputs

_LASTING = {
    "tokens",
    "input_row_offsets",
    "host_input_row_offsets",
    "data_parallel_splits",
    "return_n_logits",
    "kv",
    "signals",
    "constants",
}
"""The fields of a contract that stay as they are or count up."""


class RepeatedStep:
    """Inputs that move on by one token per sequence, in buffers of their own.

    Args:
        model: The compiled graph.
        inputs: The contract of a step in which every sequence decoded one token.
        page_size: Tokens of a KV page.
    """

    def __init__(self, model: Model, inputs: DecoderInputs[Buffer, Buffer], page_size: int) -> None:
        self._model = model
        self._counting: list[memoryview] = []
        self._copies: dict[int, tuple[Buffer, npt.NDArray[Any]]] = {}
        caches = tree.leaves(inputs.kv, leaf=KVCacheInputsPerDevice)
        lengths = np.concatenate([cache.cache_lengths.to_numpy() for cache in caches])
        # The next token of a sequence whose length is a multiple needs a page.
        self._left = int((-(lengths.astype(np.int64) + 1) % page_size).min())
        for cache in caches:
            for counts in (cache.cache_lengths, cache.max_cache_length):
                if id(counts) not in self._copies:
                    self._counting.append(self._copy(counts)[1].reshape(-1).data)
            for same in (cache.lookup_table, cache.max_prompt_length):
                self._copy(same)
        for field in ("input_row_offsets", "host_input_row_offsets", "data_parallel_splits"):
            if (value := getattr(inputs, field)) is not None:
                self._copy(value)
        self._tokens = self._copy(inputs.tokens)[1].data
        leaves = tree.leaves(inputs)
        self._leaves = [
            self._copies[id(leaf)][0] if id(leaf) in self._copies else leaf for leaf in leaves
        ]

    @property
    def left(self) -> int:
        """Steps until some sequence needs another page."""
        return self._left

    def execute(self, tokens: Sequence[int]) -> Buffer:
        """Computes the next step.

        Args:
            tokens: Each sequence's last token, in the batch's order.

        Returns:
            float32 [sequences, vocabulary].
        """
        assert self._left > 0, "a sequence needs another page"
        self._left -= 1
        for row, token in enumerate(tokens):
            self._tokens[row] = token
        for counts in self._counting:
            for row, count in enumerate(counts):
                counts[row] = count + 1
        logits = self._model.execute(*self._leaves)[0]
        assert isinstance(logits, Buffer)
        return logits

    def _copy(self, buffer: Buffer) -> tuple[Buffer, npt.NDArray[Any]]:
        """A buffer of our own with the same values, and the array that it is."""
        if id(buffer) not in self._copies:
            array = buffer.to_numpy().copy()
            self._copies[id(buffer)] = (Buffer.from_numpy(array), array)
        return self._copies[id(buffer)]


def can_repeat(inputs: DecoderInputs[Buffer, Buffer]) -> bool:
    """Whether a step of this contract can be made of the one before, on the host.

    Args:
        inputs: The contract of a step.
    """
    present = {
        field.name
        for field in dataclasses.fields(inputs)
        if getattr(inputs, field.name) is not None
    }
    return present <= _LASTING and inputs.tokens.device.is_host
