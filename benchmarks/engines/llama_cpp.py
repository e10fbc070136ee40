"""llama.cpp, through the low-level interface of the llama-cpp-python package."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.protocol import Generate, Generation, Prompts, serve

STEP_TOKENS = 512
"""Tokens of one step: llama.cpp's own default of ``n_ubatch``, and ours."""


class Context:
    """A loaded file, and room for a batch of sequences.

    Args:
        file: The GGUF file.
        batch: Sequences at once.
        max_length: The longest sequence.
        threads: Threads to compute with.
    """

    def __init__(self, file: str, batch: int, max_length: int, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            file.encode(), llama_cpp.llama_model_default_params()
        )
        if model is None:
            raise RuntimeError(f"llama.cpp can't load {file}")
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = batch * max_length
        settings.n_batch = settings.n_ubatch = STEP_TOKENS
        settings.n_seq_max = batch
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, settings)
        if self._context is None:
            raise RuntimeError(f"llama.cpp can't make a context of {batch} x {max_length} tokens")
        self._batch = llama_cpp.llama_batch_init(STEP_TOKENS, 0, 1)

    def clear(self) -> None:
        """Forgets every sequence."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def prefill(self, sequence: int, prompt: Sequence[int]) -> int:
        """Computes a prompt, and gives its next token.

        Args:
            sequence: The sequence's number.
            prompt: Its tokens.
        """
        for start in range(0, len(prompt), STEP_TOKENS):
            chunk = prompt[start : start + STEP_TOKENS]
            last = start + len(chunk) == len(prompt)
            for row, token in enumerate(chunk):
                self._put(row, token, start + row, sequence, last and row == len(chunk) - 1)
            self._decode(len(chunk))
        return self._best(len(chunk) - 1)

    def step(self, tokens: Sequence[int], position: int) -> list[int]:
        """Computes one token of each sequence, and gives their next ones.

        Args:
            tokens: The tokens, by sequence.
            position: Where they are.
        """
        for row, token in enumerate(tokens):
            self._put(row, token, position, row, True)
        self._decode(len(tokens))
        return [self._best(row) for row in range(len(tokens))]

    def _put(self, row: int, token: int, position: int, sequence: int, logits: bool) -> None:
        batch = self._batch
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, logits
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence

    def _decode(self, count: int) -> None:
        self._batch.n_tokens = count
        status = self._api.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self, row: int) -> int:
        import numpy as np

        logits = self._api.llama_get_logits_ith(self._context, row)
        values = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocab_size)).contents
        return int(np.argmax(np.frombuffer(values, np.float32)))


def load(settings: dict[str, Any]) -> tuple[Generate, str]:
    """Loads a file.

    Args:
        settings: ``file``, ``batch``, ``max_length`` and ``threads``.
    """
    context = Context(
        settings["file"], settings["batch"], settings["max_length"], settings["threads"]
    )

    def generate(prompts: Prompts, new: int) -> Generation:
        context.clear()
        made = Generation([[] for _ in prompts])
        tokens = [context.prefill(at, prompt) for at, prompt in enumerate(prompts)]
        made.add(tokens)
        for position in range(len(prompts[0]), len(prompts[0]) + new - 1):
            tokens = context.step(tokens, position)
            made.add(tokens)
        return made

    return generate, f"llama-cpp-python {version('llama-cpp-python')}"


if __name__ == "__main__":
    serve(load)
