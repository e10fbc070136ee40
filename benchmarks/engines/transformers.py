"""Hugging Face transformers: the folder's model in float32 on PyTorch's CPU kernels."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.protocol import Generate, Generation, Prompts, serve


def load(settings: dict[str, Any]) -> tuple[Generate, str]:
    """Loads the model of ``folder``.

    Args:
        settings: ``folder`` and ``threads``.
    """
    # It is a folder, so there is nothing to ask of a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    torch.set_num_threads(settings["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["folder"], dtype=torch.float32
    )

    def generate(prompts: Prompts, new: int) -> Generation:
        made = Generation([[] for _ in prompts])
        tokens, cache = torch.tensor([list(prompt) for prompt in prompts]), None
        with torch.inference_mode():
            for _ in range(new):
                out = model(
                    input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                cache = out.past_key_values
                tokens = out.logits[:, -1].argmax(-1, keepdim=True)
                made.add(tokens[:, 0].tolist())
        return made

    return generate, f"transformers {transformers.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    serve(load)
