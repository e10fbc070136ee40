"""MAX's own pipeline of the model, as ``max generate`` runs it, in this process."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from benchmarks.protocol import Generate, Generation, Prompts, serve


def load(settings: dict[str, Any]) -> tuple[Generate, str]:
    """Compiles MAX's pipeline of ``folder``.

    Args:
        settings: ``folder``, ``encoding``, ``batch``, ``max_length`` and ``memory_share``, the
            part of the machine's memory that it may take.
    """
    from max.pipelines import AutoModel

    model = AutoModel(
        settings["folder"],
        devices="cpu",
        quantization_encoding=settings["encoding"],
        max_length=settings["max_length"],
        max_batch_size=settings["batch"],
        device_memory_utilization=settings["memory_share"],
    )

    def generate(prompts: Prompts, new: int) -> Generation:
        made = Generation([[] for _ in prompts])
        with model.generate_iter(
            prompts, max_new_tokens=new, temperature=0.0, ignore_eos=True
        ) as batch:
            for tokens in batch:
                made.add([tokens[row][0] for row in range(len(prompts))])
        return made

    return generate, f"MAX {version('max')}"


if __name__ == "__main__":
    serve(load)
