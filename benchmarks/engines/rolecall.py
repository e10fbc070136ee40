"""Rolecall itself: a deployment that is composed, resolved, built and compiled in this process."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from benchmarks.protocol import Generate, Generation, Prompts, serve


def load(settings: dict[str, Any]) -> tuple[Generate, str]:
    """Compiles the deployment of ``overrides``.

    Args:
        settings: ``overrides``: what the command line would say.
    """
    from builder.build import build
    from builder.compile import compile_registration, process_session
    from builder.compose import compose
    from builder.resolve import resolve
    from builder.run import Request, Runner
    from builder.sampling import Sampler
    from builder.schema import SamplingConfig
    from builder.sources import fetch
    from models.checkpoints import open_checkpoint

    config = compose(settings["overrides"])
    plan = resolve(config.model, config.deployment, open_checkpoint(fetch(config.model)))
    runner = Runner(compile_registration(build(plan), process_session()))
    runner.touch_pages()

    def generate(prompts: Prompts, new: int) -> Generation:
        # The runner mixes prefill and decode: earlier prompts go on until the last has them all.
        limit = plan.max_length - max(map(len, prompts))
        requests = [
            Request(list(prompt), new if prompt is prompts[-1] else limit, Sampler(greedy, 0))
            for prompt in prompts
        ]
        last = requests[-1]
        runner.run(requests, should_stop=lambda: len(last.ids) == new)
        assert requests[0].started is not None
        ids = [request.ids[:new] for request in requests]
        return Generation(ids, requests[0].started, last.token_times)

    greedy = SamplingConfig()
    return generate, f"MAX {version('max')}"


if __name__ == "__main__":
    serve(load)
